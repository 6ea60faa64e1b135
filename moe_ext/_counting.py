"""Counts the parameters of a model, and those that the computation of a token uses."""

from collections.abc import Iterable
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from moe_ext._compiled import unwrapped_module
from moe_ext.checks import require_sizes, required

__all__ = ["ParameterCount", "count_parameters"]

# The names of the option in configurations of transformers.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")


SparsePart = tuple[Iterable[Tensor], Fraction, Fraction]
"""Parameters of this rank, the share of them that a token uses, and all of them / these.

If this rank has no row of a parameter, the last number is that of all rows.
"""


@runtime_checkable
class _Sparse(Protocol):
    """A module with parameters that a token uses only in part."""

    def _sparse_parts(self) -> list[SparsePart]: ...


@runtime_checkable
class _Packed(Protocol):
    """A module whose parameters are packed: the number of weights differs from their size."""

    def _packed_sizes(self) -> Iterable[tuple[Tensor, int]]: ...


class ParameterCount(NamedTuple):
    """Holds the numbers of parameters of a model.

    Attributes:
        total: the number of all parameters, with the experts of all ranks.
        active: the number of parameters that the computation of one token uses.
    """

    total: int
    active: int


def count_parameters(model: nn.Module, k: int | None = None) -> ParameterCount:
    """Counts the total and the active parameters of a `MoE` layer, or of a model with such layers.

    A token uses k of the E experts of a layer, its shared expert and its gate, and all parameters
    outside the layers, embeddings too. If the number of experts differs between tokens, or experts
    differ in size, the count is the mean for a balanced load. A parameter that several modules
    share counts once, and a lazy one has no parameters yet. Of packed weights, the numbers count,
    not the bytes.

    The model does not run, so it can be on the meta device. Models of transformers are counted
    too, with any implementation of the experts.

    Args:
        model: a layer or a model.
        k: experts per token in the layers of transformers. None: the number in the model's
            configuration.

    Raises:
        ValueError: k is out of range, or None and unknown.

    Example:
        >>> count_parameters(MoE(8, num_experts=4, k=2, hidden_sizes=[16]))
        ParameterCount(total=1088, active=576)
    """
    seen: dict[int, Tensor] = {}  # keeps them alive, so that no id is used twice
    total, active = 0, Fraction(0)

    packed = {  # the number of weights in a row of panels
        id(panels): size
        for module in model.modules()
        if isinstance(module, _Packed)
        for panels, size in module._packed_sizes()
    }

    def size_of(parameter: Tensor, minimum: int) -> int:
        num_rows, *row = parameter.shape or (1,)
        return max(num_rows, minimum) * packed.get(id(parameter), prod(row))

    def add(parameters: Iterable[Tensor], share: Fraction, copies: Fraction | None = None) -> None:
        nonlocal total, active
        new = {id(p): p for p in parameters if id(p) not in seen and not is_lazy(p)}
        seen.update(new)
        # A rank without experts knows the size of one: a row, see `Experts`.
        minimum = 0 if copies is None else 1
        size = (copies or 1) * sum(size_of(p, minimum) for p in new.values())
        total += int(size)
        active += share * size

    for module in model.modules():
        if isinstance(module, _Sparse):
            for part in module._sparse_parts():
                add(*part)
        elif is_of_transformers(module):
            num_experts: Any = module.num_experts
            rule = (
                f"be given, because the configuration has none of {', '.join(_EXPERTS_PER_TOKEN)}"
            )
            used = experts_per_token(model) if k is None else k
            (used,) = require_sizes(
                "count_parameters", k=required(used, "count_parameters: k", rule)
            )
            add(module.parameters(), Fraction(used, num_experts))
    add(model.parameters(), Fraction(1))
    return ParameterCount(total, round(active))


def is_of_transformers(module: nn.Module) -> bool:
    """Returns whether a module holds the experts of a mixture layer of transformers."""
    # The decorator and the quantized classes of transformers define _apply_gate, and PackedExperts
    # of our integration defines is_of_transformers.
    has_gate = hasattr(module, "_apply_gate") or hasattr(module, "is_of_transformers")
    holds_experts = has_gate and hasattr(module, "num_experts")
    return (
        holds_experts and unwrapped_module(module) is module
    )  # a wrapper has these attributes too


def experts_per_token(model: nn.Module) -> int | None:
    """Returns k of a configuration of transformers; None if there is none."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    texts = [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    values = [getattr(text, name, None) for text in texts for name in _EXPERTS_PER_TOKEN]
    return next((value for value in values if isinstance(value, int)), None)
