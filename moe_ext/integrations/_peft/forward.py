"""The forward pass of PEFT's models: the operator gets A and B of the experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from moe_ext._counting import is_of_transformers
from moe_ext.integrations._peft.layers import has_variant, sum_of
from moe_ext.integrations._transformers.experts import WEIGHT_NAMES
from moe_ext.integrations._transformers.given_lora import GivenLoRA, give_lora
from moe_ext.integrations._transformers.warnings import warn_once

__all__ = ["adapt_experts"]

_form = ParamWrapper._activate_lora


def adapt_experts() -> None:
    """Lets PEFT give A and B of the experts of transformers to the operator."""
    ParamWrapper._activate_lora = _activate_lora  # type: ignore[method-assign]


@contextmanager
def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
    """Gives the active adapters of a ParamWrapper to the operator, or else forms W + B A."""
    names = [name for name in active_adapters if name in self.lora_A]
    module = self.get_base_layer()
    reason = _refusal(self, module, names) if names and _is_ours(module) else ""
    if reason is not None:
        if reason:
            name, kind = self.parameter_name, type(module).__name__
            warn_once(
                f"moe_ext.integrations.peft: PEFT forms W + B A of {name} in {kind}: {reason}"
            )
        with _form(self, active_adapters):
            yield
        return

    def form() -> AbstractContextManager[None]:
        return cast("AbstractContextManager[None]", _form(self, active_adapters))

    dtype = self.get_param().dtype
    pair = sum_of(self, names, dtype)
    assert pair is not None
    with give_lora(module, self.parameter_name, GivenLoRA(pair, form)):
        yield


def _is_ours(module: nn.Module) -> bool:
    """Returns whether a module uses the experts implementation "moe_ext"."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return is_of_transformers(module) and implementation == "moe_ext"


def _refusal(wrapper: Any, module: nn.Module, names: Sequence[str]) -> str | None:
    """Returns why the operator cannot take the adapters of a ParamWrapper; None if it can."""
    if wrapper.parameter_name not in WEIGHT_NAMES:
        return f"the operator has adapters of {', '.join(WEIGHT_NAMES)} alone"
    if is_parametrized(module, wrapper.parameter_name):
        return "it has another parametrization"
    parameter = wrapper.get_param()
    if isinstance(parameter, DTensor):
        return "it is sharded over ranks"
    if parameter.dim() != 3 or not parameter.is_floating_point() or parameter.itemsize < 2:
        return f"it has the shape {list(parameter.shape)} and the dtype {parameter.dtype}"
    for name in names:
        if has_variant(wrapper, name):
            return f"the adapter {name} has DoRA, a bias or another variant of LoRA"
        if not isinstance(wrapper.lora_dropout[name], nn.Identity):
            return f"the adapter {name} has dropout"
    return None
