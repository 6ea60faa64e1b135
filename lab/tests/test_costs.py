"""The operations of mixture layers."""

import pytest
from moe_lab.analysis import moe_ops
from workers import on_ranks

from moe_ext import MoE, SharedExpert, TopKGate

D, E, K = 6, 5, 2


def test_the_operations_of_a_shared_expert_are_counted():
    gate = TopKGate(D, E, K)
    shared = SharedExpert(D, [4], gated=True)
    plain = moe_ops(MoE(D, E, K, gate=gate, hidden_sizes=[7]))
    found = moe_ops(MoE(D, E, K, gate=gate, hidden_sizes=[7], shared_expert=shared))
    assert found.experts - plain.experts == 2 * 4 * D + D


def test_zero_computation_experts_have_no_operations():
    """The count is a mean over all experts of the gate."""
    layer = MoE(D, E, K, gate=TopKGate(D, E + 3, K), num_identity_experts=2, num_null_experts=1)
    of_experts = sum(p.numel() for p in layer.experts.parameters())
    assert moe_ops(layer).experts == of_experts * K // (E + 3)


@on_ranks(2)
def test_operations_need_all_experts(group, rank):
    with pytest.raises(ValueError, match="moe_ops: layer must have all experts .*, got 2"):
        moe_ops(MoE(4, 4, 2, process_group=group))
