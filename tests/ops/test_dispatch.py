"""ops.dispatch_plan and ops.dispatch: the batch of each expert, in a stable order."""

import pytest
import torch

from moe_ext import ops

pytestmark = pytest.mark.emulated


def test_wide_index_of_one_column_is_expanded(device):
    index = torch.tensor([[2]], device=device).expand(6, 1)
    assert ops.dispatch_plan(index, 3).permutation.tolist() == list(range(6))


def test_token_index_checks_the_dimensions():
    index, offsets = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 4])
    assert ops.token_index(index, offsets).tolist() == [0, 1, 1, 1]
    with pytest.raises(ValueError, match="token_index: expert_index must have 2 dimensions, got 1"):
        ops.token_index(index)
    with pytest.raises(ValueError, match="token_index: expert_index must have 1 dimensions, got 2"):
        ops.token_index(index.view(2, 2), offsets)
