"""Recognises the activation of an experts module of transformers by its values."""

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.moe import use_experts_implementation

from moe_ext import ops
from moe_ext.integrations._transformers.experts import WEIGHT_NAMES

__all__ = ["KnownActivation", "activation_of"]

_KNOWN_FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm"}


def _read_flags() -> dict[str, object]:
    """Returns the flags of experts modules that this module does not know, with their defaults.

    Raises:
        ImportError: transformers lacks a flag that this module needs.
    """
    parameters = inspect.signature(use_experts_implementation).parameters
    missing = sorted(_KNOWN_FLAGS - set(parameters))
    if missing:
        raise ImportError(
            "moe_ext.integrations.transformers: use_experts_implementation of transformers must "
            f"have the flags {', '.join(missing)}; transformers {transformers.__version__} lacks "
            "them: pip install 'transformers>=5.23'"
        )
    known = {"experts_class", "experts_interface", *_KNOWN_FLAGS}
    return {name: parameter.default for name, parameter in parameters.items() if name not in known}


_UNKNOWN_FLAGS = _read_flags()


class KnownActivation(NamedTuple):
    name: ops.Activation
    args: tuple[float, float, float] | None = None  # limit, alpha, offset


# The activations of modules, by the attributes that decide them.
_activations: WeakKeyDictionary[nn.Module, tuple[list[object], KnownActivation | str]]
_activations = WeakKeyDictionary()


# While torch 2.11 compiles, it can pass no module to a function with a constant result. There, the
# call breaks the graph.
_constant = (
    torch.compiler.assume_constant_result if torch.__version__ >= "2.12" else torch.compiler.disable
)


@_constant  # type: ignore[untyped-decorator]
def activation_of(module: nn.Module) -> KnownActivation | str:
    """Returns the activation of a module, or the reason why the operator cannot compute it."""
    # A hook may replace `forward` by a closure over the module, which would keep the module alive.
    # PEFT makes new parametrizations in each forward pass.
    unrelated = {"training", "forward", "parametrizations"}
    own = [*vars(module).items(), *module._modules.items()]
    decisive = [value for name, value in own if name not in unrelated and not name.startswith("_")]
    decisive += module._parameters
    earlier, activation = _activations.get(module, ([], ""))
    if len(decisive) != len(earlier) or not all(map(operator.is_, decisive, earlier)):
        with _disable_current_modes():  # tensors of torch.export have no values
            activation = _unknown_part(module) or _recognise(module)
        _activations[module] = decisive, activation
    return activation


def _unknown_part(module: nn.Module) -> str | None:
    """Returns the flag or parameter of a module that `experts_forward` does not know."""
    for name, default in _UNKNOWN_FLAGS.items():
        if (value := getattr(module, name, default)) != default:
            return f"the flag {name} = {value} is unknown"
    biases = {f"{name}_bias" for name in WEIGHT_NAMES}
    known = {*WEIGHT_NAMES, *biases, "post_expert_norm", "parametrizations"}
    for name, _ in module.named_parameters():
        if name.split(".")[0] not in known:
            return f"the parameter {name} is unknown"
    return None


@torch.no_grad()
def _recognise(module: nn.Module) -> KnownActivation | str:
    """Returns the activation whose values on a probe are those of the module, or why there is none.

    The probe has magnitudes from 0.01 to 1e4, because some functions differ only for small or for
    large numbers. The tolerance is that of float32: some modules compute their activation in
    float32 in any dtype.
    """
    function = getattr(module, "_apply_gate" if module.has_gate else "act_fn")
    # A weight with parametrizations may be cached at its first use, here without a gradient.
    weight = next(module.parameters())
    device = torch.device("cpu") if weight.is_meta else weight.device
    probe = _probe()
    with torch.autocast(device.type, enabled=False), torch.autocast("cpu", enabled=False):
        try:
            expected = function(probe.to(device)).cpu().double()
            args = _clamp_args(function, device) if module.has_gate else None
        except Exception as error:  # the code of the module may raise any error
            return f"its activation fails on float64 numbers: {error}"
        for activation in _candidates(bool(module.has_gate), args):
            actual = _activate(activation, probe)
            if torch.allclose(actual, expected, rtol=1e-6, atol=1e-9):
                return activation
    return f"its activation is none of {', '.join(ops.ACTIVATIONS)}"


def _candidates(
    has_gate: bool, args: tuple[float, float, float] | None
) -> Iterator[KnownActivation]:
    """Returns the activations of the operator that may be those of a module."""
    for name in ops.ACTIVATIONS:
        if has_gate == (name in ops.GATED_ACTIVATIONS):
            if name not in ops.CLAMPED_ACTIVATIONS:
                yield KnownActivation(name)
            elif args is not None:
                yield KnownActivation(name, args)


def _clamp_args(
    function: Callable[[Tensor], Tensor], device: torch.device
) -> tuple[float, float, float] | None:
    """Returns the limit, alpha and offset of a gate, if it is a clamped SwiGLU; may return None.

    With the gate 1 and a number u, a clamped SwiGLU with a limit of at least 1 is
    s · (clamp(u, -limit, limit) + offset), where s = sigmoid(alpha). Four values of u give s, the
    limit and the offset.
    """
    far = 1e6  # beyond the numbers of the probe
    z = torch.tensor([[1, 0], [1, 1], [1, far], [1, -far]], dtype=torch.float64, device=device)
    at_zero, at_one, above, below = function(z).double().flatten().tolist()
    s = at_one - at_zero
    if not 0 < s < 1:
        return None
    limit, alpha, offset = (above - below) / (2 * s), math.log(s / (1 - s)), at_zero / s
    if not 1 <= limit <= 1e3:  # the probe must have larger numbers
        return None
    limit, alpha, offset = (float(f"{value:.12g}") for value in (limit, alpha, offset))
    return limit, alpha, offset


def _probe() -> Tensor:
    """Returns [256, 8] random numbers in float64 with magnitudes from 0.01 to 1e4."""
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(2, 256, 8, generator=generator, dtype=torch.float64, device="cpu")
    return (uniform[0] - 0.5).sign() * 10 ** (6 * uniform[1] - 2)


def _activate(activation: KnownActivation, z: Tensor) -> Tensor:
    """Applies an activation of the operator to z: one expert with identity matrices as weights."""
    columns = z.shape[1]
    width = columns // 2 if activation.name in ops.GATED_ACTIVATIONS else columns
    weights = [torch.eye(size, dtype=z.dtype, device="cpu")[None] for size in (columns, width)]
    return ops.experts(z, weights, activation=activation.name, activation_args=activation.args)
