"""The wrappers that torch.compile and activation checkpointing put around a module."""

from typing import Any


def uncompiled(module: Any) -> Any:
    """Returns the module inside torch.compile's wrapper, or the module itself if it has none."""
    return getattr(module, "_orig_mod", module)


def unwrapped_module(module: Any) -> Any:
    """Returns the module inside the wrappers of torch.compile and of torch's checkpoint_wrapper."""
    inner = uncompiled(getattr(module, "_checkpoint_wrapped_module", module))
    return module if inner is module else unwrapped_module(inner)
