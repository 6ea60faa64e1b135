"""The in-place operator on tensors with torch's negative bit, whose memory holds -x.

z.conj().imag is an example. test_operators.py tests the other operators.
"""

from itertools import chain, combinations

import pytest
import torch
from operators import sample

NAMES = ["param", "grad", "row", "column", "lr", "correction"]
CHANGED = NAMES[0], *NAMES[2:4]


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    arguments = sample("factored_step_", dtype=dtype, shape=(2, 4, 3))
    return {name: arguments[name] for name in NAMES}


def step(arguments):
    torch.ops.moe_ext.factored_step_(*arguments.values(), 0.9, 0.2, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_negated_tensors(dtype):
    """The numbers change as without the bit, and each tensor keeps its bit."""
    expected = tensors(dtype)
    step(expected)
    for negated in chain(*(combinations(NAMES, size) for size in range(len(NAMES) + 1))):
        call = tensors(dtype)
        call |= {name: torch._neg_view(-call[name]) for name in negated}
        versions = {name: call[name]._version for name in CHANGED}
        step(call)
        for name in NAMES:
            assert torch.equal(call[name], expected[name]), (negated, name)
            assert call[name].is_neg() == (name in negated)
        assert all(call[name]._version == versions[name] + 1 for name in CHANGED)


def test_each_element_needs_its_place_in_memory():
    call, before = tensors(), tensors()["param"]
    call["row"] = torch._neg_view(torch.ones(()).expand(2, 4))
    with pytest.raises(ValueError, match="^factored_step_: row must "):
        step(call)
    assert torch.equal(call["param"], before)


@pytest.mark.parametrize("bit", [torch.conj, lambda x: torch._efficientzerotensor(x.shape)])
def test_other_bits_are_refused(bit):
    call = tensors()
    call["param"] = bit(call["param"].to(torch.complex64))
    with pytest.raises((TypeError, RuntimeError)):
        step(call)
