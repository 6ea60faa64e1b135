"""Lower bounds of the experts' computation time, from their operations and bytes moved."""

from collections.abc import Callable
from typing import NamedTuple

import torch

GEMM_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of a square matrix
STREAM_SIZE = {"cpu": 256, "cuda": 2048}  # MiB per vector


class Work(NamedTuple):
    """The work of a computation: floating-point operations (2 per multiply-add) and bytes moved."""

    flops: float
    bytes: float


class Probe(NamedTuple):
    """A function that reaches a limit of the machine, and the flops and bytes of one call."""

    function: Callable[[], object]
    work: Work


def experts_work(
    tokens: int,
    rows: int,
    used_experts: int,
    num_experts: int,
    d_model: int,
    hidden: int,
    *,
    gated: bool,
    itemsize: int,
) -> tuple[Work, Work]:
    """Returns the work of Eq. 1's experts with one hidden layer: forward, and both passes.

    Every expert has 2·d_model·hidden weights, or 3·d_model·hidden with a gated activation. A weight
    costs one multiply-add per row in forward and two in backward. Bytes are the minimum of any
    implementation, which moves each tensor once. Forward reads x and the weights of the experts
    with rows, and writes y. Backward reads x, ∂L/∂y, these weights and the pre-activations of the
    hidden layer. Backward writes ∂L/∂x and the gradients of all weights, including zeros. Gates and
    indices do not count.

    Args:
        tokens: T, the number of tokens.
        rows: R, the number of (token, expert) assignments.
        used_experts: number of experts with rows.
        num_experts: E, the number of experts.
        d_model: width of x and y.
        hidden: width of the hidden layer.
        gated: whether the activation takes an input of twice the hidden width.
        itemsize: bytes per element.
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


def stream_probe(*, device: str = "cpu") -> Probe:
    """Returns a probe of the memory bandwidth, with two float32 vectors.

    On the CPU, the probe is torch.dot, which only reads. A copy or a triad moves fewer bytes per
    second if stores first read the overwritten memory. On a GPU, the probe is a copy.
    """
    size = STREAM_SIZE[torch.device(device).type]
    a, b = (torch.ones(size * 2**18, device=device) for _ in range(2))
    work = Work(0, 2 * size * 2**20)
    return Probe((lambda: torch.dot(a, b)) if device == "cpu" else (lambda: a.copy_(b)), work)
