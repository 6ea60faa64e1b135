"""The LSTM layer of the models (App. C.1; Sak et al. 2014 for the projection)."""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import ops
from moe_ext.checks import require
from moe_ext.experts import uniform_
from moe_ext.recurrent import lstm_state


class LSTMState(NamedTuple):
    """State of an LSTM between two steps, for N sentences."""

    m: Tensor  # output, [N, D]
    c: Tensor  # cell state, [N, units]

    def select(self, index: Tensor) -> Self:
        """Returns the state of the sentences in index [N'] int64."""
        return type(self)(*(part.index_select(0, index) for part in self))


class LSTM(nn.Module):
    """Runs a unidirectional LSTM over whole sentences; every sentence starts from a zero state.

    The equations are::

        i, f, j, o = W [x_t, m_{t-1}] + b          c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(j)
        m_t = P (sigmoid(o) tanh(c_t))

    There is no projection P if `units` is None or 0.

    Weights are initialised uniformly with variance 1 / fan_in; fan_in counts input and recurrent
    weights. The bias of the forget gate starts at 1, so that the cell keeps its state at first. The
    other biases start at 0.

    On CPUs, `moe_ext.ops.lstm` runs an LSTM with a projection, for which torch has no kernel there.
    It also runs under autocast on processors without AVX-512. All others are torch's.

    P projects the units of the cell to D = d_model. The attribute ``projection`` holds P if units
    equals d_model, the attribute ``lstm`` if units is greater. The width of x is d_input or D.
    """

    def __init__(
        self, d_model: int, units: int | None = None, *, d_input: int | None = None
    ) -> None:
        super().__init__()
        square = units == d_model
        units = units or d_model
        require(units >= d_model, "LSTM: units", f"be at least d_model = {d_model}", units)
        projected = d_model if units > d_model else 0
        self.lstm = nn.LSTM(d_input or d_model, units, proj_size=projected, batch_first=True)
        self.projection = nn.Parameter(torch.empty(d_model, units)) if square else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        units, recurrent = self.lstm.hidden_size, self.lstm.proj_size or self.lstm.hidden_size
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                projects = name in ("projection", "lstm.weight_hr_l0")
                uniform_(parameter, units if projects else self.lstm.input_size + recurrent)
            else:
                nn.init.zeros_(parameter)
        # torch adds two biases and orders the gates i, f, j, o.
        nn.init.ones_(self.lstm.get_parameter("bias_ih_l0")[units : 2 * units])

    def forward(self, x: Tensor, mask: Tensor | None = None, *, reverse: bool = False) -> Tensor:
        """Computes the output m [B, S, D] for x [B, S, d_input]; m is undefined at padding.

        The mask [B, S] is True at tokens, which padding follows. None: all are tokens. With
        `reverse`, the LSTM reads each sentence from its last token to its first.
        """
        if x.device.type == "cpu" and not self._has_kernel_of_torch():
            lengths = None if mask is None else mask.sum(1)
            weights = self.input_weight, self.recurrent_weight, self.bias, self.output_projection
            return ops.lstm(x, *weights, lengths=lengths, reverse=reverse).m
        if not reverse:
            return self._run_torch(x)
        if mask is None:
            return self._run_torch(x.flip(1)).flip(1)
        return reversed_sentences(self._run_torch(reversed_sentences(x, mask)), mask)

    def _has_kernel_of_torch(self) -> bool:
        """Returns whether torch has a fast kernel on this CPU: oneDNN's, without projection.

        In bfloat16, oneDNN's raises an error on processors without AVX-512.
        """
        in_float32 = not torch.is_autocast_enabled("cpu")
        supported = in_float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return self.output_projection is None and supported

    def _run_torch(self, x: Tensor) -> Tensor:
        """Computes the output with torch's LSTM."""
        if self.projection is None:
            return self.lstm(x)[0]
        # r is the output before P. As W m_{t-1} = (W P) r_{t-1}, an LSTM with recurrent weight W P
        # computes r, and m = P r.
        recurrent = self.recurrent_weight @ self.projection
        r = torch.func.functional_call(self.lstm, {"weight_hh_l0": recurrent}, x)[0]
        return r @ self.projection.T

    def start(self, num_sentences: int) -> LSTMState:
        """Returns the zero state of num_sentences sentences."""
        m = self.recurrent_weight.new_zeros(num_sentences, self.recurrent_weight.shape[1])
        return LSTMState(m, m.new_zeros(num_sentences, self.lstm.hidden_size))

    def step(self, x: Tensor, state: LSTMState) -> LSTMState:
        """Computes the state after the input x [N, d_input]; the output is ``m`` of the state."""
        recurrent = F.linear(state.m, self.recurrent_weight)
        return self.cell(F.linear(x, self.input_weight, self.bias) + recurrent, state.c)

    def cell(self, gates: Tensor, c: Tensor) -> LSTMState:
        """Computes the state from c_{t-1} and the gates W [x_t, m_{t-1}] + b, [N, 4 · units]."""
        r, c = lstm_state(gates, c)
        p = self.output_projection
        return LSTMState(r if p is None else F.linear(r, p), c)

    @property
    def output_projection(self) -> Tensor | None:
        """The projection P [D, units], if there is one."""
        return self.lstm.get_parameter("weight_hr_l0") if self.lstm.proj_size else self.projection

    @property
    def input_weight(self) -> Tensor:
        """The columns of the weight W that multiply x_t, [4 · units, d_input]."""
        return self.lstm.get_parameter("weight_ih_l0")

    @property
    def recurrent_weight(self) -> Tensor:
        """The columns of the weight W that multiply m_{t-1}, [4 · units, D]."""
        return self.lstm.get_parameter("weight_hh_l0")

    @property
    def bias(self) -> Tensor:
        """The bias b of the gates, [4 · units]."""
        return self.lstm.get_parameter("bias_ih_l0") + self.lstm.get_parameter("bias_hh_l0")


def reversed_sentences(x: Tensor, mask: Tensor) -> Tensor:
    """Reverses the tokens of each sentence; the padding stays at the end.

    x is [B, S, D]; the mask [B, S] is True at tokens.
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    place = torch.where(mask, mask.sum(1, keepdim=True) - 1 - place, place)
    return x.gather(1, place.unsqueeze(2).expand_as(x))
