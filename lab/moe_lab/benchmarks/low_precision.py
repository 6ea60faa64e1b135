"""Compares packed experts with float experts, ik_llama.cpp and llama.cpp on layers of four models.

    moe-lab benchmark low-precision                    # 4 models, 8 formats, 1 thread
    moe-lab benchmark low-precision --models qwen3_moe --formats mxfp4 --dtype bfloat16
    moe-lab benchmark low-precision --ggml build/bin --threads 1 2 --output monday
    moe-lab benchmark low-precision --report */low_precision.json

A problem is one layer of SwiGLU experts without biases, with the widths of a model, random codes
and random tokens. E is halved until the layer fits into --weights GiB in float32; the tables show
both numbers ("4 of 8"). The help of transformers-experts has the sources of the sizes.

The passes, with T tokens and uniform random routing:

    decode T = 1    forward. ms is the mean time of max(2, 16 // T) calls, for which experts are
                    drawn anew, so that weights come from memory. T are the numbers of --decode
    prefill         forward, T = 512 (--tokens)
    forward + dX    forward and the gradient of x, T = 512

Functions of moe_ext and torch get x in --dtype:

    moe_ext         ops.packed_experts: exact arithmetic on the numbers that the codes stand for
    integer         the same with arithmetic="integer"
    float-experts   ops.experts on dequantized weights in --dtype: up to 8 times the memory
    grouped_mm      torch's grouped_mm on the same weights

The others get x in float32, read the same codes, and have integer arithmetic. They compute no
gradients. Their time does not include the sum over the experts of a token:

    ik_llama.cpp    pip install ik-llama-cpp-python (a build for AVX2)
    llama.cpp       CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python
    -repacked       the same with weights that are ordered for the kernels: iqk_repack_tensor, and
                    the buffer type CPU_REPACK

--ggml adds the folder of another build. A package that is missing is listed under "Not timed".

The limit is max(flops / GEMM peak, bytes / stream bandwidth), with the bytes of codes and scales in
the file. Both rates are measured in the same rounds. The peak is that of torch.mm or ops.experts in
--dtype on square matrices, whichever is faster.

Before any measurement, the command compares the results of all functions with those of moe_ext.
Rounds are interleaved and timed as in moe-lab benchmark layer, whose help explains "~", "–" and
figures of several runs. Each round calls a function twice and times the second call.

With --output, the command writes low_precision.md, .json and .png to a folder.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.formats import FormatName, PackedWeight, dequantize
from moe_lab.benchmarks import ggml, measurement, tables
from moe_lab.benchmarks.harness import Row
from moe_lab.benchmarks.measurement import Stacked, best_ratio
from moe_lab.benchmarks.peers import grouped_mm, random_routing, swiglu
from moe_lab.benchmarks.random_codes import BLOCKS, RandomWeight
from moe_lab.benchmarks.roofline import Work, peak_probe
from moe_lab.benchmarks.shapes import MODELS, PACKED_PEERS, Shape, experts_of_model
from moe_lab.benchmarks.tables import number, spread_of
from moe_lab.experiments.page import Page

NAME = "low_precision"
MOE_EXT, FLOAT, INTEGER, REPACKED = "ours", "float-experts", "integer", "-repacked"
FLOAT_PEERS = {FLOAT, "grouped_mm"}  # with dequantized weights
TOLERANCE = 0.05  # of activations in 8 bits, in the norm of y
PLACE = ("model", "format", "dtype")  # of a result


def problem_of(model: str, format: str) -> str:
    """Returns why a format cannot hold a model's weights; "" if it can."""
    widths = MODELS[model].hidden_size, MODELS[model].intermediate_size
    multiple = BLOCKS[format].inputs
    if all(width % multiple == 0 for width in widths):
        return ""
    return f"{widths[0]} and {widths[1]} must be multiples of {multiple}"


class Pass(NamedTuple):
    """A pass: calls of the layer with T tokens each."""

    tokens: int
    calls: int = 1
    backward: bool = False


def passes_of(args: Any) -> dict[str, Pass]:
    decode = {f"decode T = {T}": Pass(T, calls=max(2, 16 // T)) for T in args.decode}
    prompt = {"prefill": Pass(args.tokens), "forward + dX": Pass(args.tokens, backward=True)}
    return decode | prompt


def draw_experts(shape: Shape, calls: int) -> list[Tensor]:
    """Draws the experts [T, k] of some calls; a call with one token avoids those just used."""
    if shape.tokens > 1:
        return [random_routing(shape) for _ in range(calls)]
    E, k = shape.num_experts, shape.k
    rounds = range(-(-calls // (E // k)))
    order = torch.cat([torch.randperm(E)[: E // k * k] for _ in rounds])
    return list(order.view(-1, 1, k)[:calls])


class Problem(measurement.LayerProblem):
    """A layer of a model with random weights in a format, and the inputs of every pass.

    `dtype` is that of x. The libraries of ggml are by project. With `floats`, the weights are also
    dequantized, for the peers that need them.
    """

    passes: Mapping[str, Pass]
    tolerances: Mapping[str, float] = {
        name: TOLERANCE for name in PACKED_PEERS if name not in FLOAT_PEERS
    }

    def __init__(
        self,
        model: str,
        num_experts: int,
        format: FormatName,
        dtype: torch.dtype,
        passes: Mapping[str, Pass],
        libraries: Mapping[str, ggml.Library],
        *,
        floats: bool = True,
    ) -> None:
        H, _, self.hidden, k, *_ = MODELS[model]
        self.format, self.dtype, self.passes, self.libraries = format, dtype, passes, libraries
        tokens = max(work.tokens for work in passes.values())
        self.shape = Shape(tokens, num_experts, k, H, self.hidden)
        self.layers: dict[str, ggml.Layer] = {}
        self.weights: list[PackedWeight] = []
        self.floats: list[Tensor] = []  # [E, in, out]
        self.blocks: list[Tensor] = []  # of W_gate, W_up and W_down
        self.expert_bytes = 0.0
        for outputs, inputs, parts in ((2 * self.hidden, H, 2), (H, self.hidden, 1)):
            packed, blocks = RandomWeight.draw(format, num_experts, outputs, inputs)
            self.expert_bytes += sum(weight.nbytes for weight in packed if weight is not None)
            self.weights.append(PackedWeight.pack(*packed, format=format))
            if floats:
                self.floats.append(dequantize(*packed, format=format, dtype=dtype).mT)
            if blocks is not None and libraries:
                self.blocks += [part.contiguous() for part in blocks.chunk(parts, 1)]
        self.expert_bytes /= num_experts
        self.x, self.upstream = (torch.randn(tokens, H).to(dtype) for _ in range(2))
        self.gates = torch.randn(tokens, k).softmax(dim=-1).to(dtype)
        self.experts_of = {
            name: draw_experts(self.shape._replace(tokens=work.tokens), work.calls)
            for name, work in passes.items()
        }
        self.used_experts = _used(self.experts_of[list(passes)[-1]][0])

    def work(self, which: str) -> Work:
        """Returns the work of all calls of a pass; bytes are those of codes and scales."""
        weights, times = 3 * self.shape.d_model * self.hidden, 1 + self.passes[which].backward
        indices = self.experts_of[which]
        flops = 2 * weights * sum(index.numel() for index in indices)
        return Work(times * flops, times * self.expert_bytes * sum(map(_used, indices)))

    def call(self, implementation: str, which: str) -> Callable[[], object]:
        function = self.function(implementation, which)
        indices = self.experts_of[which]
        return lambda: [function(index) for index in indices]

    def results(self, implementation: str, which: str) -> Mapping[str, Stacked]:
        """Runs a pass with an implementation; returns y of all calls, and the gradient of x."""
        backward, gates = self.passes[which].backward, self.gates[: self.passes[which].tokens]
        function = self.function(implementation, which)
        ys: list[Tensor] = []
        grads: list[Tensor] = []
        for index in self.experts_of[which]:
            outputs = function(index)
            y, *dx = outputs if backward else [outputs]
            ys.append((y * gates[..., None]).sum(1) if y.dim() == 3 else y)  # ggml has no gates
            grads += dx
        return {"y": ys} | ({"dx": grads} if backward else {})

    def function(self, implementation: str, which: str) -> Callable[[Tensor], Any]:
        """Returns a call of a pass as a function of the experts of each token."""
        tokens, _, backward = self.passes[which]
        x = self.x[:tokens].requires_grad_(backward)
        gates, upstream = self.gates[:tokens], self.upstream[:tokens]
        if implementation not in (MOE_EXT, INTEGER, *FLOAT_PEERS):
            if backward:
                raise NotImplementedError("forward only")
            return partial(self.layer(implementation), x)
        forward = self.forward(implementation)

        def run(index: Tensor) -> Any:
            with torch.set_grad_enabled(backward):
                y = forward(x, index, gates)
                return (y.detach(), *torch.autograd.grad(y, x, upstream)) if backward else y

        return run

    def forward(self, implementation: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Returns a function of x, the experts of each token, and gates."""
        if implementation == "grouped_mm":
            return partial(grouped_mm, self.floats, swiglu)
        operator: Any = ops.experts if implementation == FLOAT else ops.packed_experts
        weights = self.floats if implementation == FLOAT else self.weights
        options: dict[str, Any] = {"activation": "swiglu"}
        if implementation == INTEGER:
            options["arithmetic"] = "integer"

        def forward(x: Tensor, index: Tensor, gates: Tensor) -> Tensor:
            plan = ops.dispatch_plan(index, self.shape.num_experts)
            options.update(offsets=plan.offsets, inverse=plan.inverse, gates=gates)
            y: Tensor = operator(x, weights, **options)
            return y

        return forward

    def layer(self, implementation: str) -> ggml.Layer:
        if implementation not in self.layers:
            project = implementation.removesuffix(REPACKED)
            if self.format not in ggml.TYPES:
                raise NotImplementedError(f"ggml has no type for {self.format}")
            if project not in self.libraries:
                raise ImportError(f"pip install {ggml.PACKAGES[project][1]}, or --ggml FOLDER")
            library, repacked = self.libraries[project], implementation != project
            layer = ggml.Layer(library, self.format, self.blocks, self.hidden, repacked=repacked)
            self.layers[implementation] = layer
        return self.layers[implementation]


def _used(index: Tensor) -> int:
    return index.unique().numel()


def run(args: Any) -> int:
    return measurement.run_page(args, NAME, _measure, page_of)


def _measure(args: Any) -> dict[str, Any]:
    args.device, args.minutes, args.memory, args.patience = "cpu", None, math.inf, math.inf
    passes, libraries = passes_of(args), ggml.find_libraries(args.ggml)
    todo: list[Any] = []
    impossible = []
    floats = not FLOAT_PEERS.isdisjoint(args.peers)
    for model, num_experts in args.num_experts.items():
        for format in args.formats:
            if reason := problem_of(model, format):
                impossible.append(f"{model}, {format}: {reason}")
                continue
            for dtype in args.dtype:
                arguments = model, num_experts, format, getattr(torch, dtype), passes, libraries
                make = partial(Problem, *arguments, floats=floats)
                todo.append((f"{model}, {format}", f"{model}, {format}, {dtype}", make))

    def examine(name: str, problem: Problem, record: dict[str, Any]) -> None:
        gemm = peak_probe(problem.dtype, args.threads[0])
        for result in measurement.measure(name, problem, args.peers, args, gemm):
            result["model"], result["format"] = name.split(", ")
            record["results"].append(per_call(result, problem))

    present = [library.version for library in libraries.values()]
    versions = "; ".join(present or ["no ggml"])
    return measurement.measure_all(todo, examine, args, versions=versions, left_out=impossible)


def per_call(result: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """Divides the times of a pass by its number of calls; adds GB/s of codes and scales."""
    for which, (_, calls, _) in problem.passes.items():
        result["limit_ms"][which] /= calls
        gigabytes = problem.work(which).bytes / calls / 1e9
        for figures in result["figures"].values():
            if entry := figures.get(which):
                entry["ms"] = entry["ms"].scaled(1 / calls)
                entry["gbytes"] = 1e3 * gigabytes / entry["ms"].median
    return result


def _best(result: Row, which: str) -> float | None:
    """Returns the time of the faster one of the projects / the time of moe_ext."""
    return best_ratio(result, which, (*FLOAT_PEERS, INTEGER))


def _best_by_integer(result: Row, which: str) -> str:
    best, integer = _best(result, which), result.figures.get(INTEGER, {}).get(which)
    return number(best / integer["ratio_to_ours"][1] if best and integer else None, ".2f")


def _table(group: Sequence[Row]) -> str:
    """Formats the results of one dtype and number of threads."""
    columns: dict[str, tables.Column] = {
        "model": lambda result, _: result.model,
        "E": lambda result, _: experts_of_model(result.shape, result.model),
        "format": lambda result, _: result.format,
        "pass": lambda _, which: which,
        "moe_ext, ms": tables.MOE_EXT_TIMES["moe_ext, ms"],
        "GF/s": lambda result, which: f"{result.figures[MOE_EXT][which]['gflops']:.4g}",
        "GB/s": lambda result, which: f"{result.figures[MOE_EXT][which]['gbytes']:.3g}",
        **tables.MOE_EXT_TIMES,
    }
    peers = [name for name in PACKED_PEERS if any(name in result.figures for result in group)]
    columns |= {name: tables.ms_of(name) for name in peers}
    columns["ggml / moe_ext"] = lambda result, which: number(_best(result, which), ".2f")
    columns[f"ggml / {INTEGER}"] = _best_by_integer
    return tables.pass_table(columns, group)


def _remarks(results: Sequence[Row]) -> list[str]:
    """Returns each reason why something is not timed, with the peers, and where it holds."""
    reasons: dict[str, dict[str, dict[str, None]]] = {}  # dicts are sets that keep their order
    for result in results:
        for peer, remarks in result.remarks.items():
            for which, reason in remarks.items():
                place_of = {"peer": peer, "pass": which, **{k: getattr(result, k) for k in PLACE}}
                for key, name in place_of.items():
                    reasons.setdefault(reason, {}).setdefault(key, {})[name] = None
    everywhere = {key: {getattr(result, key) for result in results} for key in PLACE}
    everywhere["pass"] = set(results[0].limit_ms) if results else set()
    lines = []
    for reason, places in reasons.items():
        peers = ", ".join(places.pop("peer"))
        names = [", ".join(own) for key, own in places.items() if own.keys() != everywhere[key]]
        lines.append(f"{peers}: {reason}" + (f" ({'; '.join(names)})" if names else ""))
    return lines


def page_of(record: dict[str, Any], results: Sequence[Row]) -> Page:
    about = (
        f"`--help` explains passes and columns. Figures are {spread_of(results)} of one call. GB/s "
        "are those of codes and scales. The time of another implementation is in ms. In brackets "
        "is this time divided by the time of moe_ext. The last two columns compare with the faster "
        "of ik_llama.cpp and llama.cpp. The plot shows the first model."
    )
    sections = tables.time_sections(results, _table, what="x in ")
    sections += tables.list_section("Not timed", [*_remarks(results), *record["left_out"]])
    first = [result for result in results if result.model == results[0].model]
    figure = tables.plot(first, record["environment"], lambda result: result.format)
    return tables.page_of_run("Experts in 4 and 8 bits: speed", record, about, figure, sections)
