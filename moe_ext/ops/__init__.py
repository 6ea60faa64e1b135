"""The operators: typed functions over ``torch.ops.moe_ext``, one page each.

T tokens, D model width, E experts, K = k experts per token, R = T·K routed rows. All are pure
functions of tensors with C++ autograd; their sums have a fixed order, so that results do not depend
on the number of threads. A second derivative is refused with a RuntimeError (importance, which is
linear, has one), and so are the gradients of torch.func, by torch itself.

Indices and offsets are int64; int32 ones are taken too, at the cost of a conversion.
"""

from moe_ext.ops import flops as flops
from moe_ext.ops.balanced_gating import BatchwiseTopM, batchwise_topm, selected_softmax
from moe_ext.ops.combine import combine
from moe_ext.ops.dispatch import DispatchPlan, dispatch, dispatch_plan
from moe_ext.ops.experts import ACTIVATIONS, GATED_ACTIVATIONS, experts
from moe_ext.ops.gating import NoisyTopKGating, noisy_topk_gating
from moe_ext.ops.importance import importance
from moe_ext.ops.load import load

__all__ = [
    "ACTIVATIONS",
    "GATED_ACTIVATIONS",
    "BatchwiseTopM",
    "DispatchPlan",
    "NoisyTopKGating",
    "batchwise_topm",
    "combine",
    "dispatch",
    "dispatch_plan",
    "experts",
    "importance",
    "load",
    "noisy_topk_gating",
    "selected_softmax",
]
