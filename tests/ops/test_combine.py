"""ops.combine: y = sum_i G(x)_i E_i(x) from the rows of the chosen experts (Eq. 1)."""

import math

import pytest
import torch
from assertions import assert_same_bits
from operators import sample

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Eq. 1")]


@pytest.mark.parametrize("T", [0, 1, 2, 7, 64, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_identity_experts(device, T, dtype):
    """combine(dispatch(x)) = x · sum of gates, and the gates sum to 1."""
    _, gates, inverse, _ = sample("combine", device, dtype, T=T, E=8, k=3).values()
    x = torch.randn(T, 16, device=device).to(dtype)
    actual = ops.combine(ops.dispatch(x, inverse), gates, inverse)
    torch.testing.assert_close(actual, x, rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_float16_does_not_overflow_on_the_way(device):
    """6e4 · 0.5 twice is in range. A sum whose partial sums overflow is in range as well."""
    output = torch.tensor([[6e4], [6e4], [-6e4]], dtype=torch.float16, device=device)
    inverse = torch.tensor([[0, 1, 2]], device=device)
    for gates in ([0.5, 0.5, 0.0], [1.0, 1.0, 1.0]):
        y = ops.combine(output, torch.tensor([gates], device=device), inverse)
        assert y.dtype == torch.float16 and y.item() == torch.tensor(6e4).half().item()


def test_gates_of_the_outputs_type(device):
    """The result is bitwise identical to the result with the same gates in float32."""
    call = sample("combine", device, torch.bfloat16, T=6, E=5, k=2, gates_dtype=torch.bfloat16)
    assert_same_bits(ops.combine(**call), ops.combine(**call | dict(gates=call["gates"].float())))


def test_nan_stays_in_its_token(device):
    call = sample("combine", device, T=6, E=5, k=2, D=4)
    expected = ops.combine(**call)
    call["expert_output"][call["inverse"][3, 1], 2] = math.nan
    actual = ops.combine(**call)
    assert actual.isnan().nonzero().tolist() == [[3, 2]]
    assert_same_bits(actual[~actual.isnan()], expected[~actual.isnan()])
