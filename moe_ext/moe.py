"""The mixture-of-experts layer, Section 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.types import Device
from torch.utils._pytree import _register_namedtuple, tree_map_only

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext._capacity import Capacity
from moe_ext._checked_parts import (
    checked_experts,
    checked_gate,
    checked_index,
    checked_losses,
    checked_shared_expert,
)
from moe_ext._compiled import uncompiled
from moe_ext._counting import SparsePart, count_parameters
from moe_ext._former_capacity import FormerCapacity, takes_former_capacity
from moe_ext._meanwhile import Meanwhile
from moe_ext.checks import (
    refuse,
    require,
    require_at_least,
    require_bool,
    require_floating,
    require_k,
    require_mask,
    require_sizes,
    require_tensor,
)
from moe_ext.dispatch import Dispatcher
from moe_ext.dispatch._dispatchers import LocalDispatcher, make_dispatcher
from moe_ext.dispatch._sharding import ExpertParallel, ExpertSharding, parallel_options
from moe_ext.experts import ActivationLike, Experts, FeedForwardExperts
from moe_ext.gates import Gate, NoisyTopKGate
from moe_ext.losses import (
    RouterLoss,
    _router_losses,
    _sequence_offsets,
    add_loss,
    cv_squared,
)
from moe_ext.ops._dtypes import cast
from moe_ext.ranks._whole import is_mark
from moe_ext.ranks.collectives import Ranks
from moe_ext.routing import Routing

__all__ = ["KeepAux", "MoE", "MoEAux"]


class MoEAux(NamedTuple):
    """Holds the losses, statistics and routing decision that a MoE layer returns with y.

    Shapes: T tokens that are not masked out, E experts, K experts per token, R (token, expert)
    assignments. With a process_group and balance="global", loss, importance, load, load_factors,
    gate_metrics and losses cover the tokens of all ranks. The other attributes cover this rank's
    tokens.

    Attributes:
        loss: scalar, w_importance · CV(importance)² + w_load · CV(load)² + the weighted `losses` +
            the gate's own loss. CV is the coefficient of variation. Add this loss, summed over all
            MoE layers, to the task loss (mean per token, in nats).
        importance: [E], the sum of the gates of each expert (Eq. 6).
        load: [E], the smooth estimate of the number of tokens per expert (Appendix A).
        gates: [T, K], or [R] with token_offsets.
        expert_index: int64, in the shape of gates. The expert of each gate.
        tokens_per_expert: [E] int64, the exact number of tokens per expert.
        token_offsets: [T + 1] int64; token t has the gates token_offsets[t] to
            token_offsets[t + 1] - 1. None: each token has K gates.
        gate_metrics: scalars that the gate reports, by name.
        load_factors: the factors of load for a hierarchical gate, else None; see `Routing`.
        losses: the unweighted value of each `RouterLoss` of the layer, by name.
        kept: bool, in the shape of gates; False at the assignments that exceed the capacity of
            their expert and are dropped. None: nothing is dropped.
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
    losses: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)
    kept: Tensor | None = None

    def metrics(self) -> dict[str, float]:
        """Returns the balance metrics of the paper's Table 6 as Python numbers.

        The keys are cv_importance, cv_load and max_over_mean_load. The key cv_tokens is the CV of
        tokens_per_expert. The entries of gate_metrics and losses follow. The call synchronizes with
        the GPU.
        """
        with torch.no_grad():
            load = self.load.double()
            more = self.gate_metrics | self.losses
            return {
                "cv_importance": cv_squared(self.importance.double()).sqrt().item(),
                "cv_load": cv_squared(load).sqrt().item(),
                "max_over_mean_load": (load.max() / load.mean().clamp_min(1e-30)).item(),
                "cv_tokens": cv_squared(self.tokens_per_expert.double()).sqrt().item(),
            } | {name: value.item() for name, value in more.items()}


# torch.export needs this to save a layer.
_register_namedtuple(MoEAux, serialized_type_name="moe_ext.MoEAux")


class _CommonOptions(TypedDict, total=False):
    """The options of `MoE` that hierarchical layers and presets take too."""

    recompute: bool
    expert_dtype: torch.dtype | None
    w_importance: float | None
    w_load: float | None
    losses: Sequence[RouterLoss]
    process_group: ProcessGroup | DeviceMesh | None
    parallel: ExpertParallel | None
    device: Device
    dtype: torch.dtype | None


def _given_noise(noise_epsilon: float | None, generator: torch.Generator | None) -> dict[str, Any]:
    """Returns those options of a noisy gate that are given."""
    options = {"noise_epsilon": noise_epsilon, "generator": generator}
    return {name: value for name, value in options.items() if value is not None}


class MoE(FormerCapacity, nn.Module):
    """Computes y = Σ_i G(x)_i E_i(x) (Eq. 1) with only the k chosen experts of each token.

    1. gate: selects k experts for each token of x [T, D]; their weights are the token's gates
    2. dispatch plan: sorts the T·k (token, expert) assignments by expert
    3. dispatch: copies each token to one row for each of its assignments
    4. experts: each expert maps its rows
    5. combine: sums the output rows of each token, weighted by its gates

    With feed-forward experts, steps 3 to 5 are one operator. It saves x and the hidden layers for
    backward. With recompute it saves only x (App. D).

    With a process_group, its ranks share the experts (Sec. 3). Each rank has a replica of the gate,
    a contiguous shard of the experts, and its own tokens, whose number may differ between ranks.
    All ranks must run the layer's forward and backward passes together. The output equals the
    output of a single process that has the tokens of all ranks, concatenated in rank order.

    Gradients are those of the mean of the ranks' losses. Expert gradients are complete after
    backward. All other gradients must be averaged over the ranks, which
    `moe_ext.distributed.parallelize` does.

    Args:
        d_model: D, the width of x.
        num_experts: E, the number of experts.
        k: experts per token; top_k is accepted too, as for the gates.
        hidden_sizes: widths of the hidden layers of each expert; a number: the width of a single
            one. None: (4 · d_model,).
        activation, activation_args, bias: see `FeedForwardExperts`.
        gate: a `Gate`. None: a NoisyTopKGate with noise_epsilon and generator.
        experts: an `Experts`, or a sequence of arbitrary modules, one for each expert. None:
            FeedForwardExperts with hidden_sizes, activation, activation_args, bias and
            expert_dtype. With several ranks, pass only this rank's experts
            (`moe_ext.distributed.ExpertPlacement`).
        shared_expert: a module from [T, D] to [T, d_output] that processes every token, such as a
            `SharedExpert`. Its output is added to y. It gets the tokens that the experts get, also
            their dtype. Every rank has a replica of it. None: no shared expert.
        recompute: whether to recompute the experts in the backward pass instead of saving their
            activations. Costs one extra GEMM for each hidden layer. Results are bitwise identical
            to recompute=False. Custom experts update running statistics, such as those of
            BatchNorm, twice.
        expert_dtype: dtype of the expert weights. Tokens are cast to it for the experts but not for
            the gate; y has the dtype of x. After ``layer.to(dtype)``, tokens are cast to the new
            dtype. None: torch's default dtype without a cast. Then x must have the dtype of the
            experts, unless autocast is on.
        w_importance, w_load: weights of the importance loss and of the load loss; short forms of
            `ImportanceLoss` and `LoadLoss`. None: 0.1, or 0 with losses.
        losses: losses in place of the paper's, or in addition to them, such as
            ``[SwitchLoss(0.01), ZLoss(1e-3)]``. Each is a `RouterLoss`.
        noise_epsilon, generator: see `NoisyTopKGate`. None: the gate's defaults.
        num_identity_experts, num_null_experts: n and m, the numbers of experts that compute
            nothing (zero-computation experts, arXiv 2410.07348, 2509.01322). The gate selects among
            num_experts + n + m experts: first those with weights, then n identity experts
            E_i(x) = x, then m null experts E_i(x) = 0. Importance, load, losses and `MoEAux` cover
            all of them. They add no rows, and ranks exchange nothing for them. On CUDA, the host
            synchronizes with the device to count the rows. Identity experts need d_output =
            d_model.
        capacity: limits the tokens of each expert; a number is the factor of `Capacity`. The
            attribute may change between steps. None: nothing is dropped.
        process_group: the ranks that share the experts; a short form of
            ``parallel=ExpertParallel(process_group)``.
        parallel: how ranks share the experts; see `moe_ext.distributed.ExpertParallel`. None
            without process_group: this process has all experts.
        device, dtype: of the parameters that the layer makes: those of the gate if gate is None,
            and of the experts if experts is None. expert_dtype takes precedence for the experts.
            None: torch's defaults.

    Attributes:
        gate: the gate module.
        losses: the constructor argument, as a tuple.
        experts: the experts of this rank.
        shared_expert: the constructor argument.
        dispatcher: how tokens reach the experts, a `moe_ext.dispatch.Dispatcher`.

    Raises:
        ValueError: an argument is out of range, has no effect because gate or experts are given, or
            differs from the sizes of gate or experts. Or two losses have the same name.
        TypeError: an argument has the wrong type.

    Example:
        >>> layer = MoE(d_model=512, num_experts=32, k=4, hidden_sizes=[1024])
        >>> y, aux = layer(torch.randn(8, 20, 512))
        >>> y.shape
        torch.Size([8, 20, 512])
        >>> loss = y.square().mean() + aux.loss

        In `torch.nn.Sequential`, use `KeepAux`.
    """

    gate: Gate
    experts: Experts
    w_importance: float
    w_load: float
    _checked_weights: tuple[float, ...] = ()

    @takes_former_capacity
    @explains_names
    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int,
        *,
        hidden_sizes: int | Sequence[int] | None = None,
        activation: ActivationLike = "relu",
        activation_args: Sequence[float] | None = None,
        bias: bool = False,
        gate: Gate | None = None,
        experts: Experts | nn.ModuleList | Sequence[nn.Module] | None = None,
        shared_expert: nn.Module | None = None,
        recompute: bool = False,
        expert_dtype: torch.dtype | None = None,
        w_importance: float | None = None,
        w_load: float | None = None,
        losses: Sequence[RouterLoss] = (),
        noise_epsilon: float | None = None,
        generator: torch.Generator | None = None,
        num_identity_experts: int = 0,
        num_null_experts: int = 0,
        capacity: Capacity | float | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        parallel: ExpertParallel | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_model, num_experts = require_sizes("MoE", d_model=d_model, num_experts=num_experts)
        sizes = {"num_identity_experts": num_identity_experts, "num_null_experts": num_null_experts}
        num_identity_experts, num_null_experts = require_sizes("MoE", 0, **sizes)
        self.d_model = d_model
        self.num_experts = num_experts
        self.num_identity_experts = num_identity_experts
        self.num_null_experts = num_null_experts
        k = require_k("MoE", k, self._num_choices)
        (recompute,) = require_bool("MoE", recompute=recompute)
        noise = _given_noise(noise_epsilon, generator)
        if gate is not None and noise:
            raise ValueError("MoE: noise_epsilon and generator must be left out when gate is given")
        own = hidden_sizes is not None or activation != "relu" or activation_args is not None
        if experts is not None and gate is not None and (device is not None or dtype is not None):
            raise ValueError(
                "MoE: device and dtype must be left out when gate and experts are given"
            )
        if experts is not None and (own or bias or expert_dtype is not None):
            raise ValueError(
                "MoE: hidden_sizes, activation, activation_args, bias and expert_dtype must be "
                "left out when experts are given"
            )
        self.recompute = recompute
        self.casts_tokens: bool = expert_dtype is not None
        self.losses: tuple[RouterLoss, ...] = checked_losses(losses)
        default = 0.0 if losses else 0.1
        self.w_importance, self.w_load = require_at_least(
            0,
            "MoE",
            w_importance=default if w_importance is None else w_importance,
            w_load=default if w_load is None else w_load,
        )
        self._checked_weights = self.w_importance, self.w_load
        self.capacity: Capacity | float | None = Capacity.from_option(capacity)
        if gate is None:
            gate = NoisyTopKGate(
                d_model,
                self._num_choices,
                k,
                **noise,
                device=device,
                dtype=dtype,
            )
        for_flat_gates = sizes | {"capacity": capacity}
        self.gate = checked_gate(
            gate, for_flat_gates, d_model=d_model, num_experts=self._num_choices, k=k
        )
        parallel = parallel_options("MoE", process_group, parallel)
        sharding = None if parallel is None else ExpertSharding(parallel, gate, num_experts)
        local = range(num_experts) if sharding is None else sharding.local_experts
        if experts is None:
            experts = FeedForwardExperts(
                len(local),
                d_model,
                (4 * d_model,) if hidden_sizes is None else hidden_sizes,
                activation=activation,
                activation_args=activation_args,
                bias=bias,
                device=device,
                dtype=dtype if expert_dtype is None else expert_dtype,
                first_expert=local.start,
            )
        if sharding is not None:
            sharding.require_experts(experts)
        self.experts = checked_experts(experts, d_model=d_model, num_experts=len(local))
        if num_identity_experts > 0:
            width, rule = self.experts.d_output, f"be d_model = {d_model} with identity experts"
            require(width in (None, d_model), "MoE: experts.d_output", rule, width)
        self._fused = self.experts.fused
        self.shared_expert: nn.Module | None = checked_shared_expert(shared_expert, d_model)
        # Last, because it may change the gate.
        self.dispatcher: Dispatcher = make_dispatcher(sharding, gate, num_experts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a layer from a pickle, also of an earlier version."""
        state = dict(state)
        sharding = state.pop("sharding", None)
        state.pop("k", None)  # that of the gate
        if "capacity" not in state:
            factor, drop = state.pop("capacity_factor"), state.pop("drop")
            state["capacity"] = None if factor is None else Capacity(factor, drop)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "dispatcher" not in state:
            self.dispatcher = LocalDispatcher(self.num_experts, sharding)

    @property
    def k(self) -> int:
        """The experts per token, the k of the gate."""
        return self.gate.k

    @property
    def _num_choices(self) -> int:
        """The number of experts among which the gate selects."""
        return self.num_experts + self.num_identity_experts + self.num_null_experts

    @property
    def sharding(self) -> ExpertSharding | None:
        """How ranks share the experts of the layer; None without process_group and parallel."""
        return self.dispatcher.sharding

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, expert_index: Tensor | None = None
    ) -> tuple[Tensor, MoEAux]:
        """Maps x [..., D] to y [..., d_output].

        Args:
            x: [..., D] with any leading dimensions (Sec. 3.1, "convolutional" use), or a nested
                tensor [B, j, D] in the jagged layout. Floating point.
            mask: [...] bool, True at real tokens. Masked-out tokens never reach the gate, the
                experts or the losses; their outputs are 0. On CUDA, a mask makes the host
                synchronize with the device to count the tokens.
            expert_index: [..., K] int64 or int32, the experts of each token, from an earlier
                forward pass or an inference engine. `expert_index` of `MoEAux`, which has only
                real tokens, is also accepted. Gates, losses and gradients are those of the gate's
                current parameters. With equal inputs, parameters and noise, outputs are bitwise
                identical to those of the earlier pass. The K experts of a token must differ.
                `TopKGate` and `NoisyTopKGate` support it. None: the gate selects the experts.

        Returns:
            y, in the dtype and layout of x, and a `MoEAux`.

        Raises:
            ValueError: x, mask or expert_index has the wrong shape, x is nested and mask is given,
                or the gate cannot use expert_index. On the CPU, also if its values are invalid.
            TypeError: x, mask or expert_index is not a tensor or has the wrong dtype, or the gate
                does not return a `Routing`.
        """
        if not isinstance(x, Tensor):  # tested here too: the call would take a microsecond
            require_tensor("MoE", x=x)
        if x.is_nested:
            return self._jagged(x, mask, expert_index)
        return self._forward(x, mask, expert_index)

    if TYPE_CHECKING:
        __call__ = forward

    def _forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        expert_index: Tensor | None,
        sequence_offsets: Tensor | None = None,
    ) -> tuple[Tensor, MoEAux]:
        """Implements `forward` without nested tensors.

        sequence_offsets: see `RouterLoss.sums`. None: a sequence is the dimension before the last
            of x [..., T, D].
        """
        tokens, position = self._real_tokens(x, mask)
        if expert_index is not None:
            num_tokens = tokens.shape[0]
            expert_index = self._given_experts(expert_index, x.shape[:-1], position, num_tokens)
        self.dispatcher.require_same(tokens, self._options_of_all_ranks)
        # The attributes may have changed since the last step.
        losses = checked_losses(self.losses) if self.losses else ()
        y, routing, tokens_per_expert = self._mixture(tokens, expert_index)
        if position is not None:
            num_all = math.prod(x.shape[:-1])
            y = y.new_zeros(num_all, y.shape[-1]).index_copy(0, position, y)
        values = {}
        if losses:
            if sequence_offsets is None:
                sequence_offsets = _sequence_offsets(x, mask)
            ranks = self.dispatcher.balanced
            values = _router_losses(losses, routing, tokens_per_expert, sequence_offsets, ranks)
        aux = MoEAux(
            loss=self._loss(routing, values),
            importance=routing.importance,
            load=routing.load,
            gates=routing.gates,
            expert_index=routing.expert_index,
            tokens_per_expert=tokens_per_expert,
            token_offsets=routing.token_offsets,
            gate_metrics=dict(routing.metrics),
            load_factors=routing.load_factors,
            losses={name: value.detach() for name, value in values.items()},
            kept=routing.kept,
        )
        if x.dim() != 2:
            # Like matmul, return no autograd view, so that the caller can modify y in place.
            y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
        return y, aux

    def _real_tokens(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Checks x and mask; returns the tokens [T, D] that are not masked out, and their position.

        The position is that among all tokens of x; None without a mask.
        """
        if x.dim() < 1 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"MoE: x must have a last dimension of d_model = {self.d_model}, "
                f"got shape {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            require_floating("MoE", x)
        tokens = x if x.dim() == 2 else x.reshape(-1, self.d_model)
        if mask is None:
            return tokens, None
        require_mask("MoE", mask, tuple(x.shape[:-1]))
        position = mask.reshape(-1).nonzero().squeeze(1)
        return tokens.index_select(0, position), position

    def _given_experts(
        self,
        expert_index: Tensor,
        leading: Sequence[int],
        position: Tensor | None,
        num_tokens: int,
    ) -> Tensor:
        """Checks expert_index of `forward`; returns the experts [T, K] of the T real tokens.

        leading: the dimensions of x before the last. position: see `_real_tokens`.
        """
        require_tensor("MoE", expert_index=expert_index)
        if position is not None and expert_index.shape[:-1] == leading:
            expert_index = expert_index.reshape(math.prod(leading), expert_index.shape[-1])
            expert_index = expert_index.index_select(0, position)
        return checked_index(self.gate, expert_index, num_tokens)

    def _mixture(
        self, tokens: Tensor, expert_index: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor]:
        """Computes y [T, d_output] of the tokens, their routing and tokens_per_expert [E]."""
        y, routing, tokens_per_expert, shared = self._dispatched(tokens, expert_index)
        if y.dtype != tokens.dtype:
            y = y.to(tokens.dtype)
        if self.num_identity_experts > 0:
            first = self.num_experts
            y = _add_identity(y, tokens, routing, range(first, first + self.num_identity_experts))
        each_has_k = routing.token_offsets is None and routing.kept is None
        if not each_has_k or self.num_identity_experts > 0 or self.num_null_experts > 0:
            # Without an expert, the output of a token with NaN would be 0.
            y = y.masked_fill(~tokens.isfinite().all(1, keepdim=True), math.nan)
        if shared is not None:
            rule = f"return [T, d_output = {y.shape[-1]}]"
            fits = (*shared.shape,) == (tokens.shape[0], y.shape[-1])
            require(fits, "MoE: shared_expert", rule, [*shared.shape])
            y = y + shared.to(y.dtype)
        return y, routing, tokens_per_expert

    def _dispatched(
        self, tokens: Tensor, expert_index: Tensor | None
    ) -> tuple[Tensor, Routing, Tensor, Tensor | None]:
        """Calls the dispatcher; returns its results and the output of the shared expert."""
        experts, fused, d_output = self.experts, self._fused, None
        if isinstance(experts, Experts):  # an adapter may have replaced them
            fused, d_output = experts.fused, experts.d_output
        gate = self._routed
        if expert_index is not None:
            gate = partial(self._routed, expert_index=expert_index)
        how: dict[str, Any] = {
            "fused": fused,
            "recompute": self.recompute,
            "dtype": self._dtype_of_experts(),
        }
        shared = None
        if self.dispatcher.sends_tokens:
            compute = None if self.shared_expert is None else partial(self._shared, tokens)
            meanwhile = Meanwhile(gate, uncompiled(self.gate)._sums_later, compute)
            y, routing, tokens_per_expert = self.dispatcher(
                tokens, meanwhile.routed, experts, meanwhile=meanwhile, **how
            )
            routing, shared = meanwhile.completed(routing), meanwhile.shared
        else:
            y, routing, tokens_per_expert = self.dispatcher(tokens, gate, experts, **how)
            if self.shared_expert is not None:
                shared = self._shared(tokens)
        if d_output not in (None, y.shape[-1]):
            refuse("MoE: experts", f"return [R, d_output = {d_output}]", y.shape[-1])
        return y, routing, tokens_per_expert, shared

    def _loss(self, routing: Routing, values: Mapping[str, Tensor]) -> Tensor:
        """Returns `MoEAux.loss`; values are those of `losses`, by name."""
        # L_importance + L_load in one operator; a gate may return another dtype for the load.
        balanced = [routing.importance, cast(routing.load, routing.importance.dtype)]
        weights = self.w_importance, self.w_load
        if weights != self._checked_weights:  # the attributes may have changed
            given = {"w_importance": self.w_importance, "w_load": self.w_load}
            self._checked_weights = require_at_least(0, "MoE", **given)
        loss = ops.weighted_cv_squared(balanced, self._checked_weights)
        if routing.loss is not None:
            loss = loss + routing.loss
        for term in self.losses:
            loss = loss + term.weight * values[term.name]
        return loss

    def _jagged(
        self, x: Any, mask: Tensor | None, expert_index: Tensor | None
    ) -> tuple[Tensor, MoEAux]:
        """Applies the layer to the values [ΣT, D] of the nested tensor x; mask must be None."""
        if mask is not None:
            raise ValueError(f"MoE: mask must be None if x is nested, got {tuple(mask.shape)}")
        rule = "be a nested tensor [B, j, D] in the jagged layout without gaps"
        jagged = x.layout == torch.jagged and x.dim() == 3 and x._ragged_idx == 1
        require(jagged and x.lengths() is None, "MoE: x", rule, f"{x.layout}, {x.dim()} dimensions")
        if x.device.type == "cpu" and not torch.compiler.is_compiling():
            ends = int(x.offsets()[0]), int(x.offsets()[-1])
            require(
                ends == (0, len(x.values())), "MoE: x", rule, f"offsets from {ends[0]} to {ends[1]}"
            )
        y, aux = self._forward(x.values(), None, expert_index, x.offsets())
        lengths = {"min_seqlen": x._maybe_min_seqlen, "max_seqlen": x._maybe_max_seqlen}
        return torch.nested.nested_tensor_from_jagged(y, x.offsets(), **lengths), aux

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        sharding = self.sharding if is_mark(name) else None
        if sharding is not None:
            sharding.require_whole(self.experts, self.gate)

    def _routed(
        self,
        tokens: Tensor,
        ranks: Ranks | None,
        select: Callable[..., Any] | None = None,
        *,
        sums_later: bool = False,
        **given: Tensor,
    ) -> Routing:
        """Calls the gate and drops slots beyond the capacity; see `HierarchicalGate.forward`.

        sums_later: the gate does not sum importance and load over the ranks.
        """
        gate_ranks = None if sums_later else ranks
        if select is not None:  # torch.compile would compile the gate again for each select
            routing = uncompiled(self.gate)(tokens, gate_ranks, select=select, **given)
        else:
            routing = self.gate(tokens, gate_ranks, **given)
        if not isinstance(routing, Routing):
            kind = type(routing).__name__
            raise TypeError(f"MoE: gate must return a moe_ext.Routing, got {kind}")
        if routing.importance.shape[0] != self._num_choices:
            name = "MoE: num_experts + num_identity_experts + num_null_experts"
            rule = f"be {routing.importance.shape[0]}, the gate's number of experts"
            refuse(name, rule, self._num_choices)
        capacity = Capacity.from_option(self.capacity)
        if capacity is not None:
            rule = "be None with a hierarchical gate"
            require(not self.gate.shares_groups, "MoE: capacity", rule, capacity)
            routing = capacity.drop_slots(routing, self.num_experts, self.k, ranks)
        return routing

    def _shared(self, tokens: Tensor) -> Tensor:
        """Returns the output of the shared expert."""
        assert self.shared_expert is not None
        dtype = self._dtype_of_experts()
        y: Tensor = self.shared_expert(tokens if dtype is None else tokens.to(dtype))
        return y

    def _dtype_of_experts(self) -> torch.dtype | None:
        """Returns the dtype to which tokens are cast for the experts; None: no cast."""
        return self.experts._dtype_of_rows() if self.casts_tokens else None

    def _sparse_parts(self) -> list[SparsePart]:
        """Returns the parameters that `count_parameters` counts in part."""
        local = self.dispatcher.local_experts
        share = Fraction(self.k, self._num_choices)
        copies = Fraction(self.num_experts, max(len(local), 1))
        if self.sharding is not None and self.sharding.has_dtensors:
            copies = Fraction(1)
        return [(self.experts.parameters(), share, copies)]

    def _options(self) -> dict[str, object]:
        """Returns options that the text of the module shows, by name."""
        shown: dict[str, object] = {
            "d_model": self.d_model,
            "num_experts": self.num_experts,
            "k": self.k,
            "recompute": self.recompute,
            "w_importance": self.w_importance,
            "w_load": self.w_load,
        }
        for name in ("num_identity_experts", "num_null_experts", "capacity"):
            if getattr(self, name):
                shown[name] = getattr(self, name)
        if self.losses:
            shown["losses"] = list(self.losses)
        return shown

    def _options_of_all_ranks(self) -> dict[str, object]:
        """Returns options that must agree on all ranks, by name."""
        assert self.sharding is not None
        return self._options() | self.sharding.options_of(self.gate, self.experts)

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        shown = self._options()
        sharding = self.sharding
        if sharding is not None:
            shown["sharding"] = sharding
        shown["parameters"], shown["active_parameters"] = count_parameters(self)
        return ", ".join(f"{name}={value}" for name, value in shown.items())


class KeepAux(nn.Module):
    """Calls a `MoE` and returns only y, as `torch.nn.Sequential` needs it; stores aux.

    Copies and pickles have no aux, because its autograd graph cannot be copied.

    Args:
        layer: a `MoE`, or another module that returns y and a `MoEAux`.
        adds_loss: whether the backward pass through y includes ``aux.loss``, see `add_loss`.

    Attributes:
        layer: the constructor argument.
        adds_loss: the constructor argument.
        aux: the `MoEAux` of the last forward pass; None before the first. With adds_loss, it has no
            autograd graph.

    Raises:
        TypeError: adds_loss is not a bool.
        ValueError: the forward pass is recomputed by reentrant checkpointing, in which ``aux.loss``
            has no gradient; adds_loss must be True, or the losses must have the weight 0.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), KeepAux(MoE(16, 4, 2)))
        >>> y = model(torch.randn(5, 8))
        >>> loss = y.square().mean() + model[1].aux.loss
    """

    def __init__(self, layer: nn.Module, *, adds_loss: bool = False) -> None:
        super().__init__()
        self.layer = layer
        self.adds_loss: bool = require_bool("KeepAux", adds_loss=adds_loss)[0]
        self.aux: MoEAux | None = None

    def forward(self, *args: Any, **options: Any) -> Tensor:
        """Returns y of the layer, which takes the arguments."""
        y: Tensor
        y, aux = self.layer(*args, **options)
        if self.adds_loss:
            y = add_loss(y, aux.loss)
            aux = tree_map_only(Tensor, Tensor.detach, aux)
        elif self.aux is not None and not torch.compiler.is_compiling() and _in_backward():
            rule = "be True with reentrant checkpointing, which computes no gradient of aux.loss "
            rule += "(or pass use_reentrant=False)"
            lost = aux.loss.requires_grad and not self.aux.loss.requires_grad
            require(not lost, "KeepAux: adds_loss", rule, False)
        self.aux = aux
        return y

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"aux": None}


def _in_backward() -> bool:
    """Returns whether a backward pass runs in this thread: a forward pass is then recomputed."""
    return torch._C._current_graph_task_id() != -1


def _add_identity(y: Tensor, x: Tensor, routing: Routing, experts: range) -> Tensor:
    """Computes y + (Σ_i g_i) x over the chosen experts i in the range (arXiv 2410.07348, Sec. 3.1).

    The sum is rounded once, to the dtype of y.

    Args:
        y: [T, D], the output of the other experts.
        x: [T, D], the tokens.
        routing: the routing decision.
        experts: the identity experts.

    Raises:
        ValueError: y does not have the width of x.
    """
    shape = [*y.shape]
    rule = f"return [T, d_model = {x.shape[1]}] with num_identity_experts > 0"
    require(shape[1] == x.shape[1], "MoE: experts", rule, shape)
    index, gates = routing.expert_index, routing.gates
    chosen = (index >= experts.start) & (index < experts.stop)
    if routing.kept is not None:
        chosen = chosen & routing.kept
    gates = torch.where(chosen, gates, 0)
    slot = torch.arange(gates.numel(), device=gates.device).view_as(gates)
    # Unlike a sum of torch, it has the same order for any number of tokens.
    total = ops.combine(gates.reshape(-1, 1), torch.ones_like(gates), slot, routing.token_offsets)
    return (y + total * x).to(y.dtype)
