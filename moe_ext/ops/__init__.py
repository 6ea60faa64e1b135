"""The operators: typed functions over ``torch.ops.moe_ext``, one file each.

Shapes: T tokens, D model width, E experts, K = k experts per token, R = T·K routed rows.

All operators are pure functions of tensors with C++ autograd. Sums have a fixed order: results do
not depend on the number of threads. Second derivatives raise RuntimeError, except for the
importance. Gradients with torch.func are not supported: torch raises an error.

Indices and offsets are int64. int32 is accepted but converted, which costs time.

CUDA is experimental: no kernel has run on a GPU yet.

A process that forks after it has used several threads has only one of them in the child. Operators
then wait forever in the child, as do those of torch. Call ``torch.set_num_threads(1)`` first in the
child, or start it with the method "spawn".
"""

from moe_ext.ops import _flops as _flops  # registers the FLOP formulas
from moe_ext.ops._balanced_gating import BatchwiseTopM, batchwise_topm, selected_softmax
from moe_ext.ops._combine import combine
from moe_ext.ops._cv_squared import cv_squared, weighted_cv_squared
from moe_ext.ops._dispatch import DispatchPlan, dispatch, dispatch_plan, token_index
from moe_ext.ops._dtypes import accumulation_dtype
from moe_ext.ops._experts import (
    ACTIVATIONS,
    CLAMPED_ACTIVATIONS,
    GATED_ACTIVATIONS,
    Activation,
    LoRA,
    experts,
)
from moe_ext.ops._gating import TopKSelection, noisy_topk_gating
from moe_ext.ops._importance import ImportanceAndLoad, importance, importance_and_load
from moe_ext.ops._linear_cross_entropy import linear_cross_entropy
from moe_ext.ops._load import load
from moe_ext.ops._lstm import LSTMOutput, LSTMState, lstm, lstm_cell
from moe_ext.ops._packed_experts import packed_experts
from moe_ext.ops._topk_routing import Score, TopKRouting, topk_routing

__all__ = [
    "ACTIVATIONS",
    "CLAMPED_ACTIVATIONS",
    "GATED_ACTIVATIONS",
    "Activation",
    "BatchwiseTopM",
    "DispatchPlan",
    "ImportanceAndLoad",
    "LSTMOutput",
    "LSTMState",
    "LoRA",
    "Score",
    "TopKRouting",
    "TopKSelection",
    "accumulation_dtype",
    "batchwise_topm",
    "combine",
    "cv_squared",
    "dispatch",
    "dispatch_plan",
    "experts",
    "importance",
    "importance_and_load",
    "linear_cross_entropy",
    "load",
    "lstm",
    "lstm_cell",
    "noisy_topk_gating",
    "packed_experts",
    "selected_softmax",
    "token_index",
    "topk_routing",
    "weighted_cv_squared",
]
