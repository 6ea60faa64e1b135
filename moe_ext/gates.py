"""The gating networks, Section 2.1."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import is_whole, require, require_at_least, require_sizes
from moe_ext.ops.dtypes import accumulation_dtype
from moe_ext.processes import Processes


class Gating(NamedTuple):
    """A gate's decision for T tokens, as slots: (token, expert) pairs ordered by token.

    Attributes:
        gates: [T, K], or [R] with token_offsets; float32 or float64.
        expert_index: int64, the expert of each gate.
        importance: [E], the sum of each expert's gates (Eq. 6).
        load: [E], the expected number of tokens of each expert (Appendix A); without noise, its
            limit: the number of tokens routed, which has no gradient.
        token_offsets: [T + 1] int64, where each token's slots begin and end; None: K slots each.
        equal_load: every expert has R / E tokens, so that the counts need not be read.
        loss: scalar, of the gate's own, to be added to the layer's; or None.
        metrics: scalars that tell how the gate does, for `MoEAux.metrics`.
        load_factors: of a noisy gate of two levels, Load_primary(X) [a], Load_i(X^(i)) [a, b] and
            |X^(i)| [a], of which load is made (`hierarchical_load`). As importance they are sums
            over the tokens, which load then is not.
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


def token_of_slot(expert_index: Tensor, token_offsets: Tensor | None) -> Tensor:
    """The token of each slot, [R]; arguments as in `Gating`."""
    if token_offsets is None:
        num_tokens, k = expert_index.shape
        return torch.arange(num_tokens, device=expert_index.device).repeat_interleave(k)
    return torch.repeat_interleave(token_offsets.diff(), output_size=expert_index.numel())


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x · weight, each row by itself: its bits do not depend on what else is in the batch. (On CUDA
    they may: torch chooses another product for another number of rows.)"""
    return ops.experts(x, [weight.unsqueeze(0)])


def widened(x: Tensor) -> Tensor:
    """x in float32 at least: once for all matrices of a gate."""
    return x.to(accumulation_dtype(x))


def logits(
    x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = _matmul
) -> Tensor:
    """x · weight in float32 at least, under autocast too: a threshold minus a logit cancels."""
    x = widened(x)
    wide = torch.promote_types(x.dtype, weight.dtype)
    # The meta device has no autocast, and says so with an error.
    meta = x.device.type == "meta"
    with nullcontext() if meta else torch.autocast(x.device.type, enabled=False):
        return product(x.to(wide), weight.to(wide))


def standard_normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws of the gates' noise, of the shape and type of `like`; None is the global generator."""
    if generator is None:
        return torch.randn_like(like)
    return torch.empty_like(like).normal_(generator=generator)


def count(gates: Tensor, expert_index: Tensor, num_experts: int) -> Tensor:
    """The number of tokens of each expert, [E] in the gates' type."""
    return ops.importance(torch.ones_like(gates), expert_index, num_experts)


def hierarchical_load(load: Tensor, load_of_group: Tensor, group_size: Tensor) -> Tensor:
    """Load_H(X)_ij = Load_primary(X)_i · Load_i(X^(i))_j / |X^(i)| (Appendix B), [a · b].

    Args:
        load: Load_primary(X), [a].
        load_of_group: Load_i(X^(i)) of all groups, [a, b]; 0 of an empty one.
        group_size: |X^(i)|, [a].
    """
    return (load / group_size.clamp_min(1)).unsqueeze(1).mul(load_of_group).reshape(-1)


def require_k(module: str, k: int, num_experts: int) -> None:
    rule = f"be a whole number between 1 and num_experts = {num_experts}"
    require(is_whole(k) and 1 <= k <= num_experts, f"{module}: k", rule, k)


def require_k_of_levels(
    module: str,
    k: int | tuple[int, int],
    d_model: int,
    num_groups: int,
    experts_per_group: int,
) -> tuple[int, int]:
    """(k1, k2) of a k that is both or one for each level, after checks of all sizes."""
    sizes = {"num_groups": num_groups, "experts_per_group": experts_per_group}
    require_sizes(module, d_model=d_model, **sizes)
    k1, k2 = k if isinstance(k, Sequence) and len(k) == 2 else (k, k)
    require(is_whole(k1) and is_whole(k2), f"{module}: k", "be a whole number or a pair of them", k)
    for level, chosen, choices, limit in (
        ("first", k1, num_groups, "num_groups"),
        ("second", k2, experts_per_group, "experts_per_group"),
    ):
        rule = f"be between 1 and {limit} = {choices} at the {level} level"
        require(1 <= chosen <= choices, f"{module}: k", rule, k)
    return k1, k2


class Gate(nn.Module):
    """What the gates share. One of your own only has to return a `Gating`, and to derive from this
    where several processes train with a common balance (`moe_ext.MoE`): then its importance, load,
    loss and metrics are those of all their tokens, by `self.processes.sum`.

    Attributes:
        num_experts: E.
        k: experts per token; on average where tokens differ.
        processes: those whose tokens make up the batch that is balanced; set by the layer.
        of_batch: what it chooses depends on the other tokens, and what it learns of them would
            differ between processes that balance by themselves.
    """

    num_experts: int
    k: int
    of_batch = False

    def __init__(self) -> None:
        super().__init__()
        self.processes = Processes()

    def _summed(self, gates: Tensor, expert_index: Tensor, load: Tensor | None = None) -> Gating:
        """With importance and load of all processes; load None is the number of tokens routed."""
        if load is None:
            load = count(gates, expert_index, self.num_experts)
        importance = ops.importance(gates, expert_index, self.num_experts)
        importance, load = self.processes.sum(importance, load)
        return Gating(gates, expert_index, importance, load)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As at the start, for a gate that was made on the meta device: all at zero."""
        for value in chain(self.parameters(), self.buffers()):
            value.zero_()


class SoftmaxGate(Gate):
    """G(x) = softmax(x·W_g) (Eq. 2): every token goes to every expert.

    Args:
        d_model: D, the width of x.
        num_experts: E.

    Raises:
        ValueError: d_model or num_experts is below 1.
    """

    def __init__(self, d_model: int, num_experts: int) -> None:
        super().__init__()
        require_sizes("SoftmaxGate", d_model=d_model, num_experts=num_experts)
        self.num_experts = self.k = num_experts
        self.d_model = d_model
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_experts))

    def forward(self, x: Tensor) -> Gating:
        """x [T, D] to the gates of all E experts, in the experts' order."""
        gates = torch.softmax(logits(x, self.w_gate), dim=-1)
        expert_index = torch.arange(self.num_experts, device=x.device).expand(x.shape[0], -1)
        return self._summed(gates, expert_index)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}"


class TopKGate(Gate):
    """A softmax gate masked by its top k, without noise (Appendix F with M = TopK).

        G(x)_i = G_σ(x)_i M_i / Σ_j G_σ(x)_j M_j,   G_σ(x) = softmax(x·W_g)

    W_g starts small and random, with a standard deviation of 0.1 · D^-1/2: from zero every token
    would go to the same experts. Load is the number of tokens routed, which has no gradient: the
    importance loss alone balances.

    Args:
        d_model: D, the width of x.
        num_experts: E.
        k: experts kept per token, 1 <= k <= E.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    def __init__(self, d_model: int, num_experts: int, k: int) -> None:
        super().__init__()
        require_sizes("TopKGate", d_model=d_model, num_experts=num_experts)
        require_k("TopKGate", k, num_experts)
        self.num_experts = num_experts
        self.k = k
        self.d_model = d_model
        self.w_gate = nn.Parameter(torch.empty(d_model, num_experts))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w_gate, std=0.1 * len(self.w_gate) ** -0.5)

    def forward(self, x: Tensor) -> Gating:
        """x [T, D] to the k kept gates of each token, in order of decreasing logit."""
        kept = ops.noisy_topk_gating(logits(x, self.w_gate), None, None, self.k)
        return self._summed(kept.gates, kept.expert_index)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"


class NoisyGate(Gate):
    """What the flat and the hierarchical gate with noise share: a level's choice and its load.

    Attributes:
        noise_epsilon, detach_threshold, generator: see `NoisyTopKGate`.
    """

    noise_epsilon: float
    detach_threshold: bool
    generator: torch.Generator | None

    def _noise(self, like: Tensor) -> Tensor:
        return standard_normal(like, self.generator)

    def _choice(
        self,
        x: Tensor,
        w_gate: Tensor,
        w_noise: Tensor,
        k: int,
        plan: ops.DispatchPlan | None = None,
    ) -> tuple[Tensor, ops.NoisyTopKGating]:
        """The clean logits of each token of x, and the k gates that it keeps.

        With a plan, those of each of its rows, by the matrices of the row's group.
        """

        def product(x: Tensor, weight: Tensor) -> Tensor:
            if plan is None:
                return _matmul(x, weight)
            return ops.experts(x, [weight], offsets=plan.offsets, inverse=plan.inverse)

        clean_logits = logits(x, w_gate, product)
        raw_noise_stddev = noise = None
        if self.training:
            raw_noise_stddev, noise = logits(x, w_noise, product), self._noise(clean_logits)
            if plan is not None:
                # Drawn by slots: a token's noise does not depend on the groups of the others.
                noise = ops.dispatch(noise, plan.inverse.reshape(-1, 1))
        kept = ops.noisy_topk_gating(clean_logits, raw_noise_stddev, noise, k, self.noise_epsilon)
        return clean_logits, kept

    def _load(
        self, clean_logits: Tensor, kept: ops.NoisyTopKGating, group_offsets: Tensor | None = None
    ) -> Tensor:
        """Load(X) of a choice made in training; see `moe_ext.ops.load`."""
        return ops.load(
            clean_logits,
            kept.noise_stddev,
            kept.threshold,
            kept.expert_index,
            self.detach_threshold,
            group_offsets,
        )


class NoisyTopKGate(NoisyGate):
    """Noisy top-k gating (Eqs. 3-5), with noise in training mode only.

    Both matrices start at zero ("no signal and some noise"): training begins with uniformly random
    routing; in evaluation mode the untrained gate ties everywhere and picks the lowest indices.

    With k = 1 the kept gate is 1 whatever the logits, so that the task's gradient to the gate is
    zero: the balancing losses alone train it.

    Args:
        d_model: D, the width of x.
        num_experts: E.
        k: experts kept per token, 1 <= k <= E.
        noise_epsilon: floor of the noise's standard deviation.
        detach_threshold: keep Load's gradient out of the thresholds (see `moe_ext.ops.load`).
        generator: source of the noise; None is torch's global one, which torch.utils.checkpoint
            replays. A generator of one's own is not replayed when a forward pass is recomputed,
            torch.compile(fullgraph=True) does not take it, and a torch.cuda.CUDAGraph has to be
            told of it by register_generator_state.

    Raises:
        ValueError: a size is below 1, k is not between 1 and num_experts, or noise_epsilon is
            negative.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        noise_epsilon: float = 1e-2,
        detach_threshold: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        require_sizes("NoisyTopKGate", d_model=d_model, num_experts=num_experts)
        require_k("NoisyTopKGate", k, num_experts)
        require_at_least(0, "NoisyTopKGate", noise_epsilon=noise_epsilon)
        self.num_experts = num_experts
        self.k = k
        self.noise_epsilon = noise_epsilon
        self.detach_threshold = detach_threshold
        self.generator = generator
        self.d_model = d_model
        self.w_gate = nn.Parameter(torch.zeros(d_model, num_experts))
        self.w_noise = nn.Parameter(torch.zeros(d_model, num_experts))

    def forward(self, x: Tensor) -> Gating:
        """x [T, D] to the k kept gates of each token, in order of decreasing (noisy) logit."""
        clean_logits, kept = self._choice(widened(x), self.w_gate, self.w_noise, self.k)
        load = self._load(clean_logits, kept) if self.training else None
        return self._summed(kept.gates, kept.expert_index, load)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}"
