#!/usr/bin/env python3
"""Runs one part of the first run on a GPU; scripts/gpu_suite.sh calls it.

    python scripts/gpu_probes.py device          # the slow first use of the device
    python scripts/gpu_probes.py grouped-mm      # torch's grouped GEMM of experts without rows
    python scripts/gpu_probes.py gemm-rates      # TFLOP/s of the experts' GEMMs
    python scripts/gpu_probes.py grouped-mm --device cpu

Run a probe under `timeout`: a fault of torch's grouped GEMM can be a hang. The last line that a
probe has printed names the case.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad

EMPTY = {"none": [], "first": [0], "middle": [2], "last": [4], "all but one": [0, 1, 3, 4]}


def use_device(device: str) -> bool:
    """Uses the device with torch, then with moe_ext."""
    print("torch:", torch.ones(1, device=device).item(), flush=True)
    from moe_ext import ops

    gates = ops.noisy_topk_gating(torch.ones(1, 2, device=device), None, None, 1).gates
    print("moe_ext:", gates.item(), flush=True)
    return True


def probe_grouped_mm(device: str) -> bool:
    """Runs the three grouped GEMMs of a layer as moe_ext does; returns whether all are right.

    They are in bfloat16 without a bias, and their sizes are multiples of 8.
    """
    torch.manual_seed(0)
    fine = True
    for name, empty in EMPTY.items():
        counts = [0 if expert in empty else 24 for expert in range(5)]
        ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
        rows, inputs, columns = sum(counts), 64, 128
        x, dy = (torch.randn(rows, n, device=device).bfloat16() for n in (inputs, columns))
        w = torch.randn(5, inputs, columns, device=device).bfloat16()
        parts = {
            "forward": (x, w),
            "gradient of x": (dy, w.mT),
            "gradient of W": (x.t(), dy),
        }
        for part, (a, b) in parts.items():
            print(f"grouped GEMM, {part}, experts without rows: {name} ...", end=" ", flush=True)
            result = torch._grouped_mm(a, b, ends).float().cpu()
            fine &= agrees(result, a.float().cpu(), b.float().cpu(), counts)
    return fine


def agrees(result: Tensor, a: Tensor, b: Tensor, counts: list[int]) -> bool:
    """Compares the part of each expert with float32, and prints the result.

    The gradient of W of an expert without rows may have any value: moe_ext writes the zeros.
    """
    offsets = pad(torch.tensor(counts).cumsum(0), (1, 0)).tolist()
    wrong, unwritten = [], []
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        rows = slice(begin, end)
        if b.dim() == 3:  # the rows of an expert, and its matrix
            expected, actual = a[rows] @ b[expert], result[rows]
        else:
            expected, actual = a[:, rows] @ b[rows], result[expert]
        if begin == end:
            unwritten += [expert] * (not torch.equal(actual, expected))
        elif not torch.allclose(actual, expected, rtol=0.02, atol=0.1):
            wrong.append(expert)
    print(f"WRONG for the experts {wrong}" if wrong else "right", end="")
    print(f"; not zero without rows: {unwritten}" if unwritten else "", flush=True)
    return not wrong


def seconds_of(function: Callable[[], object], device: str, calls: int) -> float:
    """Returns the seconds of a call, after one call that is not timed."""
    function()
    if device == "cpu":
        begin = perf_counter()
        for _ in range(calls):
            function()
        return (perf_counter() - begin) / calls
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / calls


def print_gemm_rates(device: str, experts: int, width: int, rows_of_expert: list[int]) -> bool:
    """Prints the TFLOP/s of one linear layer of experts, width to width, without routing.

    bfloat16 uses torch's grouped GEMM on the devices that have it. With a bias, and in float16, it
    is the tensor-core kernel of moe_ext. Experts of equal size use torch's batched GEMM.
    """
    from moe_ext import ops

    cases = {
        "bfloat16": (torch.bfloat16, False, True),
        "bfloat16, bias": (torch.bfloat16, True, True),
        "float16": (torch.float16, False, True),
        "float32": (torch.float32, False, True),
        "bfloat16, equal sizes": (torch.bfloat16, False, False),
    }

    def run_both_passes(forward: Callable[[], Tensor], leaves: list[Tensor], dy: Tensor) -> None:
        torch.autograd.grad(forward(), leaves, dy)

    print("| rows of an expert | GEMM | forward | forward + backward |")
    print("|---|---|---|---|", flush=True)
    for rows in rows_of_expert:
        # Half of the experts have 1.5 times the mean, and the others half of it.
        counts = torch.tensor([rows + rows // 2, rows - rows // 2] * (experts // 2))
        offsets = pad(counts.cumsum(0), (1, 0)).to(device)
        for name, (dtype, with_bias, with_offsets) in cases.items():
            draw = partial(torch.randn, device=device, dtype=dtype)
            x, dy = draw(rows * experts, width).requires_grad_(), draw(rows * experts, width)
            w = (draw(experts, width, width) / width**0.5).requires_grad_()
            forward = partial(
                *(ops.experts, x, [w], [draw(experts, width)] if with_bias else None),
                offsets=offsets if with_offsets else None,
            )
            flops = 2 * rows * experts * width**2
            calls = 3 if dtype == torch.float32 else 10
            with torch.no_grad():
                seconds = seconds_of(forward, device, calls)
            both_seconds = seconds_of(partial(run_both_passes, forward, [x, w], dy), device, calls)
            rates = [f"{flops / seconds / 1e12:.3g}", f"{3 * flops / both_seconds / 1e12:.3g}"]
            print(f"| {rows} | {name} | {' | '.join(rates)} |", flush=True)
    return True


def main() -> int:
    """Runs a probe; returns 1 if it found a wrong result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("probe", choices=["device", "grouped-mm", "gemm-rates"])
    parser.add_argument("--device", default="cuda")
    rate_options = parser.add_argument_group("gemm-rates")
    rate_options.add_argument(
        "--experts", type=int, default=64, help="an even number (default: 64)"
    )
    rate_options.add_argument("--width", type=int, default=2048, help="default: 2048")
    rate_options.add_argument("--rows", type=int, nargs="+", default=[16, 128, 2048])
    args = parser.parse_args()
    probes = {
        "device": partial(use_device, args.device),
        "grouped-mm": partial(probe_grouped_mm, args.device),
        "gemm-rates": partial(
            *(print_gemm_rates, args.device, args.experts, args.width, args.rows)
        ),
    }
    return not probes[args.probe]()


if __name__ == "__main__":
    sys.exit(main())
