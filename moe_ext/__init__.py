"""Sparsely-gated mixtures of experts (Shazeer et al., 2017) for PyTorch.

Each line names a part of the package, the paper's section or equation, and the file::

    gates        select k experts for each token         Sec. 2.1     moe_ext/gates/
    losses       importance loss, load loss, CV², ...    Sec. 4, A    moe_ext/losses.py
    experts      feed-forward networks or any modules    Sec. 3.2     moe_ext/experts.py
                 with weights in 4 or 8 bits                          moe_ext/quantized.py
                 with low-rank adapters                               moe_ext/lora/
                 an expert that processes all tokens                  moe_ext/shared.py
    MoE          gate, dispatch, experts, combine        Eq. 1        moe_ext/moe.py
                 with a two-level gate                   App. B       moe_ext/hierarchical.py
    MoELSTM      an LSTM with a MoE as its weight matrix Sec. 3.1     moe_ext/recurrent/
    ops          the operators                                        moe_ext/ops/
    optim        factored Adam and Adagrad, schedules    App. D       moe_ext/optim/
    dispatch     how tokens reach their experts          Sec. 3.1     moe_ext/dispatch/
    ranks        process groups and collectives                       moe_ext/ranks/
    distributed  models with experts on several ranks    Sec. 3       moe_ext/distributed/
    counting     total and active parameters                          moe_ext/_counting.py
    presets      the layers of known models                           moe_ext/presets.py
    integrations models of other libraries                           moe_ext/integrations/
    info         build configuration and a self-test                  moe_ext/info.py
"""

from moe_ext import _build
from moe_ext._build import empty_cache

_build.load()

# The imports below need the operators, which load() registers.
from moe_ext import ops  # noqa: E402
from moe_ext._capacity import Capacity, Drop  # noqa: E402
from moe_ext._counting import ParameterCount, count_parameters  # noqa: E402
from moe_ext.experts import Experts, FeedForwardExperts, ModuleExperts  # noqa: E402
from moe_ext.gates import (  # noqa: E402
    BalancedGate,
    ExpertChoiceGate,
    Gate,
    HierarchicalBalancedGate,
    HierarchicalNoisyTopKGate,
    NoisyTopKGate,
    ReLUGate,
    Routing,
    SoftmaxGate,
    TopKGate,
    balanced_gates,
    batchwise_masks,
    update_gates,
)
from moe_ext.hierarchical import HierarchicalMoE  # noqa: E402
from moe_ext.lora import LoRAExperts, add_lora  # noqa: E402
from moe_ext.losses import (  # noqa: E402
    ImportanceLoss,
    LoadLoss,
    RouterLoss,
    SwitchLoss,
    ZLoss,
    add_loss,
    batchwise_loss,
    cv_squared,
    importance_loss,
    load_loss,
)
from moe_ext.moe import KeepAux, MoE, MoEAux  # noqa: E402
from moe_ext.quantized import QuantizedExperts  # noqa: E402
from moe_ext.recurrent import MoELSTM, MoELSTMCell  # noqa: E402
from moe_ext.shared import SharedExpert  # noqa: E402

__version__ = _build.version()

__all__ = [
    "BalancedGate",
    "Capacity",
    "Drop",
    "ExpertChoiceGate",
    "Experts",
    "FeedForwardExperts",
    "Gate",
    "HierarchicalBalancedGate",
    "HierarchicalMoE",
    "HierarchicalNoisyTopKGate",
    "ImportanceLoss",
    "KeepAux",
    "LoRAExperts",
    "LoadLoss",
    "MoE",
    "MoEAux",
    "MoELSTM",
    "MoELSTMCell",
    "ModuleExperts",
    "NoisyTopKGate",
    "ParameterCount",
    "QuantizedExperts",
    "ReLUGate",
    "RouterLoss",
    "Routing",
    "SharedExpert",
    "SoftmaxGate",
    "SwitchLoss",
    "TopKGate",
    "ZLoss",
    "add_lora",
    "add_loss",
    "balanced_gates",
    "batchwise_loss",
    "batchwise_masks",
    "count_parameters",
    "cv_squared",
    "empty_cache",
    "importance_loss",
    "load_loss",
    "ops",
    "update_gates",
]


def __dir__() -> list[str]:
    """Lists only the public names, for tab completion."""
    return [*__all__, "__version__"]
