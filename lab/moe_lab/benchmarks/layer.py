"""Compares the speed of Eq. 1 for given gates with other implementations and hardware limits.

    pip install './lab[benchmark]'              # other implementations; optional
    moe-lab benchmark layer                     # 1 and 2 threads, float32: 20 minutes
    moe-lab benchmark layer --shapes e32 t256-zipf --rounds 5 --threads 1
    moe-lab benchmark layer --shapes 4096,16,2,256,512,zipf --dtype float32 bfloat16
    moe-lab benchmark layer --seconds 60 --json layer.json --plot layer.png
    moe-lab benchmark layer --device cuda --dtype bfloat16 float32 --seconds 2
    moe-lab benchmark layer --report layer.json # print the tables of an earlier run
    moe-lab benchmark layer --report monday.json tuesday.json --json both.json

Every implementation gets the same x [T, d], gates [T, k], expert_index [T, k] and weights. It
returns y [T, d] in fresh tensors and, with backward, the gradients of x, gates and all weights,
including zeros. Experts are d -> h -> d with ReLU and no biases. Before any measurement, the
command compares y and all gradients of every other implementation ("peer") with those of moe_ext
("ours"). The peers:

    HF        transformers' MixtralExperts, which have only gated activations. Ours then uses SwiGLU
              too; h is a third smaller, so the GEMMs cost the same
    loops     separate parameters for each expert, as in a list of modules. With "split", autograd
              creates no gradient with all rows for each slice
    experts   the GEMMs of moe_ext alone, on T·k sorted rows
    dense     one network of torch's linear layers on T·k rows: the same operations, but not the
              same result

The limit is max(flops / GEMM peak, minimum bytes / stream bandwidth). The GEMM peak is the speed
of torch.mm for two square matrices in the same dtype, with 2048 rows on the CPU and 8192 on a GPU.
The stream bandwidth on the CPU is that of torch.dot for two float32 vectors of 256 MiB, which only
reads. The stream bandwidth on a GPU is that of a copy of 2 GiB. In forward, the minimum bytes are
those of reading x and the weights of experts with rows, and of writing y. In backward, they are
those of reading x, dy, these weights and the hidden layer's pre-activations, and of writing dx and
all weights' gradients.

Rounds are interleaved: GEMM peak and stream (medians of 3 calls), then ours and all peers in
sequence. Each implementation is called twice, and the second call is timed. The second call reuses
the memory that the first call freed, as in a loop. (On a virtual machine, it can take seconds to
get memory that another implementation freed.) The number of rounds follows from --seconds, but is
at least 2. Figures are medians over the rounds. Ratios (time / time of ours) and percentages of the
limit are medians of the rounds' ratios.

A peer that takes more than 2.5 times as long as ours and more than 0.5 s (0.05 s on a GPU) runs in
one round only ("~"). A peer is not timed ("–") if it needs more than --memory GiB, or more than
--patience seconds in addition to the GEMMs. A peer with a wrong result is not timed, and the exit
status is 1. For several runs, figures are medians, with minimum and maximum in brackets.

On a GPU, times are between two events of the stream; the L2 cache is overwritten before each call,
and launches are enqueued ahead (moe_lab.benchmarks.harness.DeviceClock).
"""

from functools import partial
from typing import Any

import torch

from moe_lab.benchmarks import measurement, tables
from moe_lab.benchmarks.harness import Row
from moe_lab.benchmarks.peers import PEERS, Problem
from moe_lab.benchmarks.shapes import GPU_SHAPES, SHAPES
from moe_lab.training.device import check_device


def run(args: Any) -> int:
    record = measurement.read_merged(args) if args.report else _measure(args)
    results = measurement.results_of(record)
    tables.print_report(record, results)
    if args.plot and results:
        chosen = measurement.by(results, lambda result: result.activation)[results[0].activation]
        tables.plot(chosen, record["environment"], _label).savefig(args.plot, dpi=100)
    return measurement.report_wrong(results)


def _label(result: Row) -> str:
    return f"{result.name}\nE={result.shape.num_experts}\nT={result.shape.tokens}"


def _measure(args: Any) -> dict[str, Any]:
    """Measures all problems; returns the record of the run."""
    check_device(args.device)
    on_cpu = args.device == "cpu"
    if not on_cpu:
        torch.cuda.set_device(torch.device(args.device).index or 0)
        args.threads = [None]
    if args.memory is None:
        args.memory = 6.0 if on_cpu else 40.0
    todo = [
        (
            *(name, f"{name}, {activation}, {dtype}"),
            partial(Problem, shape, getattr(torch, dtype), activation, args.device),
        )
        for dtype in args.dtype
        for name, shape in args.shapes or (SHAPES if on_cpu else GPU_SHAPES | SHAPES).items()
        for activation in args.activations
        # Ours by itself is timed only if no peer is selected.
        if not args.peers or _peers_of(activation, args)
    ]
    return measurement.measure_all(todo, partial(_examine, args=args), args)


def _peers_of(activation: str, args: Any) -> list[str]:
    return [name for name in args.peers if PEERS[name].activation == activation]


def _examine(name: str, problem: Problem, record: dict[str, Any], args: Any) -> None:
    peers = _peers_of(problem.activation, args)
    record["results"] += measurement.measure(name, problem, peers, args)
