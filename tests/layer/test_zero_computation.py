"""Identity and null experts (MoE++, arXiv 2410.07348; LongCat-Flash, arXiv 2509.01322)."""

import pytest
import torch
from assertions import assert_same_bits, recorded_ops, run_layer
from layers import D, E, K, layer_of, shake
from torch import nn

from moe_ext import TopKGate

ZERO = pytest.mark.equation("arXiv 2410.07348", "arXiv 2509.01322")


def make_layer(dtype=torch.float64, *, k=K, n=2, m=1, renormalize=True, **options):
    """Makes a layer with random weights of the gate, n identity and m null experts."""
    gate = shake(TopKGate(D, E + n + m, k, renormalize=renormalize))
    options = {"num_identity_experts": n, "num_null_experts": m} | options
    return layer_of(gate, **options).to(dtype)


@ZERO
def test_no_row_is_computed():
    """The experts get only the rows of their own tokens, also on the fused path."""
    layer = make_layer()
    x = torch.randn(9, D, dtype=torch.float64)
    with recorded_ops() as calls:
        _, aux = layer(x)
    gate, experts = [args for name, _, args, _ in calls if name == "experts"]
    assert len(gate[5][0]) == 1 and len(experts[5][0]) == E
    assert experts[2].numel() == aux.tokens_per_expert[:E].sum() < 9 * K
    dispatched = make_layer(hidden_sizes=None, experts=[nn.Linear(D, D) for _ in range(E)])
    seen = []
    for module in dispatched.experts.experts:
        module.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    _, aux = dispatched(x)
    assert seen == aux.tokens_per_expert[:E].tolist()


def test_all_tokens_may_choose_them():
    """Without a row, the experts' gradients are exactly 0, and y is x or 0."""
    layer = make_layer(k=1, n=1, m=1, w_importance=0, w_load=0)
    x = torch.randn(4, D, dtype=torch.float64)
    index = torch.tensor([[E], [E + 1], [E], [E + 1]])
    y, aux, gradients = run_layer(layer, x, expert_index=index)
    assert_same_bits(y[::2], x[::2])
    assert y[1::2].count_nonzero() == 0
    assert aux.tokens_per_expert.tolist() == [0] * E + [2, 2]
    for gradient in gradients[2:]:
        assert gradient.count_nonzero() == 0


@ZERO
def test_the_identity_has_the_precision_of_x():
    """With experts in bfloat16, the identity part is that of the float32 tokens."""
    layer = make_layer(torch.float32, k=1, expert_dtype=torch.bfloat16)
    layer.experts.bfloat16()
    x = torch.randn(40, D)
    y, _ = layer(x, expert_index=torch.full((40, 1), E))
    assert_same_bits(y, x)
    layer = make_layer(torch.float32, renormalize=False)
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = layer(x)
    plain, _ = layer(x)
    only = (aux.expert_index >= E).all(1)
    assert only.any() and not only.all()
    assert_same_bits(y[only], plain[only])
