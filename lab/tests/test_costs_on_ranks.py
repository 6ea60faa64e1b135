"""The costs of a layer whose experts are sharded over ranks."""

import pytest
from moe_lab.analysis import moe_ops
from workers import on_ranks

from moe_ext import MoE


@on_ranks(2)
def test_operations_need_all_experts(group, rank):
    with pytest.raises(ValueError, match="moe_ops: layer must have all experts .*, got 2"):
        moe_ops(MoE(4, 4, 2, process_group=group))
