"""A recurrent network whose weight matrices are a mixture of experts, Section 3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.nn import functional as F

from moe_ext.checks import (
    require,
    require_at_least,
    require_floating,
    require_mask,
    require_sizes,
)
from moe_ext.distributed.ranks import Ranks
from moe_ext.distributed.sharding import Layout
from moe_ext.experts import FeedForwardExperts
from moe_ext.gates import Gate, hierarchical_load
from moe_ext.losses import importance_loss, load_loss
from moe_ext.moe import MoE, MoEAux
from moe_ext.recurrent.bptt import unroll

__all__ = ["MoELSTM", "MoELSTMCell", "lstm_state"]

_Tensors = tuple[Tensor, ...]
_State = tuple[Tensor, Tensor]


def lstm_state(gates: Tensor, c: Tensor) -> _State:
    """h_t = sigmoid(o) tanh(c_t) and c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j).

    Args:
        gates: [B, 4 · U], i, f, j and o.
        c: c_{t-1}, [B, U].
    """
    i, f, j, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * j.tanh()
    return o.sigmoid() * c.tanh(), c


class MoELSTMCell(nn.Module):
    """One step of an LSTM with a mixture of E matrices in place of its one.

        z = MoE([x_t, h_{t-1}]) + b = [i, f, j, o]
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j)        h_t = sigmoid(o) tanh(c_t)

    The gate reads the input and the state, each expert is a matrix [D + U, 4 · U]. b is common to
    all, 1 for the forget gate at first and 0 for the others.

    Args:
        d_input: D, the width of x_t.
        d_hidden: U, the width of h and c.
        num_experts: E.
        k: experts per row.
        dropout: probability, on x_t (not on h).
        gate: a `Gate` of width D + U; None is NoisyTopKGate, with noise_epsilon and
            generator.
        noise_epsilon, generator: see `NoisyTopKGate`.

    Raises:
        ValueError: an argument is out of range, or `MoE` refuses it.
    """

    def __init__(
        self,
        d_input: int,
        d_hidden: int,
        num_experts: int,
        k: int,
        *,
        dropout: float = 0.0,
        gate: Gate | None = None,
        noise_epsilon: float = 1e-2,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        require_sizes("MoELSTMCell", d_input=d_input, d_hidden=d_hidden)
        require(0 <= dropout < 1, "MoELSTMCell: dropout", "be in [0, 1)", dropout)
        self.d_input = d_input
        self.d_hidden = d_hidden
        self.dropout = dropout
        width = d_input + d_hidden
        self.moe = MoE(
            width,
            num_experts,
            k,
            gate=gate,
            experts=FeedForwardExperts(num_experts, width, (), d_output=4 * d_hidden),
            w_importance=0,
            w_load=0,
            noise_epsilon=noise_epsilon,
            generator=generator,
        )
        self.bias = nn.Parameter(torch.empty(4 * d_hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The bias as at first; gate and experts have a method of this name of their own."""
        with torch.no_grad():
            self.bias.zero_()
            self.bias[self.d_hidden : 2 * self.d_hidden] = 1

    def initial_state(self, x: Tensor, batch_size: int) -> _State:
        """Zeros, h and c [B, U], of the type that the cell computes in for such x."""
        dtype = torch.promote_types(x.dtype, self.bias.dtype)
        zeros = torch.zeros(batch_size, self.d_hidden, dtype=dtype, device=x.device)
        return zeros, zeros

    def forward(self, x: Tensor, state: _State | None = None) -> tuple[_State, MoEAux]:
        """x [B, D] and the state (h, c), each [B, U], to the new state and the MoE's report.

        The balancing losses are of whole sequences, importance and load summed over the steps, so
        that the report's loss holds nothing but the gate's own, if it has one.

        Raises:
            ValueError: the shape of x or of the state does not fit.
        """
        if x.dim() != 2 or x.shape[1] != self.d_input:
            raise ValueError(
                f"MoELSTMCell: x must have shape [B, d_input = {self.d_input}], "
                f"got {tuple(x.shape)}"
            )
        h, c = self.initial_state(x, x.shape[0]) if state is None else state
        _require_state("MoELSTMCell", (h, c), (x.shape[0], self.d_hidden))
        x = F.dropout(x, self.dropout, self.training)
        z, aux = self.moe(torch.cat([x, h], 1))
        return lstm_state(z + self.bias, c), aux

    if TYPE_CHECKING:
        __call__ = forward

    def extra_repr(self) -> str:
        return f"d_input={self.d_input}, d_hidden={self.d_hidden}, dropout={self.dropout}"


class MoELSTM(nn.Module):
    """An LSTM of `MoELSTMCell`s over whole sequences.

    Unlike elsewhere (Sec. 3.1), the experts meet only one time step of the batch at once, as a step
    needs the one before it. To afford a large batch instead, memory_slots bounds what is kept for
    the backward pass to that many states (h, c), and evaluates steps again: about 4.2 times each
    with 5 slots for 100 steps, see `moe_ext.recurrent.unroll`. Noise and dropout are drawn again as
    they were; all outputs and gradients have the bits that they have without.

    Args:
        d_input: D, the width of x.
        d_hidden: U, the width of y and of the state.
        num_experts, k, dropout, gate, noise_epsilon, generator: see `MoELSTMCell`. A gate of one's
            own must choose k experts for every row, draw random numbers from torch's generators or
            one in its attribute `generator`, and change its buffers in place only; with
            memory_slots, not at all, and nothing but its own parameters gets a gradient through it.
        w_importance, w_load: the weights of the two losses.
        memory_slots: how many states to keep, the initial one included; None keeps all that the
            steps compute.
        batch_first: x, mask and y begin with [B, S]; otherwise with [S, B].
        process_group: the ranks whose sequences are balanced together, each with some of its
            own, or none; they call the layer together. The experts are whole in each of them, and
            their gradients to be averaged as all others (`moe_ext.distributed.parallelize`).

    Raises:
        ValueError: an argument is out of range, or `MoE` refuses it.

    Example:
        >>> layer = MoELSTM(64, 128, num_experts=8, k=2, memory_slots=5)
        >>> y, (h, c), aux = layer(torch.randn(16, 100, 64))
        >>> y.shape
        torch.Size([16, 100, 128])
        >>> loss = y.square().mean() + aux.loss
    """

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
        noise_epsilon: float = 1e-2,
        generator: torch.Generator | None = None,
        memory_slots: int | None = None,
        batch_first: bool = True,
        process_group: ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        require_at_least(0, "MoELSTM", w_importance=w_importance, w_load=w_load)
        if memory_slots is not None:
            require_sizes("MoELSTM", memory_slots=memory_slots)
        self.num_experts = num_experts
        self.w_importance = w_importance
        self.w_load = w_load
        self.memory_slots = memory_slots
        self.batch_first = batch_first
        self.ranks: Ranks | None = None
        if process_group is not None:
            self.ranks = Layout.of(process_group).world
        self.cell = MoELSTMCell(
            d_input,
            d_hidden,
            num_experts,
            k,
            dropout=dropout,
            gate=gate,
            noise_epsilon=noise_epsilon,
            generator=generator,
        )

    def forward(
        self, x: Tensor, state: _State | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, _State, MoEAux]:
        """x [B, S, D] to y [B, S, U] in x's type, the last state, and what came with them.

        Args:
            x: [B, S, D].
            state: (h, c), each [B, U], before the first step; None is zeros.
            mask: [B, S] bool, True at real tokens. At the others, usually at the end, nothing is
                computed: the state stays, y is 0, gate, experts and losses do not see them.

        Returns:
            y, the state (h, c) after the last real token of each sequence, and the report with the
            sums over all steps, of all ranks where `MoEAux` says so; the gate's own loss is
            such a sum, and Load_H (App. B) is made of the sums of its factors. Its gates and
            experts are those of the real tokens in the order in which x, flattened, has them;
            gate_metrics is empty.

        Raises:
            ValueError, TypeError: a shape, or the type of mask, does not fit.
            RuntimeError: the gate changed a buffer, or the module changed between training and
                evaluation mode before the backward pass (with memory_slots).
        """
        self._check(x, mask)
        cell = self.cell

        def swap(tensor: Tensor) -> Tensor:
            """From the caller's order of batch and time to time first, and back."""
            return tensor.transpose(0, 1) if self.batch_first else tensor

        inputs = [swap(tensor) for tensor in (x, mask) if tensor is not None]
        batch_size = inputs[0].shape[1]
        state = cell.initial_state(x, batch_size) if state is None else state
        _require_state("MoELSTM", state, (batch_size, cell.d_hidden))

        step = _CellStep(cell)
        outputs, (h, c) = unroll(
            step,
            step.tensors,
            inputs,
            state,
            memory_slots=self.memory_slots,
            generators=step.generators,
        )
        y, gates, expert_index = (swap(output) for output in outputs[:3])
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

    def _check(self, x: Tensor, mask: Tensor | None) -> None:
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


class _CellStep:
    """A cell as a function of its parameters and buffers, as `unroll` takes it."""

    def __init__(self, cell: MoELSTMCell) -> None:
        tensors = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
        self.cell = cell
        self.training = cell.training
        self.names, self.tensors = tuple(tensors), tuple(tensors.values())
        own = [getattr(module, "generator", None) for module in cell.modules()]
        self.generators = [g for g in own if isinstance(g, torch.Generator)]

    def __call__(
        self, tensors: _Tensors, inputs: _Tensors, state: _Tensors
    ) -> tuple[_Tensors, _Tensors]:
        if self.cell.training != self.training:
            raise RuntimeError(
                "MoELSTM: training mode must be the same in the forward and backward pass"
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
        state, aux = functional_call(self.cell, named, (x, state))
        require(
            aux.token_offsets is None,
            "MoELSTM: gate",
            "choose the same number of experts for every row",
            self.cell.moe.gate,
        )
        return state, aux

    def _masked_call(
        self, tensors: _Tensors, x: Tensor, mask: Tensor, state: _Tensors
    ) -> tuple[Tensor, _Tensors, MoEAux]:
        """On the rows that the mask leaves; the others have output 0 and keep their state."""
        rows = mask.nonzero().squeeze(1)

        def spread(values: Tensor) -> Tensor:
            """One row for each of the batch, so that all steps have the same shape."""
            zeros = values.new_zeros(mask.shape[0], *values.shape[1:])
            return zeros.index_copy(0, rows, values)

        chosen = tuple(s.index_select(0, rows) for s in state)
        new, aux = self._call(tensors, x.index_select(0, rows), chosen)
        state = tuple(s.index_copy(0, rows, n) for s, n in zip(state, new, strict=True))
        aux = aux._replace(gates=spread(aux.gates), expert_index=spread(aux.expert_index))
        return spread(new[0]), state, aux


def _require_state(name: str, state: Sequence[Tensor], shape: tuple[int, int]) -> None:
    shapes = [tuple(s.shape) for s in state]
    require(shapes == [shape, shape], f"{name}: state", f"be two tensors of shape {shape}", shapes)
