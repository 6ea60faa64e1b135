"""The time that the experts' computation takes at least: for its products, or for its bytes."""

from collections.abc import Callable
from typing import NamedTuple

import torch

GEMM_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of a square
STREAM_SIZE = {"cpu": 256, "cuda": 2048}  # MiB of a vector


class Work(NamedTuple):
    """What has to be done: floating-point operations (two a multiply-add), and bytes to move."""

    flops: float
    bytes: float


class Probe(NamedTuple):
    """A function that shows what the machine can do, and the work that one call is."""

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
    """The work of Eq. 1's experts with one hidden layer: forward, and forward and backward.

    Every expert has 2·d_model·hidden weights, or 3 with a gated activation; a weight is a
    multiply-add for each row, and two in the backward pass. Bytes are the least that any
    implementation moves, each tensor once: forward reads x and the weights of the experts that have
    rows and writes y. Backward reads x, ∂L/∂y, these weights and the hidden layer's input, and
    writes ∂L/∂x and the gradients of all weights, zeros too. Gates and indices are left out.

    Args:
        tokens: T.
        rows: R, the (token, expert) pairs.
        used_experts: how many experts have rows.
        num_experts: E.
        d_model: width of x and y.
        hidden: width of the hidden layer.
        gated: whether the activation takes an input of twice that width.
        itemsize: bytes of an element.
    """
    weights = (3 if gated else 2) * d_model * hidden
    inputs = (2 if gated else 1) * hidden
    forward = Work(2 * rows * weights, itemsize * (2 * tokens * d_model + used_experts * weights))
    backward = 3 * tokens * d_model + (used_experts + num_experts) * weights + rows * inputs
    return forward, Work(3 * forward.flops, forward.bytes + itemsize * backward)


def limit(work: Work, flops_per_second: float, bytes_per_second: float) -> float:
    """max(flops / GEMM peak, bytes / stream bandwidth), in seconds."""
    return max(work.flops / flops_per_second, work.bytes / bytes_per_second)


def gemm_probe(dtype: torch.dtype, *, device: str = "cpu") -> Probe:
    """torch.mm of two squares into a third."""
    size = GEMM_SIZE[torch.device(device).type]
    a, b, c = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return Probe(lambda: torch.mm(a, b, out=c), Work(2 * size**3, 0))


def stream_probe(*, device: str = "cpu") -> Probe:
    """Two float32 vectors: on the CPU their torch.dot, on a GPU a copy, read and written.

    torch.dot reads alone: on a CPU a copy or a triad moves fewer bytes a second where stores first
    read what they overwrite.
    """
    size = STREAM_SIZE[torch.device(device).type]
    a, b = (torch.ones(size * 2**18, device=device) for _ in range(2))
    work = Work(0, 2 * size * 2**20)
    return Probe((lambda: torch.dot(a, b)) if device == "cpu" else (lambda: a.copy_(b)), work)
