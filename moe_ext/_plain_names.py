"""The names that the tensors of a model have without wrappers around its modules."""

import re
from collections.abc import Iterable

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from moe_ext._former_names import current_names

# The attributes in which torch.compile, checkpoint_wrapper and FSDP hold the module.
_WRAPPED = re.compile(r"(?<![^.])(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def plain_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Maps names of the model's tensors to the names that they have without wrappers.

    The wrappers are those of `parallelize`, torch.compile, checkpoint_wrapper and FSDP, around the
    model or any of its modules.
    """
    # A model may have a module of its own that is called "module".
    replicas = [
        _WRAPPED.sub("", f"{path}.module.".removeprefix("."))
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, DistributedDataParallel | DataParallel)
    ]
    plain = {}
    for name in names:
        plain[name] = _WRAPPED.sub("", name)
        for prefix in sorted(replicas, key=len, reverse=True):  # inner wrappers first
            if plain[name].startswith(prefix):
                outside = prefix.removesuffix("module.")
                plain[name] = outside + plain[name].removeprefix(prefix)
    return plain


def names_here(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Maps saved names to names without wrappers, which are those of this version if wanted."""
    plain = {name: _WRAPPED.sub("", name) for name in saved}
    current = current_names(plain.values(), wanted)
    return {name: current.get(unwrapped, unwrapped) for name, unwrapped in plain.items()}
