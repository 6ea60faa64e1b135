"""Sparsely-gated mixtures of experts (Shazeer et al., 2017) for PyTorch.

gates      x to k experts per token                Sec. 2.1     moe_ext/gates.py
losses     importance, load, CV², the losses       Sec. 4, A    moe_ext/losses.py
experts    what the rows of each expert go through Sec. 3.2     moe_ext/experts.py
MoE        gate, dispatch, experts, combine        Eq. 1        moe_ext/moe.py
           with a gate of two levels               App. B       moe_ext/hierarchical.py
           with experts that choose their tokens   App. F       moe_ext/balanced.py
MoELSTM    an LSTM whose matrices are a MoE        Sec. 3.1     moe_ext/recurrent.py
ops        the operators below them, one page each              moe_ext/ops/
"""

from moe_ext import _build

_build.load()

from moe_ext import ops  # noqa: E402  (the operators are registered by the line above)
from moe_ext._C import empty_cache  # noqa: E402
from moe_ext.balanced import (  # noqa: E402
    BalancedGate,
    HierarchicalBalancedGate,
    balanced_gates,
    batchwise_masks,
)
from moe_ext.experts import FeedForwardExperts, ModuleExperts  # noqa: E402
from moe_ext.gates import Gate, Gating, NoisyTopKGate, SoftmaxGate, TopKGate  # noqa: E402
from moe_ext.hierarchical import HierarchicalMoE, HierarchicalNoisyTopKGate  # noqa: E402
from moe_ext.losses import (  # noqa: E402
    batchwise_loss,
    cv_squared,
    importance_loss,
    load_loss,
)
from moe_ext.moe import MoE, MoEAux  # noqa: E402
from moe_ext.ops import importance, load  # noqa: E402
from moe_ext.recurrent import MoELSTM, MoELSTMCell  # noqa: E402

__version__ = _build.version()

__all__ = [
    "BalancedGate",
    "FeedForwardExperts",
    "Gate",
    "Gating",
    "HierarchicalBalancedGate",
    "HierarchicalMoE",
    "HierarchicalNoisyTopKGate",
    "MoE",
    "MoEAux",
    "MoELSTM",
    "MoELSTMCell",
    "ModuleExperts",
    "NoisyTopKGate",
    "SoftmaxGate",
    "TopKGate",
    "balanced_gates",
    "batchwise_loss",
    "batchwise_masks",
    "cv_squared",
    "empty_cache",
    "importance",
    "importance_loss",
    "load",
    "load_loss",
    "ops",
]
