"""Facts of the build; importing it registers the operators of torch.ops.moe_ext."""

torch_version: str
cuda_version: str | None
compiler: str
cxx11_abi: bool

def empty_cache() -> None: ...
def isa() -> str: ...
def products() -> dict[str, str]: ...
