"""ops.dispatch_plan and ops.dispatch: the batch of each expert, in a stable order."""

import pytest
import torch

from moe_ext import ops

pytestmark = pytest.mark.emulated


def test_wide_index_of_one_column_is_expanded(device):
    index = torch.tensor([[2]], device=device).expand(6, 1)
    assert ops.dispatch_plan(index, 3).permutation.tolist() == list(range(6))
