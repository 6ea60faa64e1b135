"""ops.batchwise_topm and ops.selected_softmax: the batchwise mask and the gates of App. F."""

import math

import pytest
import torch
from assertions import assert_exact, assert_same_bits

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("App. F")]


def test_all_scores_equal(device):
    """Every column selects different m rows, and no row is favored.

    The number of columns that select a row is binomial. Its variance over 1000 rows is within a
    factor of 1.3 of E p (1 - p), which is 6 standard errors.
    """
    N, E, m = 1000, 200, 250
    rows = ops.batchwise_topm(torch.full((N, E), 1 / E, device=device), m).row_index
    assert len({tuple(row.tolist()) for row in rows}) == E
    count = torch.bincount(rows.flatten().cpu(), minlength=N).double()
    p = m / N
    assert 1 / 1.3 < count.var() / (E * p * (1 - p)) < 1.3
    overlap = (torch.zeros(E, N).scatter(1, rows.cpu(), 1) @ torch.ones(N)).unique()
    assert overlap.tolist() == [m]


def test_columns_are_numbered_over_the_batches(device):
    scores = torch.zeros(3, 20, 4, device=device)
    assert not torch.equal(*ops.batchwise_topm(scores, 5).row_index[:2])
    flat = ops.batchwise_topm(torch.zeros(20, 12, device=device), 5).row_index
    whole = ops.batchwise_topm(scores, 5).row_index
    assert_same_bits(whole.flatten(0, 1), flat)
    for first_batch, first_column in ((1, 0), (0, 2), (1, 2)):
        part = scores[first_batch:, :, first_column:]
        number = first_batch * 4 + first_column
        rows = ops.batchwise_topm(part, 5, first_expert=number, num_experts=4).row_index
        assert_same_bits(rows, whole[first_batch:, first_column:])


# selected_softmax


def test_gates_sum_to_1_without_underflow(device):
    """The selected experts have a share of e^-300 in the softmax over all experts."""
    logits = torch.tensor([[300.0, 0.0, 1.0], [-1e30, -1e30, 1e30]], device=device)
    index, offsets = torch.tensor([1, 2, 0, 1]).to(device), torch.tensor([0, 2, 4]).to(device)
    gates = ops.selected_softmax(logits, index, offsets)
    expected = torch.tensor([1 / (1 + math.e), math.e / (1 + math.e), 0.5, 0.5])
    torch.testing.assert_close(gates.cpu(), expected)


def test_an_expert_selected_twice_gets_both_gradients(device):
    logits = torch.randn(2, 3, dtype=torch.float64, device=device).requires_grad_()
    index = torch.tensor([2, 0, 2, *[1] * 40]).to(device)  # more than the lanes of a warp
    offsets = torch.tensor([0, 3, 43]).to(device)
    gates = ops.selected_softmax(logits, index, offsets)
    parts = logits.detach()[0, [2, 0, 2]], logits.detach()[1, [1] * 40]
    assert_exact(gates.detach(), torch.cat([part.softmax(0) for part in parts]))
    assert torch.autograd.gradcheck(lambda x: ops.selected_softmax(x, index, offsets), logits)
