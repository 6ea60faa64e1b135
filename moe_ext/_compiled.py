"""What torch.compile needs: functions that it runs as they are, modules without its wrapper."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that torch.compile runs without compiling it.

    Unlike torch.compiler.disable, this decorator does not import the compiler.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            result: T = torch.compiler.disable(function)(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    return run


def uncompiled(module: Any) -> Any:
    """Returns the module inside torch.compile's wrapper, or the module itself if it has none."""
    return getattr(module, "_orig_mod", module)


def unwrapped_module(module: Any) -> Any:
    """Returns the module inside the wrappers of torch.compile and of torch's checkpoint_wrapper."""
    inner = uncompiled(getattr(module, "_checkpoint_wrapped_module", module))
    return module if inner is module else unwrapped_module(inner)
