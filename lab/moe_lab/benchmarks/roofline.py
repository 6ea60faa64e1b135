"""Lower bounds of a computation's time, from its operations and bytes moved."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from moe_ext import ops
from moe_lab.benchmarks.harness import Quartiles, Row, interleaved, pinned, ratio

GEMM_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of a square matrix
STREAM_SIZE = {"cpu": 256, "cuda": 2048}  # MiB per vector
PEAK_SIZE = 1_536  # rows of the square matrices of ops.experts
NUM_EXPONENTIALS, REPEATS = 1 << 13, 200  # in cache; calls


class Work(NamedTuple):
    """The work of a computation: floating-point operations (2 per multiply-add) and bytes moved."""

    flops: float
    bytes: float


class Probe(NamedTuple):
    """A function that reaches a limit of the machine, and the flops and bytes of one call."""

    function: Callable[[], object]
    work: Work


def experts_work(
    tokens: int,  # T
    rows: int,  # R, the number of (token, expert) assignments
    used_experts: int,  # experts with rows
    num_experts: int,  # E
    d_model: int,  # width of x and y
    hidden: int,  # width of the hidden layer
    *,
    gated: bool,
    itemsize: int,  # bytes per element
) -> tuple[Work, Work]:
    """Returns the work of Eq. 1's experts with one hidden layer: forward, and both passes.

    Every expert has 2·d_model·hidden weights, or 3·d_model·hidden with a gated activation, which
    takes an input of twice the hidden width. A weight costs one multiply-add per row in forward
    and two in backward. Bytes are the minimum of any implementation, which moves each tensor once.
    Forward reads x and the weights of the experts with rows, and writes y. Backward reads x, ∂L/∂y,
    these weights and the pre-activations of the hidden layer. Backward writes ∂L/∂x and the
    gradients of all weights, including zeros. Gates and indices do not count.
    """
    weights = (3 if gated else 2) * d_model * hidden
    inputs = (2 if gated else 1) * hidden
    forward = Work(2 * rows * weights, itemsize * (2 * tokens * d_model + used_experts * weights))
    backward = 3 * tokens * d_model + (used_experts + num_experts) * weights + rows * inputs
    return forward, Work(3 * forward.flops, forward.bytes + itemsize * backward)


def limit(work: Work, flops_per_second: float, bytes_per_second: float) -> float:
    """Returns the least time of `work`: max(flops / GEMM peak, bytes / bandwidth), in seconds."""
    return max(work.flops / flops_per_second, work.bytes / bytes_per_second)


def gemm_probe(dtype: torch.dtype, *, device: str = "cpu") -> Probe:
    """Returns a probe that multiplies two square matrices with torch.mm."""
    size = GEMM_SIZE[torch.device(device).type]
    a, b, c = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return Probe(lambda: torch.mm(a, b, out=c), Work(2 * size**3, 0))


def experts_probe(dtype: torch.dtype) -> Probe:
    """Returns a probe that multiplies two square matrices with `ops.experts`, on the CPU."""
    square = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype)
    return Probe(lambda: ops.experts(square, [square[None]]), Work(2 * PEAK_SIZE**3, 0))


def faster(probes: Sequence[Probe]) -> Probe:
    """Returns the probe with the most flops per second, on the present threads."""

    def rate(probe: Probe) -> float:
        probe.function()
        start = time.perf_counter()
        probe.function()
        return probe.work.flops / (time.perf_counter() - start)

    return max(probes, key=rate)


def peak_probe(dtype: torch.dtype, threads: int) -> Probe:
    """Returns the faster one of `gemm_probe` and `experts_probe` on some threads."""
    with pinned(threads):
        return faster([gemm_probe(dtype), experts_probe(dtype)])


def stream_probe(*, device: str = "cpu") -> Probe:
    """Returns a probe of the memory bandwidth, with two float32 vectors.

    On the CPU, the probe is torch.dot, which only reads. A copy or a triad moves fewer bytes per
    second if stores first read the overwritten memory. On a GPU, the probe is a copy.
    """
    size = STREAM_SIZE[torch.device(device).type]
    a, b = (torch.ones(size * 2**18, device=device) for _ in range(2))
    work = Work(0, 2 * size * 2**20)
    return Probe((lambda: torch.dot(a, b)) if device == "cpu" else (lambda: a.copy_(b)), work)


def gemm_and_exp_probes(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns functions for the rates of `ops.experts`, "peak", and of torch.exp, "exp"."""
    values = torch.randn(NUM_EXPONENTIALS)
    out = torch.empty_like(values)

    def exponentials() -> None:
        for _ in range(REPEATS):
            torch.exp(values, out=out)

    return {"peak": experts_probe(dtype).function, "exp": exponentials}


def gemm_and_exp_limits(
    seconds: Mapping[str, Sequence[float]], flops: int, num_exponentials: int
) -> list[float]:
    """Returns the least seconds of GEMMs plus exponentials, at the rates of each round.

    These rates follow from the seconds of `gemm_and_exp_probes`.
    """
    return [
        gemm * flops / (2 * PEAK_SIZE**3) + exp * num_exponentials / (REPEATS * NUM_EXPONENTIALS)
        for gemm, exp in zip(seconds["peak"], seconds["exp"], strict=True)
    ]


def row_with_limit(
    shape: Sequence[int],
    functions: Mapping[str, Callable[[], object]],
    dtype: torch.dtype,
    rounds: int,
    flops: int,
    num_exponentials: int,
) -> Row:
    """Times functions, the first of which is ours, against the limit of GEMMs and exponentials.

    Returns the ms of each function by its name, gflops of ours, "fraction" (limit / ours) and
    "speedup" (the fastest other function / ours).
    """
    seconds = interleaved(gemm_and_exp_probes(dtype) | {**functions}, rounds, warm_up=1)
    base, *peers = (seconds[name] for name in functions)
    return Row(
        shape=", ".join(map(str, shape)),
        **{name: Quartiles.from_values(seconds[name]).scaled(1e3) for name in functions},
        gflops=flops / Quartiles.from_values(base).median / 1e9,
        fraction=ratio(gemm_and_exp_limits(seconds, flops, num_exponentials), base),
        speedup=ratio([min(times) for times in zip(*peers, strict=True)], base),
    )
