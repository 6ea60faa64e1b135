"""ops.importance: Importance(X) = sum over the batch of G(x) (Eq. 6)."""

import math

import pytest
import torch
from assertions import assert_exact
from operators import sample

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Eq. 6")]


def test_expert_without_tokens_gets_exactly_zero(device):
    gates = torch.tensor([[0.75, 0.25], [0.5, 0.5]], device=device)
    index = torch.tensor([[3, 1], [1, 3]], device=device)
    assert ops.importance(gates, index, 5).tolist() == [0, 0.75, 0, 1.25, 0]


def test_sum_over_batch_parts(device):
    gates, index, E = sample("importance", device, T=10, E=6, k=2).values()
    parts = ops.importance(gates[:3], index[:3], E) + ops.importance(gates[3:], index[3:], E)
    assert_exact(parts, ops.importance(gates, index, E))
    assert float(parts.sum()) == pytest.approx(10, rel=1e-12)  # the gates of a token sum to 1


def test_nan_stays_in_its_expert(device):
    gates = torch.tensor([[math.nan, 0.25], [0.5, 0.5]], device=device)
    actual = ops.importance(gates, torch.tensor([[0, 1], [1, 2]], device=device), 3)
    assert actual[0].isnan() and actual[1:].tolist() == [0.75, 0.5]
