"""The wrapper that torch.compile puts around a module."""

from typing import Any


def uncompiled(module: Any) -> Any:
    """Returns the module inside torch.compile's wrapper, or the module itself if it has none."""
    return getattr(module, "_orig_mod", module)
