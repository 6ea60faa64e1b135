"""Facts of the build; importing it registers the operators of torch.ops.moe_ext."""

torch_version: str
cuda_version: str | None
compiler: str

def isa() -> str: ...
