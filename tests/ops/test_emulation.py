"""The emulation of CUDA kernels detects mistakes that would fail on a GPU."""

import pytest
import torch
from emulated import operators

EXPECTED = {
    "barrier": lambda values: values.flip(0),
    "unset": lambda values: values,
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


@pytest.mark.parametrize("kernel", ["barrier", "unset", "reuse", "copy"])
def test_a_missing_wait_or_value_shows_in_the_values(values, kernel):
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


KIB = 1 << 10


@pytest.mark.parametrize(
    ("major", "most"),
    [(8, 98 * KIB), (9, 226 * KIB), (10, 226 * KIB), (12, 98 * KIB)],
)
def test_shared_memory_is_limited_as_on_the_smallest_device(major, most):
    """The kernel has 1 KiB of static shared memory too."""
    operators()
    use = torch.ops.moe_ext_emulated.use_shared_memory
    torch.ops.moe_ext_emulated.set_device(major)
    try:
        use(most)
        with pytest.raises(RuntimeError, match="must not use 1024 bytes of static and"):
            use(most + 4)
        with pytest.raises(RuntimeError, match="cudaFuncSetAttribute"):
            use(most + KIB + 4)
    finally:
        torch.ops.moe_ext_emulated.set_device(8)


def test_shared_memory_above_48_kib_needs_a_larger_maximum():
    """The launch of csrc/cuda asks for a larger maximum only above 48 KiB of dynamic memory."""
    operators()
    torch.ops.moe_ext_emulated.use_shared_memory(47 * KIB)
    with pytest.raises(RuntimeError, match="must not use 1024 bytes of static and"):
        torch.ops.moe_ext_emulated.use_shared_memory(47 * KIB + 4)
