"""Adapters that a wrapper gives to an experts module of transformers for one forward pass."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

from torch import nn

from moe_ext import ops

_NAME = "_given_lora"  # the attribute of a module, which lacks it as long as there are none


class GivenLoRA(NamedTuple):
    """The adapters of one parameter.

    Attributes:
        pair: A and B in the orientation of `moe_ext.ops.experts`.
        form: registers W + A B as a parametrization of the module within a context, for
            implementations that read the parameter.
    """

    pair: ops.LoRA
    form: Callable[[], AbstractContextManager[None]]


@contextmanager
def give_lora(module: nn.Module, parameter: str, lora: GivenLoRA) -> Iterator[None]:
    """Gives adapters of a parameter to a module within the context."""
    earlier = _given(module)
    setattr(module, _NAME, earlier | {parameter: lora})
    try:
        yield
    finally:
        setattr(module, _NAME, earlier)


def _given(module: nn.Module) -> dict[str, GivenLoRA]:
    given: dict[str, GivenLoRA] = getattr(module, _NAME, {})
    return given


def given_pairs(module: nn.Module, parameters: Sequence[str]) -> list[ops.LoRA | None] | None:
    """Returns the adapters of each parameter, or None where none has any."""
    given = _given(module)
    if not given:
        return None
    return [given[name].pair if name in given else None for name in parameters]


@contextmanager
def formed_lora(module: nn.Module) -> Iterator[None]:
    """Forms W + A B of the given adapters within the context."""
    with ExitStack() as stack:
        for lora in _given(module).values():
            stack.enter_context(lora.form())
        yield


def forms_needlessly(module: nn.Module) -> bool:
    """Returns whether PEFT forms W + A B because moe_ext.integrations.peft is not imported."""
    if not hasattr(module, "parametrizations") or "moe_ext.integrations.peft" in sys.modules:
        return False
    lists = module.get_submodule("parametrizations").children()
    return any(
        type(child).__module__.startswith("peft.") for one in lists for child in one.children()
    )
