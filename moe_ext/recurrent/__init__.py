"""Recurrent mixtures of experts, and back-propagation through time in bounded memory (Sec. 3.1).

MoELSTM, MoELSTMCell   an LSTM whose matrices are a mixture of experts
lstm_state             the LSTM's equations after its matrix
unroll                 any recurrent step over a sequence, with a bounded number of saved states
num_evaluations        how many evaluations of the step that costs
"""

from moe_ext.recurrent.bptt import Step, num_evaluations, unroll
from moe_ext.recurrent.lstm import MoELSTM, MoELSTMCell, lstm_state

__all__ = ["MoELSTM", "MoELSTMCell", "Step", "lstm_state", "num_evaluations", "unroll"]
