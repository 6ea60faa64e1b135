"""Recurrent mixtures of experts, and back-propagation through time in bounded memory (Sec. 3.1).

Contents::

    MoELSTM, MoELSTMCell   an LSTM with a mixture of experts as its weight matrix
    lstm_state             the LSTM equations after the weight matrix
    unroll                 runs a recurrent step over a sequence; bounds the saved states
    exchanged_bytes        the bytes that ranks with sharded experts send
    num_evaluations        the number of step evaluations that unroll needs
"""

from moe_ext.recurrent.bptt import Step, num_evaluations, unroll
from moe_ext.recurrent.lstm import MoELSTM, MoELSTMCell, exchanged_bytes, lstm_state

__all__ = [
    "MoELSTM",
    "MoELSTMCell",
    "Step",
    "exchanged_bytes",
    "lstm_state",
    "num_evaluations",
    "unroll",
]
