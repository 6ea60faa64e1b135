"""Compares the speed of Eq. 1 for given gates with other implementations and hardware limits.

    python -m pip install '.[benchmark]'              # other implementations, matplotlib; optional
    moe-lab benchmark layer                     # 1 and 2 threads, float32: 20 minutes
    moe-lab benchmark layer --shapes e32 t256-zipf --rounds 5 --threads 1
    moe-lab benchmark layer --shapes 4096,16,2,256,512,zipf --dtype float32 bfloat16
    moe-lab benchmark layer --seconds 60 --json layer.json --plot layer.png
    moe-lab benchmark layer --check-memory      # what is saved for backward
    moe-lab benchmark layer --device cuda --dtype bfloat16 float32 --seconds 2
    moe-lab benchmark layer --report layer.json # print the tables of an earlier run
    moe-lab benchmark layer --report monday.json tuesday.json --json both.json

Every implementation gets the same x [T, d], gates [T, k], expert_index [T, k] and weights. It
returns y [T, d] in fresh tensors and, with backward, the gradients of x, gates and all weights,
including zeros. Experts are d -> h -> d with ReLU and no biases. Before any measurement, the script
compares y and all gradients of every other implementation ("peer") with those of moe_ext ("ours").
The peers:

    HF                   transformers' MixtralExperts, which have only gated activations. Ours then
                         uses SwiGLU too; h is a third smaller, so the GEMMs cost the same
    mixture-of-experts,  the packages' layers with the given gates instead of their own gates. The
    st-moe-pytorch       group size is the cheapest one, and the capacity drops no token
    loops                separate parameters for each expert, as in a list of modules. With "split",
                         autograd creates no gradient with all rows for each slice
    ScatterMoE           needs a GPU; must be installed
    experts              the GEMMs of moe_ext alone, on T·k sorted rows
    dense                one network of torch's linear layers on T·k rows: the same operations, but
                         not the same result

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
and launches are enqueued ahead (moe_lab.benchmarks.harness.DeviceClock). "Routing" is all
computation between the gate's logits and the experts: gating, importance and load (in training
only), and the dispatch plan. Routing in plain torch is topk, softmax, a stable argsort and
bincount.
"""

import argparse
import functools
import importlib.metadata
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.info import avoid_missing_amx
from moe_lab.benchmarks._layer_report import label, report
from moe_lab.benchmarks.harness import (
    Quartiles,
    clock_of,
    environment,
    interleaved,
    options_as_text,
)
from moe_lab.benchmarks.measurement import (
    BESIDE_PEERS,
    LONG_ON_CPU,
    LONG_ON_GPU,
    Candidates,
    Functions,
    Key,
    Options,
    Result,
    WrongResult,
    by,
    check,
    first_line,
    measure,
    merged,
    reason_to_skip,
)
from moe_lab.benchmarks.memory import keep_freed_memory, peak_allocated_mib, saved_bytes
from moe_lab.benchmarks.peers import (
    BOTH,
    FORWARD,
    PASSES,
    PEERS,
    ROUTINGS,
    Kind,
    Peer,
    Problem,
    Shape,
    Stacked,
    dense,
    experts_alone,
    ours,
)
from moe_lab.benchmarks.roofline import stream_probe
from moe_lab.benchmarks.tables import (
    plot,
    report_wrong,
)
from moe_lab.cli import at_least, make_parser
from moe_lab.errors import ConfigError
from moe_lab.files import write_json
from moe_lab.progress import progress
from moe_lab.training.device import check_device

SHAPES = {
    "e4": Shape(4096, 4, 4, 512, 1024),
    "e32": Shape(4096, 32, 4, 512, 1024),
    "e256": Shape(4096, 256, 4, 512, 1024),
    "t256": Shape(256, 256, 4, 512, 1024),
    "e1024": Shape(4096, 1024, 4, 512, 1024),
    "k1": Shape(8192, 64, 1, 512, 2048),
    "wide": Shape(4096, 64, 2, 1024, 4096),
    "t1": Shape(1, 256, 4, 512, 1024),
    "hierarchical": Shape(4096, 256, 4, 512, 1024, "hierarchical"),
    "e32-zipf": Shape(4096, 32, 4, 512, 1024, "zipf"),
    "e256-zipf": Shape(4096, 256, 4, 512, 1024, "zipf"),
    "t256-zipf": Shape(256, 256, 4, 512, 1024, "zipf"),
}
# In addition to SHAPES. The gated experts of e128 have a hidden width of 1024.
GPU_SHAPES = {
    "e128": Shape(32768, 128, 8, 4096, 1536),
    "t16384": Shape(16384, 256, 4, 512, 1024),
    "e4096": Shape(65536, 4096, 4, 512, 1024),
    "e2048": Shape(65536, 2048, 4, 512, 2048),
    "t65536-k1": Shape(65536, 64, 1, 512, 2048),
}
_ALL_SHAPES = SHAPES | GPU_SHAPES
_ROUTING_SHAPE = (65536, 256, 4)  # T, E, k
ACTIVATIONS = ("relu", "swiglu")


def _parse_shape(text: str) -> tuple[str, Shape]:
    """Parses the name of a shape, or T,E,k,d,h with an optional routing."""
    if text in _ALL_SHAPES:
        return text, _ALL_SHAPES[text]
    numbers, routing = text.split(","), "uniform"
    if numbers[-1] in ROUTINGS:
        routing = numbers.pop()
    if len(numbers) != 5 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(_ALL_SHAPES)} or T,E,k,d,h with ,zipf or ,hierarchical, "
            f"got {text!r}"
        )
    return text, Shape._make((*map(int, numbers), routing))


def gradients(peer: Peer, problem: Problem) -> tuple[Tensor, ...]:
    """Returns y and the gradients of x, gates and all parameters, in fresh tensors."""
    y = peer.forward(problem.x, problem.gates)
    leaves = [problem.x, problem.gates, *peer.parameters]
    return y, *torch.autograd.grad(y, leaves, problem.upstream, materialize_grads=True)


def passes(name: str, peer: Peer, problem: Problem) -> Functions:
    def forward() -> None:
        with torch.no_grad():
            peer.forward(problem.x, problem.gates)

    def both() -> None:
        gradients(peer, problem)

    return {(name, BOTH): both, (name, FORWARD): forward}


def results(peer: Peer, problem: Problem, which: str) -> dict[str, Stacked]:
    """Returns y, or y and all gradients, of the pass `which`; weight gradients are by expert."""
    if which == FORWARD:
        with torch.no_grad():
            return {"y": [peer.forward(problem.x, problem.gates)]}
    y, dx, dgates, *weights = (each.detach() for each in gradients(peer, problem))
    first, second = peer.by_expert(weights)
    return {"y": [y], "dx": [dx], "dgates": [dgates], "dW1": first, "dW2": second}


def candidates(problem: Problem, rates: Mapping[Key, float], options: Options) -> Candidates:
    """Checks each implementation against the result of moe_ext, just before its first round."""
    functions: Functions = {}
    seconds: dict[Key, list[float]] = {}
    peak_mib: dict[Key, float] = {}

    def add(calls: Functions, warm_up: int) -> None:
        found = interleaved(calls, 1, warm_up, clock=options.clock)
        if problem.device != "cpu":
            for key, call in calls.items():
                peak_mib[key] = peak_allocated_mib(call, problem.device)
        functions.update(calls)
        seconds.update(found)

    mine = ours(problem)
    expected = results(mine, problem, BOTH)
    add(passes("ours", mine, problem), warm_up=1)
    remarks: dict[Key, str] = {}
    of_rows = problem.of_rows()
    for name, beside in zip(BESIDE_PEERS, (experts_alone(problem), dense(of_rows)), strict=True):
        add(passes(name, beside, of_rows), warm_up=1)
    for name in options.peers:
        kind = PEERS[name]
        if kind.activation != problem.activation:
            continue
        skipped = {
            (name, which): reason
            for which in PASSES
            if (reason := reason_to_skip(kind.extra(problem, which == BOTH), rates, options))
        }
        try:
            if (name, FORWARD) not in skipped:
                peer = kind.build(problem)
                which = FORWARD if (name, BOTH) in skipped else BOTH
                check(results(peer, problem, which), expected)
                calls = passes(name, peer, problem)
                add({key: call for key, call in calls.items() if key not in skipped}, warm_up=0)
        except ImportError as error:
            skipped = {(name, which): f"not installed: {error}" for which in PASSES}
        except WrongResult as error:
            skipped = {(name, which): f"WRONG: {error}" for which in PASSES}
        except torch.OutOfMemoryError:
            skipped = {(name, which): "out of memory" for which in PASSES}
        except Exception as error:  # what a peer does not support, in its own words
            skipped = {(name, which): f"fails: {first_line(error)}" for which in PASSES}
        remarks |= skipped
    return Candidates(functions, seconds, remarks, peak_mib)


def benchmark(name: str, problem: Problem, options: Options) -> list[Result]:
    """Measures a problem at each number of threads in `options`."""
    work = dict(zip(PASSES, problem.work(), strict=True))
    choose = functools.partial(candidates, problem, options=options)
    return measure(name, problem, work, choose, options)


def routing_times(shape: tuple[int, int, int], device: str, options: Options) -> dict[str, Any]:
    """Returns quartiles of the routing time in ms, from logits to dispatch plan, and limits.

    A limit is the time to move the bytes of input and output.
    """
    T, E, k = shape
    clean, raw, noise = (torch.randn(T, E, device=device) for _ in range(3))

    def training() -> None:
        kept = ops.noisy_topk_gating(clean, raw, noise, k)
        ops.importance(kept.gates, kept.expert_index, E)
        ops.load(clean, kept.noise_stddev, kept.threshold, kept.expert_index)
        ops.dispatch_plan(kept.expert_index, E)

    def evaluation() -> None:
        kept = ops.noisy_topk_gating(clean, None, None, k)
        ops.dispatch_plan(kept.expert_index, E)

    def torchs() -> None:
        largest, expert_index = clean.topk(k)
        torch.softmax(largest, dim=-1)
        flat = expert_index.flatten()
        flat.argsort(stable=True)
        flat.bincount(minlength=E)

    stream = stream_probe(device=device)
    functions = {
        "training": training,
        "evaluation": evaluation,
        "torch, evaluation": torchs,
        "stream": stream.function,
    }
    with torch.no_grad():
        seconds = interleaved(functions, options.rounds, clock=options.clock)
    bandwidth = stream.work.bytes / statistics.median(seconds.pop("stream"))
    slots = T * k * (4 + 3 * 8)  # gates; indices, permutation and its inverse
    least = {"training": 4 * 4 * T * E + slots, "evaluation": 4 * T * E + slots}
    return {
        "shape": shape,
        "ms": {name: Quartiles.of(1e3 * s for s in found) for name, found in seconds.items()},
        "limit_ms": {name: 1e3 * bytes / bandwidth for name, bytes in least.items()},
    }


def profile(problem: Problem, options: Options) -> str:
    """Returns tables of the time of moe_ext by kernel on a GPU, by operator on the CPU."""
    on_gpu = problem.device != "cpu"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    tables = []
    for (_, which), function in passes("ours", ours(problem), problem).items():
        function()
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(3):
                options.clock(function)
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        rows = found.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)
        tables.append(f"{which}, 3 calls\n{rows}")
    return "\n".join(tables)


def _kept_memory(name: str, problem: Problem, options: Options) -> dict[str, Any]:
    """Returns the bytes that autograd saves for backward without the weights, by implementation."""
    weights = problem.weights
    inputs = (2 if problem.activation == "swiglu" else 1) * problem.hidden
    found: dict[str, Any] = {
        "name": name,
        "activation": problem.activation,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "x": problem.x.nbytes,
        "hidden": problem.rows * inputs * problem.dtype.itemsize,
        "kept": {},
    }
    peers = {"ours": Kind(problem.activation, ours)} | {name: PEERS[name] for name in options.peers}
    for peer_name, kind in peers.items():
        if kind.activation != problem.activation:
            continue
        if kind.extra(problem, True).memory > options.memory * 2**30:
            continue
        try:
            peer = kind.build(problem)
        except ImportError:
            continue
        forward = functools.partial(peer.forward, problem.x, problem.gates)
        found["kept"][peer_name] = saved_bytes(forward, [*weights, *peer.parameters])
    return found


def versions() -> str:
    """Returns the versions of the packages with other implementations."""
    found = []
    for package in ("transformers", "mixture-of-experts", "st-moe-pytorch", "scattermoe"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def finish(record: dict[str, Any], args: argparse.Namespace) -> int:
    """Writes and prints a record; returns the exit status."""
    if args.json:
        write_json(args.json, record)
    results = report(record)
    if args.plot and results:
        chosen = by(results, lambda result: result.activation)[results[0].activation]
        plot(chosen, record["environment"], label).savefig(args.plot, dpi=100)
    return report_wrong(results)


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--shapes", type=_parse_shape, nargs="+", help="default: all shapes for the device"
    )
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32"])
    parser.add_argument(
        "--threads", type=at_least(1), nargs="+", default=[1, 2], help="CPU threads"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=list(PEERS), metavar="PEER"
    )
    parser.add_argument("--activations", nargs="+", choices=ACTIVATIONS, default=list(ACTIVATIONS))
    parser.add_argument("--rounds", type=at_least(2), default=21, help="maximum number of rounds")
    parser.add_argument(
        "--seconds",
        type=float,
        default=15.0,
        help="time limit in seconds for the rounds of a shape",
    )
    parser.add_argument("--minutes", type=float, help="minutes after which no further shape starts")
    parser.add_argument(
        "--memory", type=float, help="GiB that a peer may take (default: 6; 40 on a GPU)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=2.0,
        help="seconds that a peer may take in addition to the GEMMs",
    )
    parser.add_argument(
        "--keep-freed-memory", action="store_true", help="reuse freed memory (glibc)"
    )
    parser.add_argument(
        "--check-memory", action="store_true", help="measure only what is saved for backward"
    )
    parser.add_argument("--json", type=Path, help="results file, written after every shape")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--profile", type=Path, help="text file for the profile of our kernels")
    parser.add_argument(
        "--report", type=Path, nargs="+", help="print files of --json without measuring"
    )
    args = parser.parse_args(arguments)
    if args.report:
        return finish(merged([json.loads(path.read_text()) for path in args.report]), args)
    try:
        check_device(args.device)
    except ConfigError as error:
        parser.error(f"--{error}")
    on_cpu = args.device == "cpu"
    if on_cpu and "bfloat16" in args.dtype:
        avoid_missing_amx()
    if args.keep_freed_memory:
        keep_freed_memory()
    if not on_cpu:
        torch.cuda.set_device(torch.device(args.device).index or 0)
    torch.manual_seed(0)
    shapes = args.shapes or list((SHAPES if on_cpu else GPU_SHAPES | SHAPES).items())
    options = Options(
        args.threads if on_cpu else [None],
        args.rounds,
        args.seconds,
        (6.0 if on_cpu else 40.0) if args.memory is None else args.memory,
        args.patience,
        args.peers,
        LONG_ON_CPU if on_cpu else LONG_ON_GPU,
        clock_of(args.device),
    )
    todo = [
        (name, shape, getattr(torch, dtype), activation)
        for dtype in args.dtype
        for name, shape in shapes
        for activation in args.activations
        # Ours by itself is timed only if no peer is selected.
        if not args.peers or any(PEERS[peer].activation == activation for peer in args.peers)
    ]
    record: dict[str, Any] = {
        "environment": environment(args.device),
        "versions": versions(),
        "arguments": options_as_text(args),
        "results": [],
        "memory": [],
        "routing": [],
        "left_out": [],
    }
    start = time.monotonic()
    if not on_cpu:
        record["routing"].append(routing_times(_ROUTING_SHAPE, args.device, options))
    problem: Problem | None = None
    for name, shape, dtype, activation in progress(todo, "problems", "problem"):
        what = f"{name}, {activation}, {str(dtype).removeprefix('torch.')}"
        if args.minutes is not None and time.monotonic() - start > 60 * args.minutes:
            record["left_out"].append(f"{what}: the time limit was reached")
            continue
        try:
            problem = Problem(shape, dtype, activation, args.device)
            if args.check_memory:
                record["memory"].append(_kept_memory(name, problem, options))
            else:
                record["results"] += map(asdict, benchmark(name, problem, options))
            if args.json:
                write_json(args.json, record)
            if args.profile:
                with args.profile.open("a") as file:
                    print(what, profile(problem, options), sep="\n", file=file)
        except torch.OutOfMemoryError:
            record["left_out"].append(f"{what}: out of memory")
        problem = None
        if not on_cpu:
            torch.cuda.empty_cache()
    return finish(record, args)
