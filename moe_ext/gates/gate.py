"""The interface between `MoE` and a gate."""

from __future__ import annotations

import warnings
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from moe_ext import ops
from moe_ext.checks import require_dtype, require_k, require_sizes, require_tokens
from moe_ext.gates._logits import logits
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["Gate", "Routing"]

_TAKE_RANKS = {"forward", "make_routing"}


class Gate(nn.Module):
    """Routes tokens to experts; the base class of all gates.

    Derive a custom gate from this class. Call ``super().__init__(d_model, num_experts, k)`` and
    define `forward`. The method `make_routing` builds the `Routing` that `forward` returns:

        >>> class RoundRobinGate(Gate):
        ...     def forward(self, x, ranks=None):
        ...         t = torch.arange(len(x), device=x.device)[:, None]
        ...         expert_index = (t + torch.arange(self.k, device=x.device)) % self.num_experts
        ...         gates = torch.full_like(expert_index, 1 / self.k, dtype=torch.float32)
        ...         return self.make_routing(gates, expert_index, ranks=ranks)

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: experts per token, 1 <= k <= E; the mean if the number differs between tokens.

    Attributes:
        d_model: the constructor argument.
        num_experts: the constructor argument.
        k: the constructor argument.
        generator: source of the noise; None: torch's global generator.
        experts_per_group: number of consecutive experts that must stay on one rank.
        routes_by_batch: whether a token's experts depend on the other tokens of the batch. With
            several ranks, `MoE` then requires ``balance="global"``; otherwise the ranks' gates
            would diverge.
        replays: whether `forward` has a third argument ``expert_index=None`` and can replay a
            routing decision.
        shares_groups: whether ranks can share the groups of the gate with their secondary gates;
            see `moe_ext.gates.HierarchicalGate`. Such a gate takes no capacity and no
            zero-computation experts.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    routes_by_batch: ClassVar[bool] = False
    replays: ClassVar[bool] = False
    shares_groups: ClassVar[bool] = False
    # Whether forward gives ranks only to make_routing. MoE then sums importance and load itself.
    _sums_later: bool = False
    experts_per_group: int = 1
    generator: torch.Generator | None = None
    d_model: int
    num_experts: int
    k: int

    def __init__(self, d_model: int, num_experts: int, k: int) -> None:
        super().__init__()
        name = type(self).__name__
        self.d_model, self.num_experts = require_sizes(
            name, d_model=d_model, num_experts=num_experts
        )
        self.k = require_k(name, k, self.num_experts)

    def __init_subclass__(cls, **options: Any) -> None:
        """Declares replays for a class of an earlier version, by the arguments of its forward."""
        super().__init_subclass__(**options)
        if "_sums_later" not in vars(cls) and not vars(cls).keys().isdisjoint(_TAKE_RANKS):
            cls._sums_later = False  # its own functions may use the sums
        forward = vars(cls).get("forward")
        if "replays" in vars(cls) or not isinstance(forward, FunctionType):
            return
        code, former = forward.__code__, cls.replays
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        cls.replays = "expert_index" in names
        if cls.replays and not former:
            text = f"{cls.__name__}: declare replays = True, because forward takes expert_index"
            warnings.warn(text, DeprecationWarning, stacklevel=2)

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes the tokens x [T, D].

        A gate with ``replays = True`` has a third argument ``expert_index=None``. With expert_index
        [T, K] int64, it must route each token to the given experts. The gates are those of the
        current parameters. `MoE.forward` then accepts expert_index too.

        Args:
            x: [T, D]; T may be 0.
            ranks: the ranks that balance their tokens together. Importance, load, loss and metrics
                must then cover the tokens of all of them. None: only this rank.

        Returns:
            The `Routing` of this rank's tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, ranks=None)")

    if TYPE_CHECKING:
        __call__ = forward

    def _factory(self, device: Device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Returns the options with which a constructor makes parameters."""
        return {"device": device, "dtype": require_dtype(type(self).__name__, dtype)}

    @torch.no_grad()
    def _set_to_zero(self) -> None:
        """Sets all parameters and buffers to zero, the initial values of many gates."""
        for value in chain(self.parameters(), self.buffers()):
            value.zero_()

    def _warn_if_untrained(self, k: int, choices: int, remedy: str, part: str = "gate") -> None:
        """Warns if the only gate of each token is constant: one of `choices`, renormalized over k.

        A constructor that `explains_names` wraps calls this method.
        """
        if k == 1 < choices:
            warnings.warn(
                f"{type(self).__name__}: with k = 1 the {part} of every token is constant, and the "
                f"task's loss gives the weights of this gate no gradient; {remedy}",
                stacklevel=4,  # the caller of the constructor
            )

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """Computes x · weight in at least float32, also under autocast.

        Args:
            x: [T, D].
            weight: [D, E].

        Returns:
            [T, E]. On the CPU, a row is bitwise independent of the other rows. On CUDA, a row may
            depend on the number of rows.

        Raises:
            ValueError, TypeError: x or weight has a wrong shape or dtype.
        """
        self._require_tokens(x)
        (product,) = logits(x, weight)
        return product

    def _require_tokens(self, x: Tensor) -> None:
        """Requires that x is a floating-point tensor [T, D]."""
        require_tokens(type(self).__name__, x, self.d_model)

    def draw_noise(self, like: Tensor) -> Tensor:
        """Draws standard normal noise in the shape and dtype of `like` from `generator`.

        All noise of the gates in moe_ext comes from this method. Override it to replay noise.
        """
        if self.generator is None:
            return torch.randn_like(like)
        return torch.empty_like(like).normal_(generator=self.generator)

    def make_routing(
        self,
        gates: Tensor,
        expert_index: Tensor,
        *,
        load: Tensor | None = None,
        ranks: Ranks | None = None,
        logits: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Routing:
        """Makes a `Routing` from gates [T, K]; sums importance and load over the ranks.

        Args:
            gates: [T, K].
            expert_index: [T, K] int64, the expert of each gate.
            load: [E], the load of this rank's tokens; None: the number of routed tokens.
            ranks: the ranks to sum over; see `forward`.
            logits, scores: see `Routing`.

        Raises:
            ValueError, TypeError, IndexError: see `moe_ext.ops.importance_and_load`.
        """
        if load is None:
            importance, load = ops.importance_and_load(gates, expert_index, self.num_experts)
        else:
            importance = ops.importance(gates, expert_index, self.num_experts)
        if ranks is not None:
            importance, load = ranks.sum(importance, load)
        return Routing(gates, expert_index, importance, load, logits=logits, scores=scores)

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        return self._sizes()

    def _sizes(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"
