"""ops.combine: y = sum_i G(x)_i E_i(x) from the rows of the chosen experts (Eq. 1)."""

import pytest
import torch
from assertions import assert_same_bits
from operators import sample

from moe_ext import ops

pytestmark = [pytest.mark.emulated, pytest.mark.equation("Eq. 1")]


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
