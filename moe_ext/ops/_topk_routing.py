"""Top-k routing with the scores, selection biases and expert groups of later models."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]


class TopKRouting(NamedTuple):
    """Holds the result of `topk_routing`.

    Attributes:
        gates: [T, K], in order of decreasing biased score, or in the order of a given expert_index.
        expert_index: [T, K] int64, the expert of each gate.
    """

    gates: Tensor
    expert_index: Tensor


def topk_routing(
    logits: Tensor,
    k: int,
    bias: Tensor | None = None,
    score: Score = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    groups_per_token: int = 1,
    group_score_k: int = 2,
    expert_index: Tensor | None = None,
) -> TopKRouting:
    """Selects k experts for each token by their scores, and computes their gates.

    The scores of a token are s = score(logits). The gates of the chosen experts are::

        g_i = scale · s_i                 without renormalize
        g_i = scale · s_i / Σ_j s_j       with renormalize; j runs over the chosen experts

    ========================  ==========================================================
    score                     s_i
    ========================  ==========================================================
    "softmax"                 exp(l_i) / Σ_j exp(l_j) over all experts
    "sigmoid"                 1 / (1 + exp(-l_i)) (arXiv 2412.19437)
    "sqrt_softplus"           sqrt(log(1 + exp(l_i))) (DeepSeek-V4)
    ========================  ==========================================================

    The softmax before the top k is score="softmax" without renormalize. The softmax after the top
    k, over the chosen logits, is score="softmax" with renormalize.

    The chosen experts have the largest s_i + bias_i. The bias balances the experts without a
    gradient and does not enter the gates (arXiv 2408.15664).

    With num_groups > 1, a token selects in its groups_per_token best groups only
    (arXiv 2405.04434). Group g has the experts g · E/num_groups to (g + 1) · E/num_groups - 1. Its
    score is the sum of its group_score_k largest s_i + bias_i: 1 as in DeepSeek-V2, 2 as in
    DeepSeek-V3, k / groups_per_token as in Megatron-Core.

    The lower index wins a tie of experts or of groups. Without bias and groups, the logits are
    compared, so that scores that round to the same number do not tie. NaN ranks below every number;
    in the score of a group, NaN counts as -inf. For any logits, the indices are distinct and in
    range. For sigmoid and sqrt_softplus scores, the denominator is Σ_j s_j + 1e-20, as in
    DeepSeek-V3. The renormalized gates of scores far below 1e-20 are therefore almost 0.

    With expert_index, the experts are given and nothing is selected: bias and groups have no
    effect. With the expert_index of an earlier call, gates and gradients are bitwise identical to
    those of that call.

    `gates` is differentiable with respect to logits. For half-precision inputs, scores are computed
    in float32 and gates are float32. Gradients have the dtype of the input.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        logits: [T, E].
        k: experts per token, between 1 and the number of experts in groups_per_token groups.
        bias: [E], in the dtype of the gates; None: no bias. It has no gradient.
        score: the score function.
        renormalize: whether the gates of a token sum to scale.
        scale: a factor of the gates, above 0.
        num_groups: number of groups, a divisor of E.
        groups_per_token: groups in which a token selects, at most num_groups.
        group_score_k: experts that count for the score of a group, at most E / num_groups; no
            effect with a single group.
        expert_index: [T, K] int64, different experts for each token, in any order; None: the
            experts are selected.

    Raises:
        ValueError, TypeError: an argument has a wrong shape, dtype, device or value. On the CPU,
            also if a token has an expert twice.
        IndexError: on the CPU, an index is not between 0 and E - 1.
    """
    return TopKRouting(
        *torch.ops.moe_ext.topk_routing(
            logits,
            k,
            bias,
            score,
            renormalize,
            scale,
            num_groups,
            groups_per_token,
            group_score_k,
            expert_index,
        )
    )
