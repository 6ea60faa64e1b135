"""The emulation of CUDA kernels detects mistakes that would fail on a GPU."""

import pytest
import torch
from emulated import operators

EXPECTED = {
    "barrier": lambda values: values.flip(0),
    "reuse": lambda values: values.cumsum(0) - values,
    "copy": lambda values: values,
    "lanes": lambda values: values.view(-1, 2).flip(1).flatten(),
    "branch": lambda values: values,
}


@pytest.fixture
def values():
    return torch.rand(256)


def run(values, kernel, broken):
    operators()
    return torch.ops.moe_ext_emulated.broken_kernel(values, kernel, broken)


@pytest.mark.parametrize("kernel", EXPECTED)
def test_a_right_kernel_runs(values, kernel):
    torch.testing.assert_close(run(values, kernel, broken=False), EXPECTED[kernel](values))


@pytest.mark.parametrize("kernel", ["barrier", "reuse", "copy"])
def test_a_missing_wait_shows_in_the_values(values, kernel):
    wrong = run(values, kernel, broken=True) != run(values, kernel, broken=False)
    assert wrong.sum() > 20


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("lanes", "a thread has ended|without all lanes"),
        ("branch", "some threads are in __syncthreads(_or)?, others in __syncthreads(_or)?"),
    ],
)
def test_threads_that_wait_for_each_other_in_vain(values, kernel, message):
    with pytest.raises(RuntimeError, match=message):
        run(values, kernel, broken=True)
    run(values, kernel, broken=False)
