"""Tests of CUDA only: every operator has a kernel, agrees with the CPU, and never synchronizes.

The tests of each operator also run on a GPU, if there is one, and with emulated kernels (`device`
in conftest.py).
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import emulated
import fake_quack
import pytest
import torch
from assertions import assert_as_accurate, assert_exact, assert_same_bits
from launch import run_code
from operators import DTYPES, TABLE, evaluate, moved, sample, upstream_of
from samples.experts import CLAMPED

import moe_ext
from moe_ext import BalancedGate, MoE, NoisyTopKGate, TopKGate, ops
from moe_ext.optim import FactoredAdam

BUILT = moe_ext._build.cuda_version() is not None
HAS_GPU = BUILT and torch.cuda.is_available()


def needs_gpu(test):
    return pytest.mark.cuda(pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")(test))


@pytest.mark.skipif(not BUILT, reason="built without CUDA")
def test_every_operator_of_the_cpu_has_a_cuda_kernel():
    """A kernel with another C++ signature than the schema's would not have been registered."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    on_cpu = emulated.operators_of_the_cpu()
    assert len(on_cpu) >= 16
    assert [name for name in on_cpu if not has_kernel(f"moe_ext::{name}", "CUDA")] == []


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


@dataclass
class Gpu:
    """A place to run CUDA kernels: on `device`, within `kernels()`."""

    device: str
    kernels: Callable[[], contextlib.AbstractContextManager]

    def copy(self, values):
        return [value.to(self.device, copy=True) for value in values]


@pytest.fixture(
    params=[
        *([pytest.param("cuda", marks=pytest.mark.cuda)] if HAS_GPU else []),
        pytest.param("emulated sm_80", marks=pytest.mark.long),
        "emulated sm_90",
    ],
)
def gpu(request):
    if request.param == "cuda":
        return Gpu("cuda", contextlib.nullcontext)
    return Gpu("cpu", functools.partial(emulated.kernels, int(request.param[-2])))


@pytest.mark.parametrize(("num_experts", "k"), [(5, 1), (32, 4), (33, 33), (256, 8), (5000, 4)])
def test_gating_and_plan_have_the_bits_of_the_cpu(gpu, num_experts, k):
    inputs = [draw(700, num_experts) for _ in range(3)]
    inputs[0][3, : num_experts // 2] = 0.5  # ties
    inputs[0][4] = inputs[0][4].sort().values  # each expert is better than those before
    inputs[0][5] = inputs[0][5].sort(descending=True).values
    inputs[2][3:6] = 0.0
    expected = torch.ops.moe_ext.noisy_topk_gating(*inputs, k, 1e-2)
    expected += tuple(ops.dispatch_plan(expected[1], num_experts))
    with gpu.kernels():
        actual = torch.ops.moe_ext.noisy_topk_gating(*gpu.copy(inputs), k, 1e-2)
        actual += tuple(ops.dispatch_plan(actual[1], num_experts))
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.cpu(), e)


def layer(gate, device, dtype=torch.float32, **options):
    torch.manual_seed(3)
    return MoE(64, 16, 2, gate=gate, hidden_sizes=[128], **options).to(device, dtype)


def assert_never_waits(step):
    for attempt in range(2):  # the first call may allocate
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


# In bfloat16, layers of these sizes use torch's grouped GEMM.
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_flat_layer_never_waits_for_the_device(dtype):
    moe = layer(NoisyTopKGate(64, 16, 2), "cuda", dtype)
    x = torch.randn(300, 64, device="cuda", dtype=dtype, requires_grad=True)

    def step():
        y, aux = moe(x)
        (y.square().sum() + aux.loss).backward()

    assert_never_waits(step)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lstm_never_waits_for_the_device(dtype):
    call = sample("lstm", "cuda", dtype, B=4, S=5, P=2, lengths=[5, 0, 3, 1], reverse=True)
    upstream = upstream_of(evaluate(TABLE["lstm"], call)[0])
    assert_never_waits(lambda: evaluate(TABLE["lstm"], call, upstream=upstream))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_row_does_not_depend_on_the_height_of_tiles(dtype, transposed):
    """Our GEMM has tiles of 16, 32, 64 or 128 rows, for the mean rows of an expert."""
    x, w = draw(560, 72, dtype=dtype), draw(5, 72, 136, dtype=dtype)
    w = w.mT.contiguous().mT if transposed else w
    results = []
    for num_rows in (19, 139, 259, 559):  # a mean of 4, 28, 52 and 112 rows
        offsets = torch.tensor([0, 0, 19, 19, num_rows, num_rows])
        with emulated.kernels():
            results.append(ops.experts(x[:num_rows], [w], offsets=offsets))
    for result in results:
        assert torch.equal(result[:19], results[0])
    exact = torch.cat([x[:19].double() @ w[1].double(), x[19:559].double() @ w[3].double()])
    plain = torch.cat([x[:19] @ w[1], x[19:559] @ w[3]])
    assert_as_accurate(results[-1], plain, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_of_many_experts_have_rows(dtype):
    """The list of tiles is made by 256 threads, each with several experts."""
    counts = torch.zeros(600, dtype=torch.int64)
    counts[[1, 255, 256, 520, 599]] = torch.tensor([1, 70, 2, 33, 5])
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    x, w = draw(111, 8, dtype=dtype), draw(600, 8, 16, dtype=dtype)
    with emulated.kernels():
        y = ops.experts(x, [w], offsets=offsets)
    parts = [*zip(x.split(counts.tolist()), w, strict=True)]
    exact = torch.cat([part.double() @ matrix.double() for part, matrix in parts])
    assert_as_accurate(y, torch.cat([part @ matrix for part, matrix in parts]), exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("d_model", "hidden", "equal"),  # rows of whole chunks of 16 bytes, and of parts
    [(72, 200, False), (70, 201, False), (24, 40, True), (22, 41, True)],
)
def test_experts_of_any_size_in_any_type(gpu, dtype, d_model, hidden, equal):
    """torch's grouped GEMM takes up to 1023 experts, whose emulation takes too long."""
    for num_experts in (3, 1500) if gpu.device == "cuda" else (3,):
        counts = [2 if equal else 0] * num_experts
        if not equal:
            counts[0], counts[2], counts[-1] = 140, 1, counts[-1] + 40
        widths = (d_model, hidden, d_model)
        check_experts(gpu, dtype, counts=counts, widths=widths, activation="swiglu", even=equal)


@pytest.mark.parametrize("empty", [[0], [2], [4], [0, 1, 3, 4]], ids=str)
def test_torchs_grouped_gemm_of_experts_without_rows(gpu, empty):
    """Such an expert may make torch hang, so scripts/gpu_suite.sh runs this test first."""
    counts = [0 if expert in empty else 24 for expert in range(5)]
    check_experts(gpu, torch.bfloat16, counts=counts, widths=(16, 32, 16), activation="swiglu")


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(widths=(16, 24)),
        dict(widths=(16, 32, 24), activation="swiglu"),
        dict(widths=(16, 24, 40, 16), activation=CLAMPED[1], activation_args=(64, 1.5, 0.25)),
        dict(widths=(16, 24, 40, 16), activation="gelu", recompute=True, ranks=(8, None, 8)),
    ],
    ids=lambda sizes: f"{len(sizes['widths']) - 1} layers, {sizes.get('activation')}",
)
def test_layers_of_experts(gpu, sizes, dtype, bias, gated):
    """In bfloat16 on 9.0, torch's grouped GEMM multiplies the matrices, also with biases."""
    check_experts(gpu, dtype, T=200, E=5, k=2, bias=bias, gated=gated, **sizes)


def check_experts(gpu, dtype, **sizes):
    check("experts", gpu, dtype, **sizes)


def check(name, gpu, dtype, **sizes):
    """Asserts the values and the gradients of an operator."""
    row = TABLE[name]
    call = sample(name, gpu.device, dtype, **sizes)
    with gpu.kernels():
        outputs, grads = evaluate(row, call)
    upstream = upstream_of(outputs)
    plain, exact = (
        evaluate(row, moved(call, dtype=to), row.plain, moved(upstream, dtype=to))
        for to in (dtype, torch.float64)
    )
    for a, p, e in zip(outputs + grads, sum(plain, []), sum(exact, []), strict=True):
        if dtype == torch.float64:
            assert_exact(a, e)
        else:  # the gates have float32, also in half types
            assert_as_accurate(a, p.to(a.dtype), e)


@pytest.mark.parametrize("widths", [(8, 16), (8, 16, 8), (8, 16, 24, 8)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_does_not_depend_on_the_others(gpu, dtype, widths):
    """Kernels and GEMMs whose results no gradient needs are left out."""
    sizes = dict(T=20, E=3, k=2, widths=widths, bias=True, ranks=[8] * (len(widths) - 1))
    call = sample("experts", gpu.device, dtype, activation="swiglu", **sizes)
    lora = [matrix for adapter in call["lora"] for matrix in adapter[:2]]
    leaves = [call["x"], call["gates"], *call["weights"], *call["biases"], *lora]
    with gpu.kernels():
        dy = torch.randn_like(ops.experts(**call))
        for leaf in leaves:
            leaf.requires_grad_()
        expected = torch.autograd.grad(ops.experts(**call), leaves, dy)
        for leaf in leaves:
            leaf.requires_grad_(False)
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_()
            (gradient,) = torch.autograd.grad(ops.experts(**call), leaf, dy)
            leaf.requires_grad_(False)
            assert_same_bits(gradient, expected[i])


def calls_of(function):
    """Returns the names of torch's operators that a function calls."""
    with torch.autograd.profiler.profile(use_cpu=True) as profile:
        function()
    return {event.name for event in profile.function_events}


# The releases of torch and CUDA for torch_build.h.
@pytest.mark.parametrize(
    ("dtype", "release", "cuda", "expected"),
    [
        (torch.bfloat16, 2011, 13000, True),
        (torch.float16, 2013, 13030, False),
        (torch.float16, 2014, 13020, False),
        (torch.float16, 2014, 13030, True),
        (torch.float32, 2014, 13030, False),
    ],
)
def test_torchs_grouped_gemm_is_used_where_it_has_a_kernel(dtype, release, cuda, expected):
    """Elsewhere, it would wait for the host."""
    gpu = Gpu("cpu", functools.partial(emulated.kernels, 9))
    emulated.operators()
    torch.ops.moe_ext_emulated.set_torch(release, cuda)
    try:
        calls = calls_of(
            lambda: check_experts(gpu, dtype, T=70, E=5, k=2, widths=(16, 32, 24), bias=True)
        )
    finally:
        torch.ops.moe_ext_emulated.set_torch(0, 0)
    assert ("aten::_grouped_mm" in calls) == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("0", "uses torch's: False"),
        ("1", "uses torch's: True"),
        ("quack", "RuntimeError: MOE_EXT_GROUPED_MM=quack needs quack-kernels: import quack"),
        ("no", "ValueError: MOE_EXT_GROUPED_MM must be 0, 1 or quack, got no"),
    ],
)
def test_the_environment_chooses_the_grouped_gemm(choice, expected):
    program = """
import emulated, torch
from moe_ext import ops
x, w = torch.ones(4, 8).bfloat16(), torch.ones(2, 8, 8).bfloat16()
with emulated.kernels(9), torch.autograd.profiler.profile(use_cpu=True) as profile:
    ops.experts(x, [w], offsets=torch.tensor([0, 1, 4]))
print("uses torch's:", "aten::_grouped_mm" in {event.name for event in profile.function_events})
"""
    done = run_code(program, MOE_EXT_GROUPED_MM=choice)  # it is read once in a process
    assert expected in done.stdout + done.stderr
    assert (done.status == 0) == (choice in "01")


@pytest.mark.long
def test_quack_replaces_torchs_grouped_gemm():
    """Runs the tests of layers in half types, with the operator of fake_quack.py."""
    chosen = "test_layers_of_experts and sm_90 and (dtype2 or dtype3)"
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-p", "fake_quack", "-k", chosen)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, __file__],
        env=os.environ | {"MOE_EXT_GROUPED_MM": "quack", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    numbers = re.search(r"calls of QuACK: \[(\d+), (\d+)\]", done.stdout).groups()
    assert min(map(int, numbers)) > 0


def test_quack_has_the_operator_of_the_fake():
    pytest.importorskip("quack.gemm_interface", reason="needs quack-kernels")
    arguments = {a.name: a for a in torch.ops.quack.gemm_out.default._schema.arguments}
    for expected in torch._C.parse_schema(f"quack::{fake_quack.SCHEMA}").arguments:
        argument = arguments.pop(expected.name)
        assert str(argument.type) == str(expected.type)
        assert argument.default_value == expected.default_value
    assert all(argument.has_default_value() for argument in arguments.values())


@contextlib.contextmanager
def blas(backend, precision, kernels=contextlib.nullcontext):
    before = torch.backends.cuda.preferred_blas_library(), torch.get_float32_matmul_precision()
    try:
        torch.backends.cuda.preferred_blas_library(backend)
        torch.set_float32_matmul_precision(precision)
        with kernels():
            yield
    finally:
        torch.backends.cuda.preferred_blas_library(before[0])
        torch.set_float32_matmul_precision(before[1])


needs_cublaslt = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="needs torch with CUDA"
)
EVEN = dict(counts=[9] * 3, widths=(5, 7, 4), bias=True, even=True)


@needs_cublaslt
@pytest.mark.parametrize(
    ("backend", "precision", "expected"),
    [("cublas", "high", True), ("cublaslt", "highest", True), ("cublaslt", "high", False)],
)
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("experts", EVEN),
        ("lstm", dict(B=4, S=3, P=2)),
        ("linear_cross_entropy", dict(T=3, D=4, V=5)),
    ],
)
def test_cublaslt_does_not_round_float32_to_tf32(name, sizes, backend, precision, expected):
    """torch's guard against TF32 does not reach cuBLASLt."""
    call = sample(name, dtype=torch.float32, **sizes)
    with blas(backend, precision, emulated.kernels):
        calls = calls_of(lambda: evaluate(TABLE[name], call))
    assert bool(calls & {"aten::bmm", "aten::mm", "aten::addmm_"}) == expected


@needs_cublaslt
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("experts", EVEN),
        *((name, s) for name in ("lstm", "linear_cross_entropy") for s in TABLE[name].typical),
    ],
)
def test_our_gemms_in_place_of_cublaslt(name, sizes):
    check(name, Gpu("cpu", in_tf32("cublaslt", emulated.kernels)), torch.float32, **sizes)


def in_tf32(backend, *kernels):
    """Returns a context in which torch's GEMMs of float32 may use TF32."""
    return functools.partial(blas, backend, "high", *kernels)


@needs_gpu
@pytest.mark.parametrize(
    ("gate", "dtype", "optimizer_class"),
    [
        (BalancedGate, torch.float32, torch.optim.Adam),
        (TopKGate, torch.bfloat16, FactoredAdam),
    ],
)
def test_a_training_step_is_captured_in_a_graph(gate, dtype, optimizer_class):
    """Captures a whole step with gate, thresholds and optimizer; replays equal eager steps."""
    x = torch.randn(320, 64, device="cuda", dtype=dtype)

    def training():
        torch.manual_seed(3)
        moe = layer(gate(64, 16, 2), "cuda", dtype, w_load=0.0)
        optimizer = optimizer_class(moe.parameters(), lr=0.01, capturable=True)

        def step():
            optimizer.zero_grad(set_to_none=False)
            y, aux = moe(x)
            loss = y.square().mean() + aux.loss
            loss.backward()
            optimizer.step()
            return loss

        return moe, step

    captured, step = training()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    losses = []
    for _ in range(5):
        graph.replay()
        losses.append(loss.item())

    eager, step = training()
    expected = [step().item() for _ in range(8)]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(losses, expected[3:], rtol=100 * eps, atol=0.0)
    assert losses[-1] < losses[0]
    for a, e in zip(captured.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, e, rtol=1000 * eps, atol=100 * eps)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_side_stream_gives_what_the_default_one_does(dtype):
    moe, results = layer(NoisyTopKGate(64, 16, 2), "cuda", dtype), []
    x = draw(300, 64, dtype=dtype).cuda()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.manual_seed(0)
            torch.cuda._sleep(100_000_000)  # x is late: another stream would read it too early
            leaf = (2 * x).requires_grad_()
            y, aux = moe(leaf)
            loss = y.square().sum() + aux.loss
            results.append([y, *torch.autograd.grad(loss, [leaf, *moe.parameters()])])
        torch.cuda.synchronize()
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@needs_gpu
@pytest.mark.parametrize("backend", ["cublas", "cublaslt"])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("experts", dict(counts=[256] * 4, widths=(512, 512), even=True)),  # torch's batched GEMM
        ("experts", dict(counts=[100, 0, 924, 0], widths=(512, 512))),
        ("linear_cross_entropy", dict(T=512, D=512, V=512)),
        ("lstm", dict(B=64, S=2, D=512, U=256, P=256)),
    ],
)
def test_float32_is_float32(name, sizes, backend):
    """TF32 is not used even where it is allowed; its error is about 1000 times larger."""
    check(name, Gpu("cuda", in_tf32(backend)), torch.float32, **sizes)


@needs_gpu
def test_another_device_and_another_stream():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    moe = layer(NoisyTopKGate(64, 16, 2), "cuda:1")
    with torch.cuda.stream(torch.cuda.Stream(1)):
        y, aux = moe(torch.randn(30, 64, device="cuda:1"))
        (y.sum() + aux.loss).backward()
    torch.cuda.synchronize(1)
    assert y.device.index == 1 and y.isfinite().all()
