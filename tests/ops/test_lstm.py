"""The LSTM: what the table of operators does not show."""

import pytest
import torch
from assertions import assert_same_bits, assert_same_products
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from moe_ext import ops

pytestmark = pytest.mark.equation("App. C.1")


def weights_of(lstm):
    """Returns the weights of an `nn.LSTM` in the order of the operator's arguments."""
    w = {name: lstm.get_parameter(f"{name}_l0") for name in ("weight_ih", "weight_hh")}
    bias = [lstm.get_parameter(f"bias_{kind}_l0") for kind in ("ih", "hh")]
    projection = lstm.get_parameter("weight_hr_l0") if lstm.proj_size else None
    return w["weight_ih"], w["weight_hh"], sum(bias), projection


def draw(num_sentences, units=70, width=24, dtype=torch.float32):
    lstm = nn.LSTM(16, units, proj_size=width, dtype=dtype)
    weights = [weight.detach().requires_grad_() for weight in weights_of(lstm)]
    return torch.randn(num_sentences, 9, 16).to(dtype), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_sentence_does_not_depend_on_the_others(dtype, reverse, padded):
    x, weights = draw(40, dtype=dtype)
    lengths = torch.randint(10, (40,)) if padded else torch.full((40,), 9)

    def results_of(chosen):
        part = x[chosen].requires_grad_()
        out = ops.lstm(part, *weights, lengths=lengths[chosen], reverse=reverse)
        grad = torch.autograd.grad(sum(value.float().square().sum() for value in out), part)
        return [*(value.detach() for value in out), *grad]

    whole = results_of(slice(0, 40))
    for chosen in (slice(0, 1), slice(3, 12), slice(10, 39), slice(39, 40)):
        for part, all_sentences in zip(results_of(chosen), whole, strict=True):
            assert_same_bits(part, all_sentences[chosen])


@pytest.mark.emulated
@pytest.mark.parametrize("reverse", [False, True])
def test_padding_changes_nothing(device, reverse):
    """The numbers in the padding and its length have no effect on any result."""
    x, weights = draw(6)
    x, weights = x.to(device), [w.detach().to(device).requires_grad_() for w in weights]
    lengths = torch.tensor([3, 5, 0, 2, 5, 1], device=device)

    def results_of(inputs):
        leaf = inputs.clone().requires_grad_()
        out = ops.lstm(leaf, *weights, lengths=lengths, reverse=reverse)
        loss = out.m.square().sum() + out.c_n.sum()
        return [*(y.detach() for y in out), *torch.autograd.grad(loss, [leaf, *weights])]

    changed = x.clone()
    for sentence, length in zip(changed, lengths, strict=True):
        sentence[length:] = torch.nan
    expected = results_of(x)
    for actual in (results_of(changed), results_of(changed[:, :5])):
        for a, e in zip(actual, expected, strict=True):
            assert_same_products(a, e[:, : a.shape[1]] if a.dim() == 3 else e)
    for sentence, grad, length in zip(expected[0], expected[3], lengths, strict=True):
        assert not sentence[length:].any() and not grad[length:].any()


def test_operations_are_counted():
    x, weights = draw(3, units=12, width=8)
    x.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        m = ops.lstm(x, *weights).m
        forward = 2 * 3 * 9 * (48 * 16 + 48 * 8 + 8 * 12)
        assert counter.get_total_flops() == forward
        m.sum().backward()
    assert counter.get_total_flops() == 3 * forward
