"""ops.topk_routing: scores, selection bias, groups, gates, and what happens at the edges."""

import math

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits
from pairwise import pairwise
from samples.topk_routing import SCORES

from moe_ext import ops

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.equation("arXiv 2408.15664", "arXiv 2412.19437", "arXiv 2405.04434"),
]


def test_by_hand(device):
    """Scores 1/2, 3/4, 1/4, 1/5; the bias brings expert 2 in and does not enter the gates."""
    options = dict(dtype=torch.float64, device=device)
    logits = torch.tensor([[0, math.log(3), -math.log(3), -math.log(4)]], **options)
    bias = torch.tensor([0, 0, 1, 0], **options)
    gates, index = ops.topk_routing(logits, 2, bias, "sigmoid", scale=2)
    assert index.tolist() == [[2, 1]]
    assert_exact(gates, torch.tensor([[0.5, 1.5]]).double())
    gates, _ = ops.topk_routing(logits, 2, bias, "sigmoid", False, scale=2.0)
    assert_exact(gates, torch.tensor([[0.5, 1.5]]).double())


@pytest.mark.parametrize(
    "score_k, chosen",
    [
        pytest.param(1, [0, 5], id="the largest, as in DeepSeek-V2"),
        pytest.param(2, [2, 3], id="the sum of two, as in DeepSeek-V3"),
    ],
)
def test_groups_by_hand(device, score_k, chosen):
    """Of the groups [0.9, 0.1], [0.6, 0.5] and [0.1, 0.8], a token selects in one or in two."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.1, 0.8]], dtype=torch.float64, device=device)
    k, per_token = len(chosen), 2 if score_k == 1 else 1
    _, index = ops.topk_routing(
        scores.logit(), k, None, "sigmoid", True, 1.0, 3, per_token, score_k
    )
    assert index.tolist() == [chosen]


@pairwise(
    values=[(0, 1), (math.nan, math.inf, -math.inf, 0, 1, -1)],
    kind=[(torch.float32, False), (torch.bfloat16, False), (torch.float64, True)],
    score=SCORES,
    groups=[(1, 1, 2), (4, 2, 1), (8, 3, 2), (3, 2, 5), (12, 5, 2)],
)
def test_selection_of_few_values(device, groups, score, kind, values):
    """Ties of groups and of experts go to the lower index; more groups than a vector has lanes.

    NaN ranks last, and a group's score takes NaN for -inf.
    """
    dtype, biased = kind
    logits = torch.tensor(values).to(dtype)[torch.randint(len(values), (30, 24))]
    logits[: len(values)] = torch.tensor(values).to(dtype)[:, None]
    bias = torch.linspace(-0.3, 0.3, 24).double() if biased else None
    moved = None if bias is None else bias.to(device)
    _, index = ops.topk_routing(logits.to(device), 5, moved, score, True, 1.0, *groups)
    assert index.tolist() == [ref.route(row, 5, bias, score, *groups) for row in logits.double()]
    assert biased or index[0].tolist() == list(range(5))


def test_saturated_scores_do_not_tie(device):
    """In float32 the sigmoids of 20, 30 and 40 are all 1; without bias, the logits decide."""
    logits = torch.tensor([[20.0, 30, 40, 0]], device=device)
    assert ops.topk_routing(logits, 2, None, "sigmoid").expert_index.tolist() == [[2, 1]]
    logits = torch.tensor([[-2000.0, -1000, 0]], device=device)
    gates, index = ops.topk_routing(logits, 2)
    assert index.tolist() == [[2, 1]] and gates.tolist() == [[1, 0]]


@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_underflowed_scores(device, score):
    """Gates are 0 and not 0 / 0; the gradients are finite."""
    logits = torch.full((2, 4), -1000.0, device=device).requires_grad_()
    gates = ops.topk_routing(logits, 2, None, score).gates
    assert gates.tolist() == [[0, 0]] * 2
    gates.sum().backward()
    assert logits.grad.isfinite().all()


@pairwise(
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    score=SCORES,
    renormalize=[False, True],
    biased=[False, True],
    groups=[(1, 1, 2), (5, 3, 2)],
)
def test_replay_is_bitwise_identical(device, groups, biased, renormalize, score, dtype):
    """Given experts have the gates and gradients of the selection, also without bias and groups.

    The selection bias changes the order of the experts, and so the order of the sums.
    """
    logits = torch.randn(40, 35).to(device, dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    bias = torch.randn(35).to(device, wide) if biased else None
    rule = score, renormalize, 2.5
    gates, index = ops.topk_routing(logits, 7, bias, *rule, *groups)
    upstream = torch.randn(40, 7).to(device, wide)
    (gradient,) = torch.autograd.grad(gates, logits, upstream)
    for arguments in ((bias, *rule, *groups), (None, *rule)):
        replayed = ops.topk_routing(logits, 7, *arguments, expert_index=index)
        assert_same_bits(replayed.gates, gates)
        assert_same_bits(replayed.expert_index, index)
        assert_same_bits(torch.autograd.grad(replayed.gates, logits, upstream)[0], gradient)
