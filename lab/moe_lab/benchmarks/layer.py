"""Compares the speed of Eq. 1 for given gates with other implementations and hardware limits.

    pip install './lab[benchmark]'              # other implementations; optional
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
including zeros. Experts are d -> h -> d with ReLU and no biases. Before any measurement, the
command compares y and all gradients of every other implementation ("peer") with those of moe_ext
("ours"). The peers:

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
get memory that another implementation freed.) The number of rounds follows from --seconds; it is at
least 2 and at most --rounds. Figures are medians over the rounds. Ratios (time / time of ours) and
percentages of the limit are medians of the rounds' ratios.

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

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from moe_ext import ops
from moe_lab.benchmarks import measurement, tables
from moe_lab.benchmarks.harness import Quartiles, Row, clock_of, interleaved
from moe_lab.benchmarks.memory import saved_bytes
from moe_lab.benchmarks.peers import FORWARD, PEERS, TRAINING, Problem
from moe_lab.benchmarks.roofline import stream_probe
from moe_lab.benchmarks.shapes import GPU_SHAPES, SHAPES
from moe_lab.files import atomic_file
from moe_lab.training.device import check_device

_ROUTING_SHAPE = (65536, 256, 4)  # T, E, k
PACKAGES = ("transformers", "mixture-of-experts", "st-moe-pytorch", "scattermoe")  # of the peers


def run(args: Any) -> int:
    record = measurement.read_merged(args) if args.report else _measure(args)
    results = measurement.results_of(record)
    tables.print_report(record, results)
    if args.plot and results:
        chosen = measurement.by(results, lambda result: result.activation)[results[0].activation]
        figure = tables.plot(chosen, record["environment"], _label)
        with atomic_file(args.plot) as file:
            figure.savefig(file, format=args.plot.suffix[1:].lower(), dpi=100)
    return measurement.report_wrong(results)


def _label(result: Row) -> str:
    return f"{result.name}\nE={result.shape.num_experts}\nT={result.shape.tokens}"


def _measure(args: Any) -> dict[str, Any]:
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
    routing = [] if on_cpu else [routing_times(_ROUTING_SHAPE, args)]
    versions = measurement.versions_of(*PACKAGES)
    more: dict[str, Any] = {"versions": versions, "memory": [], "routing": routing}
    return measurement.measure_all(todo, partial(_examine, args=args), args, **more)


def _peers_of(activation: str, args: Any) -> list[str]:
    return [name for name in args.peers if PEERS[name].activation == activation]


def _examine(name: str, problem: Problem, record: dict[str, Any], args: Any) -> None:
    peers = _peers_of(problem.activation, args)
    if args.check_memory:
        record["memory"].append({"name": name} | _kept_memory(problem, peers, args))
    else:
        record["results"] += measurement.measure(name, problem, peers, args)
    if args.profile:
        with args.profile.open("a") as file:
            what = f"{name}, {problem.activation}, {problem.dtype}"
            print(what, _profile(problem, args), sep="\n", file=file)


def routing_times(shape: tuple[int, int, int], args: Any) -> dict[str, Any]:
    """Returns quartiles of the routing time in ms, from logits to dispatch plan, and limits.

    A limit is the time to move the bytes of input and output.
    """
    T, E, k = shape
    clean, raw, noise = torch.randn(3, T, E, device=args.device).unbind()

    def training() -> None:
        kept = ops.noisy_topk_gating(clean, raw, noise, k)
        ops.importance(kept.gates, kept.expert_index, E)
        ops.load(clean, kept.noise_stddev, kept.threshold, kept.expert_index)
        ops.dispatch_plan(kept.expert_index, E)

    def evaluation() -> None:
        ops.dispatch_plan(ops.noisy_topk_gating(clean, None, None, k).expert_index, E)

    def torchs() -> None:
        largest, expert_index = clean.topk(k)
        torch.softmax(largest, dim=-1)
        flat = expert_index.flatten()
        flat.argsort(stable=True)
        flat.bincount(minlength=E)

    stream = stream_probe(device=args.device)
    functions: dict[str, Callable[[], object]] = {"stream": stream.function}
    functions |= {"training": training, "evaluation": evaluation, "torch, evaluation": torchs}
    with torch.no_grad():
        seconds = interleaved(functions, args.rounds, clock=clock_of(args.device))
    bandwidth = stream.work.bytes / median(seconds.pop("stream"))
    slots = T * k * (4 + 3 * 8)  # gates; indices, permutation and its inverse
    least = {"training": 4 * 4 * T * E + slots, "evaluation": 4 * T * E + slots}
    return {
        "shape": shape,
        "ms": {name: Quartiles.from_values(1e3 * t for t in s) for name, s in seconds.items()},
        "limit_ms": {name: 1e3 * bytes / bandwidth for name, bytes in least.items()},
    }


def _profile(problem: Problem, args: Any) -> str:
    """Returns tables of the time of moe_ext by kernel on a GPU, by operator on the CPU."""
    on_gpu = problem.device != "cpu"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    tables = ""
    for which in (TRAINING, FORWARD):
        function = problem.call("ours", which)
        function()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(3):
                args.clock(function)
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        rows = profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=90)
        tables += f"{which}, 3 calls\n{rows}\n"
    return tables


def _kept_memory(problem: Problem, peers: list[str], args: Any) -> dict[str, Any]:
    """Returns the bytes that autograd saves for backward without the weights, by implementation."""
    inputs = (2 if problem.activation == "swiglu" else 1) * problem.hidden
    kept = {}
    for name in ("ours", *peers):
        if problem.extra(name, TRAINING).memory > args.memory * 2**30:
            continue
        try:
            peer, _ = problem.peer(name)
        except ImportError:
            continue
        forward = partial(peer.forward, problem.x, problem.gates)
        kept[name] = saved_bytes(forward, [*problem.weights, *peer.parameters])
    return {
        "activation": problem.activation,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "x": problem.x.nbytes,
        "hidden": problem.rows * inputs * problem.dtype.itemsize,
        "kept": kept,
    }
