"""An LSTM with a projection (App. C.1; Sak et al. 2014)."""

from typing import NamedTuple

import torch
from torch import Tensor


class LSTMState(NamedTuple):
    """The state of an LSTM after a step, each [B, U]. See `lstm_cell`."""

    h: Tensor
    c: Tensor


class LSTMOutput(NamedTuple):
    """Outputs of `lstm`, in the dtype of x.

    Attributes:
        m: [B, S, P], zero after the tokens of a sentence.
        m_n: [B, P], the output of the last step.
        c_n: [B, U], the state of the cells after the last step.
    """

    m: Tensor
    m_n: Tensor
    c_n: Tensor


def lstm(
    x: Tensor,
    weight_input: Tensor,
    weight_recurrent: Tensor,
    bias: Tensor | None = None,
    projection: Tensor | None = None,
    m_0: Tensor | None = None,
    c_0: Tensor | None = None,
    lengths: Tensor | None = None,
    reverse: bool = False,
) -> LSTMOutput:
    """Runs an LSTM of U units over B sentences of at most S tokens.

    The equations are those of ``torch.nn.LSTM``, whose weights have the same shapes::

        i, f, j, o = weight_input · x_t + weight_recurrent · m_{t-1} + bias
        c_t = sigmoid(f) · c_{t-1} + sigmoid(i) · tanh(j)
        m_t = projection · (sigmoid(o) · tanh(c_t))

    The tokens of all steps are multiplied by weight_input together. In the backward pass, the
    gradient of each weight is one product over all steps. Padding costs nothing.

    A sentence's results and gradients do not depend on the other sentences, bit for bit. The cells
    are computed in float32 for half-precision inputs, and m_t is rounded at each step.

    CUDA is experimental: no kernel has run on a GPU yet. Each step is one or two GEMMs of torch and
    one kernel. ``torch.nn.LSTM`` uses cuDNN, which needs P < U, and reads the lengths of packed
    sentences on the host. The values of `lengths` are not checked on CUDA.

    Args:
        x: [B, S, D].
        weight_input: [4 · U, D], the rows of i, f, j and o.
        weight_recurrent: [4 · U, P].
        bias: [4 · U], or None.
        projection: [P, U]. None: m_t = sigmoid(o) · tanh(c_t), and P = U.
        m_0: [B, P], the output before the first step. None: zeros.
        c_0: [B, U], the state of the cells before the first step. None: zeros.
        lengths: [B] int64, the number of tokens of each sentence, which are its first ones. None:
            S tokens.
        reverse: whether the steps go from the last token of a sentence to its first. The outputs
            stay at the places of their tokens.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    m, m_n, c_n, _, _ = torch.ops.moe_ext.lstm(
        x, weight_input, weight_recurrent, bias, projection, m_0, c_0, lengths, reverse
    )
    return LSTMOutput(m, m_n, c_n)


def lstm_cell(gates: Tensor, c_0: Tensor) -> LSTMState:
    """Computes the cells of one step of an LSTM, whose gates the caller computes.

    The equations are those of `lstm`::

        i, f, j, o = gates
        c = sigmoid(f) · c_0 + sigmoid(i) · tanh(j)
        h = sigmoid(o) · tanh(c)

    A row's results do not depend on the other rows, bit for bit.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        gates: [B, 4 · U], the concatenation of i, f, j and o.
        c_0: [B, U], the state of the cells before the step, in the dtype of gates.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype or device.
    """
    return LSTMState(*torch.ops.moe_ext.lstm_cell(gates, c_0))
