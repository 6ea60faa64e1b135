"""The contract between a gate and the layer: `Gate` and what it returns, `Routing`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import require_k, require_sizes
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates._logits import logits

__all__ = ["Gate", "Routing"]


class Routing(NamedTuple):
    """A gate's routing decision for T tokens.

    A slot is a (token, expert) assignment. Slots are ordered by token.

    Attributes:
        gates: [T, K], or [R] with token_offsets; float32 or float64. The weight of each slot.
        expert_index: int64, in the shape of gates. The expert of each slot.
        importance: [E], the sum of each expert's gates (Eq. 6).
        load: [E], the expected number of tokens of each expert (Appendix A). Without noise it is
            the number of routed tokens, which has no gradient.
        token_offsets: [T + 1] int64, where each token's slots begin and end. None: K slots each.
        equal_load: every expert has R / E tokens, so that the layer need not read the counts.
        loss: scalar, the gate's own loss, which the layer adds to its own. None: there is none.
        metrics: scalars that describe the routing, for `MoEAux.metrics`.
        load_factors: the factors of the load of a hierarchical noisy gate: Load_primary(X) [a],
            Load_i(X^(i)) [a, b] and |X^(i)| [a] (`hierarchical_load`). Each is a sum over tokens;
            their product is not.
    """

    gates: Tensor
    expert_index: Tensor
    importance: Tensor
    load: Tensor
    token_offsets: Tensor | None = None
    equal_load: bool = False
    loss: Tensor | None = None
    metrics: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)
    load_factors: tuple[Tensor, ...] | None = None


class Gate(nn.Module):
    """Routes tokens to experts: what `MoE` asks of a gate.

    Derive a gate of your own from this class. Call ``super().__init__(d_model, num_experts, k)``
    and define `forward`; its result is easiest to make with `make_routing`:

        >>> class RoundRobinGate(Gate):
        ...     def forward(self, x, ranks=None):
        ...         t = torch.arange(len(x), device=x.device)[:, None]
        ...         expert_index = (t + torch.arange(self.k, device=x.device)) % self.num_experts
        ...         gates = torch.full_like(expert_index, 1 / self.k, dtype=torch.float32)
        ...         return self.make_routing(gates, expert_index, ranks=ranks)

    Args:
        d_model: D, the width of x.
        num_experts: E.
        k: experts per token, 1 <= k <= E; the average where tokens differ.

    Attributes:
        d_model, num_experts, k: as given.
        generator: source of the noise; None is torch's global one.
        experts_per_group: experts that have to stay on one rank; they are numbered one after
            another.
        routes_by_batch: whether a token's experts depend on the other tokens of the batch. Ranks
            that balance only their own tokens would then train different gates.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    routes_by_batch: ClassVar[bool] = False
    experts_per_group: int = 1
    generator: torch.Generator | None = None

    def __init__(self, d_model: int, num_experts: int, k: int) -> None:
        super().__init__()
        name = type(self).__name__
        require_sizes(name, d_model=d_model, num_experts=num_experts)
        require_k(name, k, num_experts)
        self.d_model = d_model
        self.num_experts = num_experts
        self.k = k

    def forward(self, x: Tensor, ranks: Ranks | None = None) -> Routing:
        """Routes the tokens x [T, D].

        Args:
            x: [T, D], T may be 0.
            ranks: the ranks whose tokens are balanced together: importance, load, loss and metrics
                are then sums over all of them. None: this rank alone.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, ranks=None)")

    if TYPE_CHECKING:
        __call__ = forward

    def logits(self, x: Tensor, weight: Tensor) -> Tensor:
        """x · weight in float32 at least, also under autocast.

        Args:
            x: [T, D].
            weight: [D, E].

        Returns:
            [T, E]. A row's bits do not depend on the other rows (on CUDA they may).
        """
        return logits(x, weight)

    def draw_noise(self, like: Tensor) -> Tensor:
        """Draws standard normal noise of the shape and type of `like`, from `generator`.

        Every gate of moe_ext that adds noise gets it from here. Override it to replay noise.
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
    ) -> Routing:
        """Makes the `Routing` of gates [T, K], with importance and load summed over the ranks.

        Args:
            gates: [T, K].
            expert_index: [T, K] int64, the expert of each gate.
            load: [E], the load of this rank's tokens; None is the number of routed tokens.
            ranks: see `forward`.
        """
        if load is None:
            load = ops.importance(torch.ones_like(gates), expert_index, self.num_experts)
        importance = ops.importance(gates, expert_index, self.num_experts)
        if ranks is not None:
            importance, load = ranks.sum(importance, load)
        return Routing(gates, expert_index, importance, load)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"
