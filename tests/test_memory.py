"""Large outputs on the CPU, which reuse the memory of freed ones."""

import os
import pickle
import sys
import threading

import pytest
import torch
from assertions import MIB, assert_same_bits, peak_mib
from launch import run_code

from moe_ext import empty_cache, ops

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is reused on Linux only")

E, D, F = 6, 512, 512
COUNTS = [1500, 0, 300, 0, 1, 700]  # one expert with several blocks, two without rows


@pytest.fixture(autouse=True)
def empty_before_and_after():
    empty_cache()
    yield
    empty_cache()


@pytest.fixture(scope="module")
def problem():
    """x, gates, W_1, W_2; dy; the plan. Results have at least 4 MiB, except the gates' gradient."""
    torch.manual_seed(1)
    expert_index = torch.arange(E).repeat_interleave(torch.tensor(COUNTS))
    T = len(expert_index)
    expert_index = expert_index[torch.randperm(T)][:, None]
    x, dy, gates = torch.randn(T, D), torch.randn(T, D), torch.rand(T, 1)
    weights = torch.randn(E, D, F) / D**0.5, torch.randn(E, F, D) / F**0.5
    return (x, gates, *weights), dy, ops.dispatch_plan(expert_index, E)


def run(problem):
    """Returns y and the gradients."""
    tensors, dy, plan = problem
    leaves = [t.detach().requires_grad_() for t in tensors]
    x, gates, *weights = leaves
    y = ops.experts(x, weights, offsets=plan.offsets, inverse=plan.inverse, gates=gates)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.fixture(scope="module")
def expected(problem):
    return [t.clone() for t in run(problem)]


def large(tensors):
    return [t for t in tensors if t.nbytes >= 4 * MIB]


def addresses(tensors):
    return {t.data_ptr() for t in large(tensors)}


def test_values_do_not_depend_on_what_was_there(problem, expected):
    seen = set()
    for step in range(3):
        results = run(problem)
        for actual, right in zip(results, expected, strict=True):
            assert_same_bits(actual, right)
        for gradient in results[3:]:  # of the weights of experts without rows
            assert torch.count_nonzero(gradient[1]) == torch.count_nonzero(gradient[3]) == 0
        again = addresses(results)
        assert len(again) == 4
        assert seen & again or step == 0
        seen |= again
        for tensor in results:
            tensor.fill_(float("nan"))
        del results, tensor, actual, gradient


def test_what_is_alive_is_left_alone(problem, expected):
    alive = []
    for _ in range(4):
        alive += large(run(problem))
        run(problem)  # freed at once
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in alive)
    assert len(spans) == 16
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    for i, tensor in enumerate(alive):
        assert_same_bits(tensor, large(expected)[i % 4])
    view = run(problem)[0][5:7]  # keeps the whole output
    for _ in range(2):
        assert not addresses(run(problem)) & {view.untyped_storage().data_ptr()}
    assert_same_bits(view, expected[0][5:7])


def resident():
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_empty_cache_returns_memory_to_the_system(problem):
    results = run(problem)
    size = sum(t.nbytes for t in large(results))
    before = resident()
    del results
    kept = resident()
    assert kept > before - size / 2
    empty_cache()
    assert resident() < kept - size


def test_threads_share_the_memory(problem, expected):
    """Each thread frees memory that another thread has allocated."""
    made, failures = [], []

    def work():
        try:
            for _ in range(3):
                made.append(run(problem))
                results = made.pop(0)
                for actual, right in zip(results, expected, strict=True):
                    assert_same_bits(actual, right)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


class Outputs(torch.utils.data.Dataset):
    def __init__(self, problem):
        self.problem = problem

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return run(self.problem)[0]


def test_forked_workers(problem, expected):
    """A forked worker reuses memory freed by its parent and returns its result in shared memory."""
    run(problem)
    loader = torch.utils.data.DataLoader(
        Outputs(problem), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    for y in loader:
        assert y.is_shared()
        assert_same_bits(y, expected[0])
    assert_same_bits(run(problem)[0], expected[0])


def test_a_large_output_is_a_tensor_as_any_other(problem, expected):
    assert_same_bits(pickle.loads(pickle.dumps(run(problem)[0])), expected[0])
    y = run(problem)[0]
    T = len(y)
    y.resize_(2 * T, D)
    assert_same_bits(y[:T], expected[0])
    storage = y.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    assert storage.data_ptr() == 0
    storage.resize_(size)
    y.copy_(expected[0].repeat(2, 1))
    assert_same_bits(y[T:], expected[0])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [1, 4])
def test_recomputation_keeps_the_rows_of_one_expert(dtype, num_experts):
    """Of an expert with several blocks of rows, backward keeps the inputs and gradients of layers.

    With one thread, it keeps them for one expert at a time.
    """

    def backward_mib(num_rows):
        x = torch.zeros(num_rows, D, dtype=dtype, requires_grad=True)
        weights = [torch.zeros(num_experts, D, D, dtype=dtype, requires_grad=True) for _ in "ab"]
        y = ops.experts(x, weights, recompute=True)
        return peak_mib(lambda: torch.autograd.grad(y, [x, *weights], x.detach()))

    num_rows = 640 * 12
    more = backward_mib(2 * num_rows) - backward_mib(num_rows)
    grad_x = num_rows * D * dtype.itemsize
    layer_bytes = num_rows // num_experts * D * (dtype.itemsize + 4)  # gradients are float32
    assert more == pytest.approx((grad_x + 2 * layer_bytes) / MIB, rel=0.1)


def test_nothing_is_kept_that_nobody_differentiates():
    """Gradients may be enabled although no input needs one, for example in partial training."""
    x, weights = torch.zeros(4 * D, D), [torch.zeros(1, D, 8 * D), torch.zeros(1, 8 * D, D)]
    without = peak_mib(lambda: ops.experts(x, weights))
    x.requires_grad_()
    hidden = peak_mib(lambda: ops.experts(x, weights)) - without
    assert hidden == pytest.approx(4 * D * 8 * D * 4 / MIB, rel=0.1)


def test_threads_of_the_lstm_share_the_memory_of_the_sentences(threads):
    """The workspace of a thread is for its own sentences, not for all."""
    num_sentences, d_input, num_units, width = 2048, 8, 256, 8
    x = torch.zeros(num_sentences, 2, d_input)
    weights = [torch.zeros(4 * num_units, columns) for columns in (d_input, width)]
    projection = torch.zeros(width, num_units)

    def mib(num_threads):
        threads(num_threads)
        return peak_mib(lambda: ops.lstm(x, *weights, projection=projection))

    cells_of_a_step = num_sentences * num_units * 4 / MIB
    assert mib(8) < mib(1) + 2 * cells_of_a_step


WITHOUT_MEMORY = """
import resource, torch
from moe_ext import ops
million = torch.empty(1, 250_000)
cached = torch.ops.moe_ext._empty_rows(million, 400)
del cached
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, resource.RLIM_INFINITY))
print(len(torch.ops.moe_ext._empty_rows(million, 600)))
"""


def test_the_cache_is_given_up_if_memory_is_short():
    """The process has 400 MB in the cache and may use 300 MB more; a tensor needs 600 MB."""
    done = run_code(WITHOUT_MEMORY)
    assert done.stdout == "600\n", done.stderr


LIMITED = """
import torch
from moe_ext import empty_cache
from moe_ext.info import cache_limit, cached_bytes
print(cache_limit())
rows = torch.empty(1, 1 << 18)
a, b, c = (torch.ops.moe_ext._empty_rows(rows, mib) for mib in (8, 12, 64))
del a
print(cached_bytes())
del b, c
print(cached_bytes())
empty_cache()
print(cached_bytes())
"""


@pytest.mark.parametrize(
    ("limit", "cached"),
    [
        (None, [8 * MIB, 84 * MIB, 0]),
        (str(84 * MIB), [8 * MIB, 84 * MIB, 0]),
        (str(16 * MIB), [8 * MIB, 12 * MIB, 0]),  # the first memory is dropped, the last too large
        ("1", [0, 0, 0]),
        ("0", [0, 0, 0]),
    ],
)
def test_the_cache_has_a_limit(limit, cached):
    """Without MOE_EXT_CACHE_BYTES, it is a quarter of the memory of the machine."""
    done = run_code(LIMITED, MOE_EXT_CACHE_BYTES=limit)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    expected = [memory // 4 if limit is None else int(limit), *cached]
    assert list(map(int, done.stdout.split())) == expected, done.stderr


@pytest.mark.parametrize("limit", ["", "-1", "1e9", "1 GiB", "9" * 30])
def test_the_limit_of_the_cache_is_a_number_of_bytes(limit):
    error = f"MOE_EXT_CACHE_BYTES must be a number of bytes, got {limit}"
    assert error in run_code(LIMITED, MOE_EXT_CACHE_BYTES=limit).stderr
