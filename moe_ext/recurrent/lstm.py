"""An LSTM with a mixture of experts as its weight matrix (Section 3.1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn import functional as F
from torch.types import Device

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext._plain_names import plain_names
from moe_ext.checks import (
    require,
    require_at_least,
    require_bool,
    require_floating,
    require_mask,
    require_not_nested,
    require_sizes,
)
from moe_ext.dispatch._dispatchers import LocalDispatcher
from moe_ext.dispatch._sharding import ExpertParallel, ExpertSharding, parallel_options
from moe_ext.experts import FeedForwardExperts
from moe_ext.gates import Gate, hierarchical_load
from moe_ext.losses import importance_loss, load_loss
from moe_ext.moe import MoE, MoEAux
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout
from moe_ext.ranks.placement import ExpertPlacement
from moe_ext.recurrent.bptt import num_evaluations, unroll

__all__ = ["MoELSTM", "MoELSTMCell", "exchanged_bytes", "lstm_state"]

_Tensors = tuple[Tensor, ...]
_State = tuple[Tensor, Tensor]


def lstm_state(gates: Tensor, c: Tensor) -> _State:
    """Computes c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j) and h_t = sigmoid(o) tanh(c_t).

    Args:
        gates: [B, 4 · U], the concatenation of i, f, j and o.
        c: [B, U], the previous cell state c_{t-1}.

    Returns:
        The tuple (h_t, c_t), each [B, U].
    """
    dtype = torch.promote_types(gates.dtype, c.dtype)
    return ops.lstm_cell(gates.to(dtype), c.to(dtype))


class MoELSTMCell(nn.Module):
    """Computes one step of an LSTM whose weight matrix is a mixture of E matrices.

    The equations are::

        z = MoE([x_t, h_{t-1}]) + b = [i, f, j, o]
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j)        h_t = sigmoid(o) tanh(c_t)

    The gate sees the concatenation of x_t and h_{t-1}. Each expert is a matrix [D + U, 4 · U]. All
    experts share the bias b. It starts at 1 for the forget gate f and at 0 for i, j and o.

    Args:
        d_input: D, the width of x_t.
        d_hidden: U, the width of h and c.
        num_experts: E, the number of experts.
        k: experts per row [x_t, h_{t-1}].
        dropout: dropout probability of x_t. The state h has no dropout.
        gate: a `Gate` of width D + U. None: a NoisyTopKGate with noise_epsilon and generator.
        noise_epsilon, generator: see `NoisyTopKGate`. None: the gate's defaults.
        parallel: how ranks share the experts; see `MoE`. All ranks must then call the cell
            together. None: this process has all experts.
        device, dtype: of the parameters, except those of a given gate; None: torch's defaults.

    Attributes:
        moe: the `MoE` whose experts are the matrices.
        bias: [4 · U] parameter b.

    Raises:
        ValueError, TypeError: an argument is invalid; see also `MoE`.
    """

    @explains_names
    def __init__(
        self,
        d_input: int,
        d_hidden: int,
        num_experts: int,
        k: int,
        *,
        dropout: float = 0.0,
        gate: Gate | None = None,
        noise_epsilon: float | None = None,
        generator: torch.Generator | None = None,
        parallel: ExpertParallel | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d_input, d_hidden = require_sizes("MoELSTMCell", d_input=d_input, d_hidden=d_hidden)
        (num_experts,) = require_sizes("MoELSTMCell", num_experts=num_experts)
        (dropout,) = require_at_least(-math.inf, "MoELSTMCell", dropout=dropout)
        require(0 <= dropout < 1, "MoELSTMCell: dropout", "be in [0, 1)", dropout)
        self.d_input = d_input
        self.d_hidden = d_hidden
        self.dropout = dropout
        width = d_input + d_hidden
        local = range(num_experts)
        if parallel is not None:
            ranks = Layout.of(parallel.process_group).expert_parallel
            together = 1 if gate is None else gate.experts_per_group
            local = ExpertPlacement(num_experts, ranks.size, together).experts_of(ranks.rank)
        self.moe: MoE = MoE(
            width,
            num_experts,
            k,
            gate=gate,
            experts=FeedForwardExperts(
                len(local),
                width,
                d_output=4 * d_hidden,
                first_expert=local.start,
                device=device,
                dtype=dtype,
            ),
            w_importance=0,
            w_load=0,
            noise_epsilon=noise_epsilon,
            generator=generator,
            parallel=parallel,
            device=device if gate is None else None,
            dtype=dtype if gate is None else None,
        )
        bias = torch.empty(4 * d_hidden, device=device, dtype=dtype)
        self.bias: nn.Parameter = nn.Parameter(bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitializes only the bias. The gate and the experts have their own reset_parameters."""
        with torch.no_grad():
            self.bias.zero_()
            self.bias[self.d_hidden : 2 * self.d_hidden] = 1

    def initial_state(self, x: Tensor, batch_size: int) -> _State:
        """Returns h and c as zeros [batch_size, U], in the promoted dtype of x and the bias."""
        dtype = self._dtype_of_state(x)
        zeros = torch.zeros(batch_size, self.d_hidden, dtype=dtype, device=x.device)
        return zeros, zeros

    def _dtype_of_state(self, x: Tensor) -> torch.dtype:
        return torch.promote_types(x.dtype, self.bias.dtype)

    def _checked_state(
        self, owner: str, state: _State | None, x: Tensor, batch_size: int
    ) -> _State:
        """Returns a state in the dtype of the initial state; None: the initial state."""
        if state is None:
            return self.initial_state(x, batch_size)
        if not isinstance(state, tuple | list) or len(state) != 2:
            raise TypeError(f"{owner}: state must be a pair (h, c), got {type(state).__name__}")
        require_not_nested(f"{owner}: state", h=state[0], c=state[1])
        shape, shapes = (batch_size, self.d_hidden), [tuple(s.shape) for s in state]
        rule = f"be two tensors of shape {shape}"
        require(shapes == [shape, shape], f"{owner}: state", rule, shapes)
        dtype = self._dtype_of_state(x)
        h, c = (s.to(dtype) for s in state)
        return h, c

    def forward(self, x: Tensor, state: _State | None = None) -> tuple[_State, MoEAux]:
        """Computes the next state from x [B, D] and the state (h, c), each [B, U].

        The state is converted to the promoted dtype of x and the bias. None: zeros.

        Returns:
            The new state (h, c) and the `MoEAux` of this step. Its loss is only the gate's own
            loss, because `MoELSTM` computes the balancing losses over whole sequences.

        Raises:
            ValueError: x or the state has the wrong shape.
        """
        require_not_nested("MoELSTMCell", x=x)
        if x.dim() != 2 or x.shape[1] != self.d_input:
            raise ValueError(
                f"MoELSTMCell: x must have shape [B, d_input = {self.d_input}], "
                f"got {tuple(x.shape)}"
            )
        h, c = self._checked_state("MoELSTMCell", state, x, x.shape[0])
        x = F.dropout(x, self.dropout, self.training)
        z, aux = self.moe(torch.cat([x, h], 1))
        return lstm_state(z + self.bias, c), aux

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        return f"d_input={self.d_input}, d_hidden={self.d_hidden}, dropout={self.dropout}"


class MoELSTM(nn.Module):
    """Applies an `MoELSTMCell` to whole sequences.

    Each step depends on the step before it. So the experts see only one time step of the batch at
    once (Sec. 3.1), and a large batch is needed. To fit a large batch in memory, memory_slots
    limits the number of states (h, c) saved for backward and recomputes steps
    (`moe_ext.recurrent.unroll`). With memory_slots=5, a step of a sequence of 100 steps is
    evaluated about 4.2 times on average. Recomputation replays noise and dropout. Outputs and
    gradients are bitwise identical to those without memory_slots.

    Args:
        d_input: D, the width of x.
        d_hidden: U, the width of y and of the state.
        num_experts, k, dropout, noise_epsilon, generator: see `MoELSTMCell`.
        gate: see `MoELSTMCell`. A custom gate must select k experts for every row. Its random
            numbers must come from torch's generators or its attribute `generator`. It may modify
            its buffers only in place. With memory_slots, it must not modify its buffers, and it
            passes gradients only to x and to its own parameters.
        w_importance, w_load: weights of the importance loss and of the load loss.
        memory_slots: number of saved states, including the initial one. None: save all activations.
        batch_first: whether the dimensions of x, mask and y begin with batch, sequence [B, S] or
            with sequence, batch [S, B].
        process_group: the ranks that share the experts; a short form of
            ``parallel=ExpertParallel(process_group)``.
        parallel: how ranks share the experts; see `moe_ext.distributed.ExpertParallel`. The
            placement must be "experts" or None. All ranks must run forward and backward of the
            layer together; the numbers of sequences and of time steps may differ between them.
            Each time step of the longest rank exchanges rows. See `MoE` for the gradients.
        gather_experts: whether each rank instead gathers the weights of all experts once for all
            time steps, and sends their gradients back once. None: whichever sends fewer bytes for
            a batch (`exchanged_bytes`). Has no effect on a single rank.
        device, dtype: see `MoELSTMCell`.

    Raises:
        ValueError, TypeError: an argument is invalid; see also `MoE`.

    Example:
        >>> layer = MoELSTM(64, 128, num_experts=8, k=2, memory_slots=5)
        >>> y, (h, c), aux = layer(torch.randn(16, 100, 64))
        >>> y.shape
        torch.Size([16, 100, 128])
        >>> loss = y.square().mean() + aux.loss
    """

    w_importance: float
    w_load: float
    batch_first: bool

    @explains_names
    def __init__(
        self,
        d_input: int,
        d_hidden: int,
        num_experts: int,
        k: int,
        *,
        dropout: float = 0.0,
        gate: Gate | None = None,
        w_importance: float = 0.1,
        w_load: float = 0.1,
        noise_epsilon: float | None = None,
        generator: torch.Generator | None = None,
        memory_slots: int | None = None,
        batch_first: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
        parallel: ExpertParallel | None = None,
        gather_experts: bool | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.w_importance, self.w_load = require_at_least(
            0, "MoELSTM", w_importance=w_importance, w_load=w_load
        )
        if memory_slots is not None:
            (memory_slots,) = require_sizes("MoELSTM", memory_slots=memory_slots)
        self.memory_slots = memory_slots
        (self.batch_first,) = require_bool("MoELSTM", batch_first=batch_first)
        if gather_experts is not None:
            require_bool("MoELSTM", gather_experts=gather_experts)
        self.gather_experts = gather_experts
        parallel = parallel_options("MoELSTM", process_group, parallel)
        self.ranks: Ranks | None = None  # balance their sequences together
        if parallel is not None:
            rule = 'be "experts" or None'
            placement = parallel.placement
            require(placement in ("experts", None), "MoELSTM: parallel.placement", rule, placement)
            by_batch = gate is not None and gate.routes_by_batch
            rule = "route each row on its own if ranks share the experts (routes_by_batch = False)"
            require(not by_batch, "MoELSTM: gate", rule, gate)
            if parallel.balance == "global":
                self.ranks = Layout.of(parallel.process_group).world
            # The losses cover whole sequences, so a time step sums nothing over the ranks.
            parallel = replace(parallel, balance="local")
        self.cell: MoELSTMCell = MoELSTMCell(
            d_input,
            d_hidden,
            num_experts,
            k,
            dropout=dropout,
            gate=gate,
            noise_epsilon=noise_epsilon,
            generator=generator,
            parallel=parallel,
            device=device,
            dtype=dtype,
        )
        self.num_experts: int = self.cell.moe.num_experts

    def forward(
        self, x: Tensor, state: _State | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, _State, MoEAux]:
        """Maps x [B, S, D] to y [B, S, U].

        Args:
            x: [B, S, D], floating point, S >= 1.
            state: (h, c), each [B, U], before the first step; None: zeros. It is converted to the
                promoted dtype of x and the bias.
            mask: [B, S] bool, True at real tokens. Masked-out tokens do not change the state and
                never reach the gate, the experts or the losses; their y is 0.

        Returns:
            - y [B, S, U], in the dtype of x
            - the state (h, c) after the last real token of each sequence
            - a `MoEAux`, summed over the steps and, where `MoEAux` says so, over the ranks. The
              gate's own loss is summed too. A hierarchical load (App. B) is computed from the sums
              of its factors. The attributes gates and expert_index list the real tokens in the
              order of flattened x. The dictionary gate_metrics is empty.

        Raises:
            ValueError: x, state or mask has the wrong shape.
            TypeError: x is not floating point, or mask is not bool.
            RuntimeError: with memory_slots, the gate modified a buffer, or the training mode
                changed between forward and backward.
        """
        self._check(x, mask)
        cell = self.cell

        def swap(tensor: Tensor) -> Tensor:
            """Swaps the batch and time dimensions of tensor if batch_first is set."""
            return tensor.transpose(0, 1) if self.batch_first else tensor

        inputs = [swap(tensor) for tensor in (x, mask) if tensor is not None]
        num_steps, batch_size = inputs[0].shape[:2]
        state = cell._checked_state("MoELSTM", state, x, batch_size)

        step = _CellStep(cell)
        if cell.moe.sharding is not None and cell.moe.sharding.exchange is not None:
            num_steps_of_all, gather = self._plan_exchange(cell.moe.sharding, inputs)
            if torch.is_grad_enabled():  # for frozen parts too: all ranks run backward together
                h, c = (x if x.requires_grad else x.detach().requires_grad_() for x in state)
                state = h, c
            if gather:
                step = _CellStep(cell, cell.moe.sharding)
            elif num_steps < num_steps_of_all:
                inputs = _lengthened(inputs, num_steps_of_all)
        outputs, (h, c) = unroll(
            step,
            step.tensors,
            inputs,
            state,
            memory_slots=self.memory_slots,
            generators=step.generators,
        )
        y, gates, expert_index = (swap(output[:num_steps]) for output in outputs[:3])
        tokens_per_expert, *sums = (output.sum(0) for output in outputs[3:])
        if self.ranks is not None:
            sums = list(self.ranks.sum(*sums))
        importance, load, gate_loss, *factors = sums
        load_factors = None
        if factors:
            load, load_factors = hierarchical_load(*factors), tuple(factors)
        loss = importance_loss(importance, self.w_importance) + load_loss(load, self.w_load)
        if mask is None:
            gates, expert_index = gates.flatten(0, 1), expert_index.flatten(0, 1)
        else:
            gates, expert_index = gates[mask], expert_index[mask]
        aux = MoEAux(
            loss + gate_loss,
            importance,
            load,
            gates,
            expert_index,
            tokens_per_expert,
            gate_metrics={},
            load_factors=load_factors,
        )
        return y.to(x.dtype), (h, c), aux

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        losses = f"w_importance={self.w_importance}, w_load={self.w_load}"  # of the sequences
        return f"{losses}, memory_slots={self.memory_slots}"

    def _plan_exchange(
        self, sharding: ExpertSharding, inputs: Sequence[Tensor]
    ) -> tuple[int, bool]:
        """Returns the largest number of time steps of a rank, and whether to gather the experts.

        All ranks call this together. inputs are x [S, B, D] and an optional mask [S, B].
        """
        x, *mask = inputs
        own_rows = mask[0].count_nonzero() if mask else torch.tensor(len(x) * x.shape[1])
        sizes = torch.stack([torch.tensor(len(x)), own_rows.cpu()]).to(x.device)
        sizes_of_ranks = sharding.layout.expert_parallel.gather(sizes).tolist()
        num_steps = max(steps for steps, _ in sizes_of_ranks)
        if self.gather_experts is not None:
            return num_steps, self.gather_experts
        num_rows = sum(rows for _, rows in sizes_of_ranks)
        backward = torch.is_grad_enabled()  # the same on all ranks
        rows, weights = exchanged_bytes(self, num_steps, num_rows, backward=backward)
        return num_steps, weights < rows

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
        require_not_nested("MoELSTM", x=x)
        for name in ("capacity", "losses", "w_importance", "w_load"):
            value = getattr(self.cell.moe, name)
            rule = "have no value, because it would apply to each time step"
            require(not value, f"MoELSTM: cell.moe.{name}", rule, value)
        axes = "B, S" if self.batch_first else "S, B"
        time = 1 if self.batch_first else 0
        if x.dim() != 3 or x.shape[2] != self.cell.d_input or x.shape[time] == 0:
            raise ValueError(
                f"MoELSTM: x must have shape [{axes}, d_input = {self.cell.d_input}] with S at "
                f"least 1, got {tuple(x.shape)}"
            )
        require_floating("MoELSTM", x)
        if mask is not None:
            require_mask("MoELSTM", mask, tuple(x.shape[:2]))


def exchanged_bytes(
    layer: MoELSTM, num_steps: int, num_rows: int, *, backward: bool = True
) -> tuple[float, int]:
    """Counts the bytes of experts that ranks send to each other for a batch of sequences.

    The counts are summed over the ranks. They include no row counts, indices and gates. The number
    of rows assumes that the gates choose all experts equally often.

    Args:
        layer: a layer whose experts are sharded over ranks.
        num_steps: the number of time steps of the longest sequence.
        num_rows: the number of real tokens of all ranks.
        backward: whether a backward pass follows.

    Returns:
        The bytes of exchanging rows in each time step, recomputed steps included; and the bytes of
        gathering the weights and returning their gradients.

    Raises:
        ValueError: this process has all experts of the layer.
    """
    moe = layer.cell.moe
    if moe.sharding is None or moe.sharding.exchange is None:
        raise ValueError("exchanged_bytes: layer must share its experts with other ranks")
    size = moe.sharding.placement.num_ranks
    weights = list(moe.experts.parameters())
    itemsize = weights[0].itemsize
    if torch.is_autocast_enabled(weights[0].device.type):
        itemsize = torch.get_autocast_dtype(weights[0].device.type).itemsize
    evaluations = num_steps
    if backward and layer.memory_slots is not None:
        evaluations = num_evaluations(num_steps, layer.memory_slots) + 1
    passes = (evaluations + backward * num_steps) / num_steps
    copies = moe.k if moe.sharding.exchange.unit == "rows" else min(moe.k, size)
    width = layer.cell.d_input + 5 * layer.cell.d_hidden  # of [x, h] and of the gates i, f, j, o
    rows = passes * num_rows * copies * (size - 1) / size * width * itemsize
    expert_bytes = sum(weight.shape[1:].numel() * weight.itemsize for weight in weights)
    return rows, (1 + backward) * (size - 1) * layer.num_experts * expert_bytes


def _lengthened(inputs: Sequence[Tensor], num_steps: int) -> list[Tensor]:
    """Appends masked-out time steps to x [S, B, D] and an optional mask [S, B]."""
    x, *mask = inputs
    real = mask[0] if mask else torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    more = num_steps - len(x)
    return [F.pad(x, (0, 0, 0, 0, 0, more)), F.pad(real, (0, 0, 0, more))]


@contextmanager
def _without_exchange(moe: MoE) -> Iterator[None]:
    """Within this context, the layer computes all experts here, from gathered parameters."""
    dispatcher, moe.dispatcher = moe.dispatcher, LocalDispatcher(moe.num_experts, moe.sharding)
    try:
        yield
    finally:
        moe.dispatcher = dispatcher


class _CellStep:
    """Wraps a cell as a function of its parameters and buffers, as `unroll` needs it.

    Args:
        cell: the cell.
        gather: the sharding of its experts, to gather their weights once for all steps. None: the
            cell uses its experts as they are.
    """

    def __init__(self, cell: MoELSTMCell, gather: ExpertSharding | None = None) -> None:
        self.gather = gather
        tensors = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
        self.cell = cell
        self.modes = [(module, module.training) for module in cell.modules()]
        if gather is not None:
            for name, plain in plain_names(cell, tensors).items():
                if plain.startswith("moe.experts."):
                    tensors[name] = gather.gather_rows(tensors[name])
        self.names, self.tensors = tuple(tensors), tuple(tensors.values())
        own = [getattr(module, "generator", None) for module in cell.modules()]
        self.generators = [g for g in own if isinstance(g, torch.Generator)]

    def __call__(
        self, tensors: _Tensors, inputs: _Tensors, state: _Tensors
    ) -> tuple[_Tensors, _Tensors]:
        if any(module.training != mode for module, mode in self.modes):
            raise RuntimeError(
                "MoELSTM: with memory_slots, the training mode must not change between forward and "
                "backward; call backward before train() or eval()"
            )
        x, *mask = inputs
        if mask:
            y, state, aux = self._masked_call(tensors, x, mask[0], state)
        else:
            state, aux = self._call(tensors, x, state)
            y = state[0]
        by_token = (y, aux.gates, aux.expert_index)
        sums = (aux.importance, aux.load, aux.loss, *(aux.load_factors or ()))
        return state, (*by_token, aux.tokens_per_expert, *sums)

    def _call(self, tensors: _Tensors, x: Tensor, state: _Tensors) -> tuple[_Tensors, MoEAux]:
        named = dict(zip(self.names, tensors, strict=True))
        with nullcontext() if self.gather is None else _without_exchange(self.cell.moe):
            state, aux = functional_call(self.cell, named, (x, state))
        rule = "select the same number of experts for every row, and drop none"
        same = aux.token_offsets is None and aux.kept is None
        require(same, "MoELSTM: gate", rule, self.cell.moe.gate)
        return state, aux

    def _masked_call(
        self, tensors: _Tensors, x: Tensor, mask: Tensor, state: _Tensors
    ) -> tuple[Tensor, _Tensors, MoEAux]:
        """Runs the cell on the rows that mask selects; other rows output 0 and keep their state.

        tensors are the parameters and buffers of the cell.
        """
        rows = mask.nonzero().squeeze(1)

        def spread(values: Tensor) -> Tensor:
            """Scatters values to the full batch, to give all steps the same shape."""
            zeros = values.new_zeros(mask.shape[0], *values.shape[1:])
            return zeros.index_copy(0, rows, values)

        chosen = tuple(s.index_select(0, rows) for s in state)
        new, aux = self._call(tensors, x.index_select(0, rows), chosen)
        state = tuple(s.index_copy(0, rows, n) for s, n in zip(state, new, strict=True))
        aux = aux._replace(gates=spread(aux.gates), expert_index=spread(aux.expert_index))
        return spread(new[0]), state, aux
