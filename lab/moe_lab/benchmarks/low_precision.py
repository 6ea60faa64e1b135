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
from torch.nn import functional as F

from moe_ext import ops
from moe_ext.formats import FormatName, PackedWeight, dequantize
from moe_lab.benchmarks import ggml, measurement
from moe_lab.benchmarks.harness import Quartiles, Row, pinned
from moe_lab.benchmarks.measurement import Extra, Stacked, best_ratio
from moe_lab.benchmarks.peers import random_routing
from moe_lab.benchmarks.random_codes import BLOCKS, RandomWeight
from moe_lab.benchmarks.roofline import Work, experts_probe, faster, gemm_probe
from moe_lab.benchmarks.shapes import MODELS, PACKED_PEERS, Shape, experts_of_model
from moe_lab.benchmarks.tables import (
    cell,
    list_section,
    number,
    page_of_run,
    percent_of_limit,
    plot,
    spread_of,
    time_sections,
)
from moe_lab.experiments.report import Page
from moe_lab.markdown import markdown_table

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


class Problem:
    """A layer of a model with random weights in a format, and the inputs of every pass.

    Args:
        model: a name of `MODELS`.
        num_experts: the number of experts.
        format: a name of `BLOCKS`.
        dtype: of x.
        passes: the passes by name.
        libraries: those of ggml, by project.
        floats: whether to dequantize the weights, for the peers that need them.
    """

    beside, has_peak, device, activation = (), False, "cpu", "swiglu"
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

    def extra(self, implementation: str, which: str) -> Extra:
        return Extra()

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
            return partial(grouped_mm, self.floats)
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
        """Builds the layer of ggml."""
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


def grouped_mm(weights: Sequence[Tensor], x: Tensor, index: Tensor, gates: Tensor) -> Tensor:
    """Computes the layer with torch's grouped_mm, as transformers does."""
    slot = index.flatten().argsort(stable=True)
    token = slot // index.shape[1]
    ends = index.flatten().bincount(minlength=len(weights[0])).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(x[token], weights[0], offs=ends).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, weights[1], offs=ends)
    return torch.zeros_like(x).index_add(0, token, out * gates.flatten()[slot][:, None])


def run(args: Any) -> int:
    return measurement.run_page(args, NAME, _measure, page_of)


def _measure(args: Any) -> dict[str, Any]:
    """Measures all problems; returns the record of the run."""
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
        with pinned(args.threads[0]):
            gemm = faster([probe(problem.dtype) for probe in (gemm_probe, experts_probe)])
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


def _table(group: Sequence[Row]) -> str:
    """Formats the results of one dtype and number of threads; a line per model, format and pass."""
    peers = [name for name in PACKED_PEERS if any(name in result.figures for result in group)]
    lines = []
    for result in group:
        experts = experts_of_model(result.shape, result.model)
        for which, limit_ms in result.limit_ms.items():
            figures = result.figures[MOE_EXT][which]
            best = best_ratio(result, which, (*FLOAT_PEERS, INTEGER))
            integer = result.figures.get(INTEGER, {}).get(which)
            faster = best / integer["ratio_to_ours"][1] if best and integer else None
            lines.append(
                [
                    *(result.model, experts, result.format, which),
                    f"{Quartiles(*figures['ms']):.4g}",
                    *(f"{figures['gflops']:.4g}", f"{figures['gbytes']:.3g}", f"{limit_ms:.4g}"),
                    percent_of_limit(figures),
                    *(cell(result, peer, which, lambda f: f"{f['ms'][1]:.4g}") for peer in peers),
                    *(number(value, ".2f") for value in (best, faster)),
                ]
            )
    header = ["model", "E", "format", "pass", "moe_ext, ms", "GF/s", "GB/s", "limit, ms"]
    last = ["ggml / moe_ext", f"ggml / {INTEGER}"]
    return markdown_table([*header, "% of limit", *peers, *last], lines)


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
    sections = time_sections(results, _table, what="x in ")
    sections += list_section("Not timed", [*_remarks(results), *record["left_out"]])
    first = [result for result in results if result.model == results[0].model]
    figure = plot(first, record["environment"], lambda result: result.format)
    return page_of_run("Experts in 4 and 8 bits: speed", record, about, figure, sections)
