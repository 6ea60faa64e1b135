"""The in-place operator on tensors with torch's negative bit, whose memory holds -x.

z.conj().imag is an example. test_operators.py tests the other operators.
"""

import subprocess
import sys

# Runs in a separate process: corrupted memory shows late, or as a crash.
STEPS = """
import itertools
import torch
import moe_ext

NAMES = ["param", "grad", "row", "column", "lr", "correction"]
CHANGED = ["param", "row", "column"]


def tensors(dtype):
    torch.manual_seed(0)
    values = [torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.rand(2, 4), torch.rand(2, 3)]
    values = [value.to(dtype if i < 2 else torch.promote_types(dtype, torch.float32))
              for i, value in enumerate(values)]
    return dict(zip(NAMES, values + [torch.tensor(v, dtype=torch.float64) for v in (0.1, 2.0)]))


def step(call):
    torch.ops.moe_ext.factored_step_(*call.values(), 0.9, 0.2, 1e-3)


for dtype in (torch.float64, torch.float32, torch.bfloat16):
    expected = tensors(dtype)
    step(expected)
    for size in range(len(NAMES) + 1):
        for negated in itertools.combinations(NAMES, size):
            call = tensors(dtype)
            for name in negated:
                call[name] = torch._neg_view(-call[name])
            versions = {name: call[name]._version for name in CHANGED}
            step(call)
            for name in NAMES:
                assert torch.equal(call[name], expected[name]), (negated, name)
                assert call[name].is_neg() == (name in negated)
            for name in CHANGED:
                assert call[name]._version == versions[name] + 1, (negated, name)

# The imaginary part of a conjugate, and tensors whose columns are the rows of memory.
z = torch.complex(torch.zeros(2, 4, 3), -tensors(torch.float32)["param"])
call = tensors(torch.float32) | {"param": z.conj().imag}
step(call)
expected = tensors(torch.float32)
step(expected)
assert torch.equal(-z.imag, expected["param"]) and torch.equal(call["row"], expected["row"])

# A place in memory for each element, whatever the bit.
call = tensors(torch.float32)
call["row"] = torch._neg_view(torch.ones(()).expand(2, 4))
before = call["param"].clone()
try:
    step(call)
except ValueError as error:
    assert str(error).startswith("factored_step_: row must "), error
else:
    raise AssertionError("taken")
assert torch.equal(call["param"], before)

with torch.inference_mode():
    call = tensors(torch.float32)
    call["column"] = torch._neg_view(-call["column"])
    step(call)
    assert torch.equal(call["column"], expected["column"])

for bit in (torch.conj, lambda tensor: torch._efficientzerotensor(tensor.shape)):
    call = tensors(torch.float32)
    call["param"] = bit(call["param"].to(torch.complex64))
    try:
        step(call)
    except (TypeError, RuntimeError):
        pass
    else:
        raise AssertionError("taken")
print("done")
"""


def test_factored_step_of_negated_tensors():
    run = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout == "done\n", run.stderr[-2000:]
