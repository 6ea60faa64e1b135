"""Sparsely-gated mixtures of experts (Shazeer et al., 2017) for PyTorch.

gates        x to k experts per token                Sec. 2.1     moe_ext/gates/
losses       importance, load, CV², the losses       Sec. 4, A    moe_ext/losses.py
experts      what the rows of each expert go through Sec. 3.2     moe_ext/experts.py
MoE          gate, dispatch, experts, combine        Eq. 1        moe_ext/moe.py
             with a gate of two levels               App. B       moe_ext/hierarchical.py
MoELSTM      an LSTM whose matrices are a MoE        Sec. 3.1     moe_ext/recurrent/
ops          the operators below them                             moe_ext/ops/
optim        factored Adam and Adagrad, schedules    App. D       moe_ext/optim/
distributed  experts sharded over ranks              Sec. 3       moe_ext/distributed/
info         what was built, and a self-test                      moe_ext/info.py
lab          the paper's models, training, studies                moe_ext/lab/
"""

from moe_ext import _build

_build.load()

# The operators are registered by the line above.
from moe_ext import ops  # noqa: E402
from moe_ext._C import empty_cache  # noqa: E402
from moe_ext.experts import Experts, FeedForwardExperts, ModuleExperts  # noqa: E402
from moe_ext.gates import (  # noqa: E402
    BalancedGate,
    Gate,
    HierarchicalBalancedGate,
    HierarchicalNoisyTopKGate,
    NoisyTopKGate,
    Routing,
    SoftmaxGate,
    TopKGate,
    balanced_gates,
    batchwise_masks,
)
from moe_ext.hierarchical import HierarchicalMoE  # noqa: E402
from moe_ext.losses import batchwise_loss, cv_squared, importance_loss, load_loss  # noqa: E402
from moe_ext.moe import MoE, MoEAux  # noqa: E402
from moe_ext.recurrent import MoELSTM, MoELSTMCell  # noqa: E402

__version__ = _build.version()

__all__ = [
    "BalancedGate",
    "Experts",
    "FeedForwardExperts",
    "Gate",
    "HierarchicalBalancedGate",
    "HierarchicalMoE",
    "HierarchicalNoisyTopKGate",
    "MoE",
    "MoEAux",
    "MoELSTM",
    "MoELSTMCell",
    "ModuleExperts",
    "NoisyTopKGate",
    "Routing",
    "SoftmaxGate",
    "TopKGate",
    "balanced_gates",
    "batchwise_loss",
    "batchwise_masks",
    "cv_squared",
    "empty_cache",
    "importance_loss",
    "load_loss",
    "ops",
]


def __dir__() -> list[str]:
    """The public names alone, for tab completion."""
    return [*__all__, "__version__"]
