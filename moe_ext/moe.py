"""The mixture-of-experts layer, Section 2."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import _register_namedtuple

from moe_ext import ops
from moe_ext.checks import (
    require,
    require_at_least,
    require_floating,
    require_mask,
    require_sizes,
)
from moe_ext.exchange import EXCHANGES, Exchange, Placement
from moe_ext.experts import FeedForwardExperts, ModuleExperts, mixture
from moe_ext.gates import Gate, Gating, NoisyTopKGate, require_k
from moe_ext.losses import cv_squared, importance_loss, load_loss
from moe_ext.processes import Layout

BALANCES = ("global", "local")


class MoEAux(NamedTuple):
    """What a MoE layer returns beside its output; T counts the tokens that the mask left.

    With a process_group, loss, importance, load, load_factors and gate_metrics are those of all
    processes (balance="global"), the others are of this one's tokens.

    Attributes:
        loss: scalar, w_importance · CV(importance)² + w_load · CV(load)² and the gate's own, to be
            added to the mean loss per token in nats. Losses of several layers add up.
        importance: [E], the sum of each expert's gates.
        load: [E], the smooth number of tokens of each expert.
        gates: [T, K], or [R] with token_offsets.
        expert_index: int64, the expert of each gate.
        tokens_per_expert: [E] int64, the true number of tokens of each expert.
        token_offsets: [T + 1] int64, where each token's gates begin and end; None: K each.
        gate_metrics: scalars of the gate's own.
        load_factors: of which load is made on two levels; see `Gating`.
    """

    loss: Tensor
    importance: Tensor
    load: Tensor
    gates: Tensor
    expert_index: Tensor
    tokens_per_expert: Tensor
    token_offsets: Tensor | None = None
    gate_metrics: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)
    load_factors: tuple[Tensor, ...] | None = None

    def metrics(self) -> dict[str, float]:
        """The columns of Table 6: CV(Importance), CV(Load), max(Load) / mean(Load).

        Beside them the CV of the numbers of tokens that the experts got, of which Load is the
        smooth form, and what the gate reports. Reads the values, so that a GPU is waited for.
        """
        with torch.no_grad():
            load = self.load.double()
            return {
                "cv_importance": cv_squared(self.importance.double()).sqrt().item(),
                "cv_load": cv_squared(load).sqrt().item(),
                "max_over_mean_load": (load.max() / load.mean().clamp_min(1e-30)).item(),
                "cv_tokens": cv_squared(self.tokens_per_expert.double()).sqrt().item(),
            } | {name: value.item() for name, value in self.gate_metrics.items()}


# So that torch.export can save a layer.
_register_namedtuple(MoEAux, serialized_type_name="moe_ext.MoEAux")


class MoE(nn.Module):
    """y = Σ_i G(x)_i E_i(x) (Eq. 1), with only the k chosen experts of each token evaluated.

    1. gate: x [T, D] to k experts and gates per token
    2. plan: the T·k routed rows sorted by expert
    3. dispatch: every token copied to its rows
    4. experts: each on its rows
    5. combine: each token's outputs summed with its gates

    With feed-forward experts steps 3 to 5 are one operator, which keeps x and the hidden layers for
    the backward pass; with recompute, x alone (App. D).

    With a process_group its processes share the experts (Sec. 3): each has a copy of the gate, a
    block of the experts and tokens of its own, any number of them, and calls the layer together
    with the others, forward and backward. The result is that of one process with all tokens, in the
    order of the ranks. Gradients are those of the mean of the processes' losses: of the experts as
    they are, of all else once averaged over the processes (`moe_ext.distributed.parallelize`).

    Args:
        d_model: D, the width of x.
        num_experts: E.
        k: experts per token.
        hidden_sizes: widths of the experts' hidden layers; None is (4 · d_model,).
        activation, bias: see `FeedForwardExperts`.
        gate: a module from x [T, D] to `Gating`; None is NoisyTopKGate, with noise_epsilon and
            generator.
        experts: a module from rows [R, D] and offsets [E + 1] to [R, d_output], or a sequence of
            any modules, one for each expert; None is FeedForwardExperts, with hidden_sizes,
            activation and bias. With a process_group, those of this process alone (`Placement`).
        recompute: compute the experts again in the backward pass instead of keeping anything of
            them: one more product of rows and weights for each hidden layer, the same bits (and
            running averages of experts given, as BatchNorm's, updated twice).
        dtype: of the experts' weights, to which the tokens are cast for the experts, whatever it
            becomes later (`layer.float()`); None is torch's default, and x has to be of it.
        w_importance, w_load: the weights of the two losses.
        noise_epsilon, generator: see `NoisyTopKGate`.
        process_group: the processes that share the experts; None is this one alone. A DeviceMesh of
            two dimensions has copies of the experts along the first, and shares them along the
            second; of one, it is its group.
        balance: "global": importance and load are summed over the processes before the losses;
            "local": every process balances its own tokens, by these losses (a strictly balanced
            gate's thresholds would be different in each).
        exchange: "rows" or "tokens", what travels by itself; see `moe_ext.exchange.Exchange`.
        num_chunks: see there.

    Attributes:
        layout: the processes, by what they share.
        placement: which experts each process has.

    Raises:
        ValueError: an argument is out of range, would have no effect beside a gate or experts
            given, or these are for other sizes.

    Example:
        >>> layer = MoE(d_model=512, num_experts=32, k=4, hidden_sizes=[1024])
        >>> y, aux = layer(torch.randn(8, 20, 512))
        >>> y.shape
        torch.Size([8, 20, 512])
        >>> loss = y.square().mean() + aux.loss
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        hidden_sizes: Sequence[int] | None = None,
        activation: str = "relu",
        bias: bool = False,
        gate: nn.Module | None = None,
        experts: nn.Module | Sequence[nn.Module] | None = None,
        recompute: bool = False,
        dtype: torch.dtype | None = None,
        w_importance: float = 0.1,
        w_load: float = 0.1,
        noise_epsilon: float = 1e-2,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        balance: str = "global",
        exchange: str = "rows",
        num_chunks: int = 1,
    ) -> None:
        super().__init__()
        require_sizes("MoE", d_model=d_model, num_experts=num_experts, num_chunks=num_chunks)
        require_k("MoE", k, num_experts)
        require_at_least(0, "MoE", w_importance=w_importance, w_load=w_load)
        if gate is not None and (noise_epsilon != 1e-2 or generator is not None):
            raise ValueError("MoE: noise_epsilon and generator must be left out when gate is given")
        own = hidden_sizes is not None or activation != "relu" or bias or dtype is not None
        if experts is not None and own:
            raise ValueError(
                "MoE: hidden_sizes, activation, bias and dtype must be left out when experts are "
                "given"
            )
        require(balance in BALANCES, "MoE: balance", f"be one of {', '.join(BALANCES)}", balance)
        kinds = ", ".join(EXCHANGES)
        require(exchange in EXCHANGES, "MoE: exchange", f"be one of {kinds}", exchange)
        self.d_model = d_model
        self.num_experts = num_experts
        self.k = k
        self.recompute = recompute
        self.casts_tokens = dtype is not None
        self.w_importance = w_importance
        self.w_load = w_load
        if gate is None:
            gate = NoisyTopKGate(
                d_model, num_experts, k, noise_epsilon=noise_epsilon, generator=generator
            )
        require(isinstance(gate, nn.Module), "MoE: gate", "be a module", gate)
        self.layout = Layout.of(process_group)
        sharing = self.layout.expert_parallel
        self.placement = Placement(num_experts, sharing.size, getattr(gate, "experts_per_group", 1))
        local = self.placement.experts_of(sharing.rank)
        one_by_one = isinstance(experts, ModuleExperts | nn.ModuleList | Sequence)
        if one_by_one and sharing.size > 1:
            require(
                min(self.placement.counts) >= num_chunks,
                "MoE: num_experts",
                f"be at least {sharing.size * num_chunks} where experts are modules, one for each "
                "chunk of each process",
                num_experts,
            )
        if experts is None:
            hidden_sizes = (4 * d_model,) if hidden_sizes is None else hidden_sizes
            experts = FeedForwardExperts(
                len(local),
                d_model,
                hidden_sizes,
                activation=activation,
                bias=bias,
                dtype=dtype,
                first_expert=local.start,
            )
        elif not isinstance(experts, nn.Module) or isinstance(experts, nn.ModuleList):
            experts = ModuleExperts(experts)
        for name, module, size, expected in (
            ("gate", gate, "d_model", d_model),
            ("gate", gate, "num_experts", num_experts),
            ("gate", gate, "k", k),
            ("experts", experts, "d_model", d_model),
            ("experts", experts, "num_experts", len(local)),
        ):
            given = getattr(module, size, expected)
            require(given == expected, f"MoE: {name}", f"be for {size} = {expected}", given)
        require(
            balance == "global"
            or self.layout.world.size == 1
            or not getattr(gate, "of_batch", False),
            "MoE: balance",
            'be "global" with a strictly balanced gate',
            balance,
        )
        if balance == "global" and self.layout.world.size > 1:
            require(
                isinstance(gate, Gate),
                "MoE: gate",
                'derive from moe_ext.Gate with a process_group and balance="global"',
                type(gate).__name__,
            )
            gate.processes = self.layout.world  # type: ignore[assignment]
        self.gate = gate
        self.experts = experts
        self.exchange = None
        if sharing.size > 1:
            require(
                num_chunks == 1 or hasattr(experts, "split"),
                "MoE: num_chunks",
                "be 1 for experts that have no split(sizes)",
                num_chunks,
            )
            self.exchange = Exchange(self.placement, sharing, exchange, num_chunks)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, MoEAux]:
        """x [..., D] to y [..., d_output] in x's type, and what came with it.

        Args:
            x: [..., D]; the leading dimensions are free, as in the paper's "convolutional" use
                (Sec. 3.1).
            mask: [...] bool, True at real tokens. The others never reach the gate, the experts or
                the losses, and their outputs are 0. On CUDA the host waits for the device to count
                them; the layer never waits without a mask.

        Raises:
            ValueError, TypeError: the shape of x or mask, or the type of mask, does not fit.
        """
        if x.dim() < 1 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"MoE: x must have a last dimension of d_model = {self.d_model}, "
                f"got shape {tuple(x.shape)}"
            )
        require_floating("MoE", x)
        tokens = x.reshape(-1, self.d_model)
        if mask is not None:
            require_mask("MoE", mask, tuple(x.shape[:-1]))
            position = mask.reshape(-1).nonzero().squeeze(1)
            tokens = tokens.index_select(0, position)

        gating = Gating(*self.gate(tokens))
        if self.casts_tokens:
            tokens = tokens.to(next(self.experts.parameters()).dtype)
        y, tokens_per_expert = self._mixture(tokens, gating)
        y = y.to(x.dtype)

        if mask is not None:
            y = y.new_zeros(mask.numel(), y.shape[-1]).index_copy(0, position, y)
        loss = importance_loss(gating.importance, self.w_importance)
        loss = loss + load_loss(gating.load, self.w_load)
        if gating.loss is not None:
            loss = loss + gating.loss
        aux = MoEAux(
            loss,
            gating.importance,
            gating.load,
            gating.gates,
            gating.expert_index,
            tokens_per_expert,
            gating.token_offsets,
            dict(gating.metrics),
            gating.load_factors,
        )
        # As matmul does: no view in the eyes of autograd, so that it may be changed in place.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1])), aux

    def _mixture(self, tokens: Tensor, gating: Gating) -> tuple[Tensor, Tensor]:
        """Σ_i G(x)_i E_i(x) of the tokens' chosen experts, [T, d_output]; and tokens_per_expert."""
        if self.exchange is not None:
            return self.exchange(
                tokens,
                gating.gates,
                gating.expert_index,
                gating.token_offsets,
                self.experts,
                self.recompute,
            )
        plan = ops.dispatch_plan(gating.expert_index, self.num_experts)
        y = mixture(
            self.experts,
            tokens,
            gating.gates,
            plan,
            gating.token_offsets,
            equal_load=gating.equal_load,
            recompute=self.recompute,
        )
        return y, plan.tokens_per_expert

    def extra_repr(self) -> str:
        return (
            f"d_model={self.d_model}, num_experts={self.num_experts}, k={self.k}, "
            f"recompute={self.recompute}"
        )
