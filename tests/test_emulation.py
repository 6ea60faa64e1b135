"""That the emulation of CUDA's kernels lets no mistake pass that a GPU would punish."""

import pytest
import torch
from emulated import operators


def run(kernel, broken):
    operators()
    torch.manual_seed(0)
    return torch.ops.moe_ext_emulated.broken_kernel(torch.rand(256), kernel, broken)


def expected(kernel):
    torch.manual_seed(0)
    values = torch.rand(256)
    return {
        "barrier": values.flip(0),
        "reuse": values.cumsum(0) - values,
        "copy": values,
        "lanes": values.view(-1, 2).flip(1).flatten(),
        "branch": values,
    }[kernel]


@pytest.mark.parametrize("kernel", ["barrier", "reuse", "copy", "lanes", "branch"])
def test_a_right_kernel_runs(kernel):
    torch.testing.assert_close(run(kernel, broken=False), expected(kernel))


@pytest.mark.parametrize("kernel", ["barrier", "reuse", "copy"])
def test_a_missing_wait_shows_in_the_values(kernel):
    wrong = run(kernel, broken=True) != run(kernel, broken=False)
    assert wrong.sum() > 20


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("lanes", "a thread has ended|without all lanes"),
        ("branch", "some threads are in __syncthreads(_or)?, others in __syncthreads(_or)?"),
    ],
)
def test_threads_that_wait_for_each_other_in_vain(kernel, message):
    with pytest.raises(RuntimeError, match=message):
        run(kernel, broken=True)
    run(kernel, broken=False)
