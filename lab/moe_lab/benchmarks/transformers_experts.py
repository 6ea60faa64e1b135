"""Compares the experts of transformers' models on moe_ext with transformers' implementations.

    python -m pip install '.[benchmark]'                   # transformers, matplotlib
    moe-lab benchmark transformers-experts      # 3 models, 1 thread
    moe-lab benchmark transformers-experts --models mixtral --dtype bfloat16
    moe-lab benchmark transformers-experts --models all --threads 1 2 --output monday
    moe-lab benchmark transformers-experts --report */transformers_experts.json

A problem is one experts layer of a model: transformers' own class, with the model's real widths,
random weights and random tokens. Every implementation runs on the same module.

    model        H     E    I      k  source of the sizes
    mixtral      4096  8    14336  2  Mixtral 8x7B, arXiv 2401.04088, Table 1
    qwen3_moe    2048  128  768    8  Qwen3-30B-A3B, config.json on the Hugging Face hub
    olmoe        2048  64   1024   8  OLMoE-1B-7B, arXiv 2409.02060, and its config.json
    deepseek_v3  7168  256  2048   8  DeepSeek-V3, arXiv 2412.19437, Sec. 4.2
    gpt_oss      2880  32   2880   4  gpt-oss-20b, arXiv 2508.10925, and its config.json

H is the hidden size, E the number of experts, I the intermediate size, k the number of experts of a
token. E is halved until the layer's weights fit into --weights GiB in float32; it is then the same
in bfloat16. The tables show both numbers ("16 of 256").

The tasks, with T tokens and uniform random routing:

    prefill            forward, T = 512 (--tokens)
    decode, T = 1      10 forward passes of one token each. Every pass has other tokens and other
                       experts, so weights come from memory. ms is the time of all 10 passes
    decode, T = 8      the same with 8 tokens
    training           forward and backward, T = 512: gradients of x, gates and all parameters
    recompute          training with torch.utils.checkpoint (use_reentrant=False) around the layer

The limit is that of moe-lab benchmark layer: max(flops / GEMM peak, minimum bytes / stream
bandwidth), both measured in the same rounds. Biases do not count. The limit of "recompute" has in
addition the first GEMM, which reads x and its weights again.

Before any measurement, the script compares outputs and gradients of the other implementations with
those of moe_ext. Rounds are interleaved and timed as in moe-lab benchmark layer, whose
docstring explains "~", "–" and figures of several runs. Each round calls an implementation twice
and times the second call.

- batched_mm copies the weights of the experts for every token. It is not timed if the copies need
  more than --memory GiB.
- In backward, eager creates a gradient of all weights for each expert. It is not timed if these
  gradients need more than --patience seconds.
- Peak memory is that of torch's allocations in one call, without weights and inputs.

With --output, the script writes transformers_experts.md, .json and .png to a folder.
"""

import functools
import importlib
import importlib.metadata
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ext.info import avoid_missing_amx
from moe_lab.benchmarks.harness import Quartiles, environment, interleaved, options_as_text
from moe_lab.benchmarks.measurement import (
    LONG_ON_CPU,
    Candidates,
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
from moe_lab.benchmarks.memory import keep_freed_memory, peak_allocated_mib
from moe_lab.benchmarks.peers import (
    Extra,
    Shape,
    Stacked,
    batched_extra,
    eager_extra,
    random_routing,
)
from moe_lab.benchmarks.roofline import Work, experts_work
from moe_lab.benchmarks.tables import (
    list_of_remarks,
    peak_table,
    place,
    plot,
    report_wrong,
)
from moe_lab.cli import at_least, make_parser, positive
from moe_lab.errors import ConfigError
from moe_lab.experiments.report import markdown_table, write_report
from moe_lab.files import write_json
from moe_lab.packages import require_package
from moe_lab.progress import progress

NAME = "transformers_experts"
OURS = "moe_ext"  # the name in transformers' registry
COMMAND = "moe-lab benchmark transformers-experts --models all --output docs/results"
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


class Model(NamedTuple):
    """The sizes of a model's experts, and transformers' classes for them.

    Attributes:
        hidden_size: H, the width of a token.
        num_experts: E, the number of experts.
        intermediate_size: I, the width of an expert's hidden layer.
        k: number of experts of a token.
        activation: activation of the hidden layer, shown in the results.
        prefix: first part of the names of transformers' classes.
        width: the config's name of I.
    """

    hidden_size: int
    num_experts: int
    intermediate_size: int
    k: int
    activation: str
    prefix: str
    width: str = "intermediate_size"


# The docstring above has the sources.
MODELS = {
    "mixtral": Model(4096, 8, 14336, 2, "swiglu", "Mixtral"),
    "qwen3_moe": Model(2048, 128, 768, 8, "swiglu", "Qwen3Moe", "moe_intermediate_size"),
    "olmoe": Model(2048, 64, 1024, 8, "swiglu", "Olmoe"),
    "deepseek_v3": Model(7168, 256, 2048, 8, "swiglu", "DeepseekV3", "moe_intermediate_size"),
    "gpt_oss": Model(2880, 32, 2880, 4, "clamped swiglu", "GptOss"),
}
DEFAULT_MODELS = ["qwen3_moe", "olmoe", "gpt_oss"]


class Task(NamedTuple):
    """A task: `steps` passes of the layer with `tokens` tokens each (None: the option --tokens)."""

    tokens: int | None = None
    steps: int = 1
    backward: bool = False
    recompute: bool = False


TASKS = {
    "prefill": Task(),
    "decode, T = 1": Task(tokens=1, steps=10),
    "decode, T = 8": Task(tokens=8, steps=10),
    "training": Task(backward=True),
    "recompute": Task(backward=True, recompute=True),
}


class Step(NamedTuple):
    """The inputs of a pass: x [T, H], experts [T, k], gates [T, k] and the gradient of y [T, H]."""

    x: Tensor
    expert_index: Tensor
    gates: Tensor
    upstream: Tensor

    @property
    def used_experts(self) -> int:
        return self.expert_index.unique().numel()


def experts_that_fit(name: str, gib: float) -> int:
    """Returns a model's number of experts, halved until the float32 weights fit into `gib` GiB.

    Raises:
        ConfigError: the k experts of a token do not fit.
    """
    model = MODELS[name]
    one = 4 * 3 * model.hidden_size * model.intermediate_size / 2**30
    num_experts = model.num_experts
    while num_experts * one > gib:
        num_experts //= 2
    if num_experts < model.k:
        raise ConfigError(
            f"weights must hold {model.k} experts of {name}, which take {model.k * one:.2f} GiB, "
            f"got {gib:g} GiB"
        )
    return num_experts


def build_layer(name: str, num_experts: int, dtype: torch.dtype) -> nn.Module:
    """Builds transformers' experts layer of a model with random weights."""
    model = MODELS[name]
    modules = f"transformers.models.{name}"
    modeling = require_package("--models", f"{modules}.modeling_{name}", "benchmark")
    configuration = importlib.import_module(f"{modules}.configuration_{name}")
    sizes = {"hidden_size": model.hidden_size, model.width: model.intermediate_size}
    config = getattr(configuration, f"{model.prefix}Config")(**sizes)
    config.num_local_experts = num_experts  # every config has this name, or maps it to its own
    with torch.device("meta"):
        layer = getattr(modeling, f"{model.prefix}Experts")(config)
    layer = layer.to(dtype).to_empty(device="cpu")
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            down = parameter_name.startswith("down")
            fan_in = model.intermediate_size if down else model.hidden_size
            parameter.uniform_(-1, 1).mul_((3 / fan_in) ** 0.5)
    return layer


class Problem:
    """An experts layer of a model with random weights, and the inputs of every task.

    Args:
        name: a key of `MODELS`.
        num_experts: E, at most the model's number of experts.
        dtype: dtype of weights and inputs.
        tokens: T of prefill, training and recompute.
    """

    def __init__(self, name: str, num_experts: int, dtype: torch.dtype, tokens: int) -> None:
        model = MODELS[name]
        self.shape = Shape(tokens, num_experts, model.k, model.hidden_size, model.intermediate_size)
        self.activation = model.activation
        self.hidden = model.intermediate_size
        self.dtype = dtype
        self.device = "cpu"
        self.layer = build_layer(name, num_experts, dtype)
        self.config: Any = self.layer.config
        large = self._step(tokens)
        self.steps = {
            name: [self._step(task.tokens) for _ in range(task.steps)] if task.tokens else [large]
            for name, task in TASKS.items()
        }
        self.used_experts = large.used_experts

    def _step(self, tokens: int) -> Step:
        shape = self.shape._replace(tokens=tokens)
        x, upstream = (torch.randn(tokens, shape.d_model).to(self.dtype) for _ in range(2))
        gates = torch.randn(tokens, shape.k).softmax(dim=-1).to(self.dtype)
        return Step(x.requires_grad_(), random_routing(shape), gates.requires_grad_(), upstream)

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.layer.parameters())

    def work(self, task_name: str) -> Work:
        """Returns the work of a task; see the module's docstring."""
        task, steps = TASKS[task_name], self.steps[task_name]
        d_model, hidden, itemsize = self.shape.d_model, self.hidden, self.dtype.itemsize
        flops, moved = 0.0, 0.0
        for step in steps:
            tokens, used = len(step.x), step.used_experts
            rows = step.expert_index.numel()
            sizes = (tokens, rows, used, self.shape.num_experts, d_model, hidden)
            forward, both = experts_work(*sizes, gated=True, itemsize=itemsize)
            of_step = both if task.backward else forward
            flops += of_step.flops
            moved += of_step.bytes
            if task.recompute:
                weights = 2 * d_model * hidden
                flops += 2 * rows * weights
                moved += itemsize * (tokens * d_model + used * weights)
        return Work(flops, moved)

    def extra(self, task_name: str, implementation: str) -> Extra:
        """Returns what an implementation needs in addition to the work of a task."""
        task, step = TASKS[task_name], self.steps[task_name][0]
        weights, num_experts = self.weight_bytes(), self.shape.num_experts
        if implementation == "eager":
            return eager_extra(step.used_experts, weights, backward=task.backward)
        if implementation == "batched_mm":
            rows = step.expert_index.numel()
            return batched_extra(rows, num_experts, weights, backward=task.backward)
        return Extra()

    def run(self, task_name: str, implementation: str) -> Mapping[str, Stacked]:
        """Runs a task with an implementation; returns outputs and gradients by name."""
        task, steps = TASKS[task_name], self.steps[task_name]
        self.config._experts_implementation = implementation
        if not task.backward:
            with torch.no_grad():
                return {"y": [self.layer(*step[:3]) for step in steps]}
        (step,) = steps
        forward = functools.partial(checkpoint, self.layer, use_reentrant=False)
        y = (forward if task.recompute else self.layer)(*step[:3])
        names, parameters = zip(*self.layer.named_parameters(), strict=True)
        inputs = [step.x, step.gates, *parameters]
        dx, dgates, *grads = torch.autograd.grad(y, inputs, step.upstream, materialize_grads=True)
        return {"y": [y.detach()], "dx": [dx], "dgates": [dgates]} | {
            f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)
        }


def candidates(problem: Problem, rates: Mapping[Key, float], options: Options) -> Candidates:
    """Checks each implementation against the result of moe_ext, just before its first round."""
    chosen = Candidates({}, {}, {}, {})
    for task in TASKS:
        _add_task(chosen, task, problem, rates, options)
    return chosen


def _add_task(
    chosen: Candidates,
    task: str,
    problem: Problem,
    rates: Mapping[Key, float],
    options: Options,
) -> None:
    """Adds the implementations of a task to `chosen`, or the reasons to skip them."""
    expected = problem.run(task, OURS)
    for name in ("ours", *options.peers):
        key = (name, task)
        call = functools.partial(problem.run, task, OURS if name == "ours" else name)
        if reason := reason_to_skip(problem.extra(task, name), rates, options):
            chosen.remarks[key] = reason
            continue
        try:
            check(call(), expected)
            chosen.seconds.update(interleaved({key: call}, 1, warm_up=0))
            chosen.peak_mib[key] = peak_allocated_mib(call)
            chosen.functions[key] = call
        except WrongResult as error:
            chosen.remarks[key] = f"WRONG: {error}"
        except Exception as error:  # what an implementation does not support, in its own words
            chosen.remarks[key] = f"fails: {first_line(error)}"


def benchmark(name: str, problem: Problem, options: Options) -> list[Result]:
    """Measures all tasks of a problem at each number of threads in `options`."""
    work = {task: problem.work(task) for task in TASKS}
    choose = functools.partial(candidates, problem, options=options)
    return measure(name, problem, work, choose, options)


def _experts(result: Result) -> str:
    """Formats the number of experts, and that of the model if it has more."""
    num_experts, of_model = result.shape.num_experts, MODELS[result.name].num_experts
    return f"{num_experts}" if num_experts == of_model else f"{num_experts} of {of_model}"


def _cell(result: Result, name: str, task: str) -> str:
    """Formats the time in ms, and the time divided by the time of moe_ext."""
    found = result.figures.get(name, {}).get(task)
    if found is None:
        return "–"
    once = "~" if found.rounds == 1 else ""
    return f"{once}{found.ms[1]:.4g} ({found.ratio_to_ours[1]:.2f})"


def _time_table(group: Sequence[Result]) -> str:
    """Formats the results of one dtype and number of threads; one line per model and task."""
    peers = list(dict.fromkeys(name for result in group for name in result.figures))[1:]
    header = ["model", "E", "task", "T·k/E", "moe_ext, ms", "limit, ms", "% of limit"]
    lines = []
    for result in group:
        for task, limit_ms in result.limit_ms.items():
            tokens = TASKS[task].tokens or result.shape.tokens
            ours = result.figures["ours"][task]
            best = result.best_ratio(task)
            lines.append(
                [
                    result.name,
                    _experts(result),
                    task,
                    f"{tokens * result.shape.k / result.shape.num_experts:.3g}",
                    f"{Quartiles(*ours.ms):.4g}",
                    f"{limit_ms:.4g}",
                    f"{Quartiles(*(100 * share for share in ours.share_of_limit)):.0f}",
                    *(_cell(result, peer, task) for peer in peers),
                    "–" if best is None else f"{best:.2f}",
                ]
            )
    return markdown_table([*header, *peers, "best / moe_ext"], lines)


def page_of(record: dict[str, Any], results: Sequence[Result]) -> str:
    """Formats the page of a run, or of several merged runs."""
    occasions = max(result.occasions for result in results)
    runs = f"medians over up to {occasions} runs (minimum-maximum)"
    spread = runs if occasions > 1 else "medians over the rounds (quartiles)"
    parts = [
        "# The experts of transformers' models\n",
        f"```\n{COMMAND}\n```\n",
        f"{record['environment']}; {record['versions']}\n",
        "The docstring of the script has the sources of the sizes, and explains tasks and columns. "
        f"Figures are {spread}. The time of another implementation is in ms; in brackets is this "
        "time divided by the time of moe_ext. T·k/E is the mean number of rows of an expert. The "
        "time of a decode task is that of 10 passes.\n",
    ]
    for (dtype, threads), group in by(results, lambda r: (r.dtype, r.threads)).items():
        gflops = max(result.gemm_gflops for result in group)
        gbytes = max(result.stream_gbytes for result in group)
        parts += [
            f"## {dtype}, {place(threads)}\n",
            f"GEMM peak {gflops:.0f} GF/s, stream {gbytes:.1f} GB/s.\n",
            _time_table(group),
        ]
    for dtype, group in by(results, lambda result: result.dtype).items():
        first = [result for result in group if result.threads == group[0].threads]
        parts += [
            f"## Peak memory, {dtype}\n",
            "MiB without weights and inputs.\n",
            peak_table(first),
        ]
    if remarks := list_of_remarks(results):
        parts += ["## Not timed\n", remarks]
    if record["warnings"]:
        parts += ["## Warnings\n", "".join(f"- {each}\n" for each in record["warnings"])]
    return "\n".join(parts)


def _label(result: Result) -> str:
    return f"{result.name}\nE = {_experts(result)}"


def finish(record: dict[str, Any], output: Path | None) -> int:
    """Prints the page of a record and writes it to a folder; returns the exit status."""
    results = [Result.of_json(each) for each in record["results"]]
    page = page_of(record, results)
    if output is None:
        print(page, end="")
    else:
        write_report(output, NAME, page, record, plot(results, record["environment"], _label))
    return report_wrong(results)


def versions() -> str:
    """Returns the version of transformers."""
    return f"transformers {importlib.metadata.version('transformers')}"


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=[*MODELS, "all"], default=DEFAULT_MODELS, metavar="MODEL"
    )
    dtypes = ["float32", "bfloat16"]
    parser.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1])
    parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS),
        help="the implementations of transformers to compare with",
    )  # fmt: skip
    parser.add_argument("--tokens", type=at_least(1), default=512, help="T of prefill and training")
    parser.add_argument("--rounds", type=at_least(2), default=3, help="maximum number of rounds")
    parser.add_argument(
        "--seconds",
        type=positive(finite=False),
        default=30.0,
        help="time limit for the rounds of a problem",
    )
    parser.add_argument(
        "--weights",
        type=positive(finite=False),
        default=3.0,
        help="GiB of a layer's weights in float32",
    )
    parser.add_argument(
        "--memory",
        type=positive(finite=False),
        default=2.0,
        help="GiB of weights that batched_mm may copy",
    )
    parser.add_argument(
        "--patience", type=positive(finite=False), default=10.0,
        help="seconds that an implementation may take in addition to the GEMMs",
    )  # fmt: skip
    parser.add_argument(
        "--keep-freed-memory", action="store_true", help="reuse freed memory (glibc)"
    )
    parser.add_argument("--output", type=Path, help="folder of the page, figures and plot")
    parser.add_argument(
        "--report", type=Path, nargs="+", help="merge the .json files of earlier runs"
    )
    args = parser.parse_args(arguments)
    if args.report:
        return finish(merged([json.loads(path.read_text()) for path in args.report]), args.output)
    models = list(MODELS) if "all" in args.models else args.models
    try:
        num_experts = {name: experts_that_fit(name, args.weights) for name in models}
    except ConfigError as error:
        parser.error(f"--{error}")
    require_package("--implementations", "moe_ext.integrations.transformers", "benchmark")
    if "bfloat16" in args.dtype:
        avoid_missing_amx()
    if args.keep_freed_memory:
        keep_freed_memory()
    torch.manual_seed(0)
    options = Options(
        args.threads,
        args.rounds,
        args.seconds,
        args.memory,
        args.patience,
        args.implementations,
        LONG_ON_CPU,
    )
    record: dict[str, Any] = {
        "environment": environment(),
        "versions": versions(),
        "arguments": options_as_text(args),
        "results": [],
        "warnings": [],
    }
    todo = [(name, getattr(torch, dtype)) for dtype in args.dtype for name in models]
    problem: Problem | None = None
    with warnings.catch_warnings(record=True) as caught:  # a warning says what moe_ext cannot run
        for name, dtype in progress(todo, "problems", "problem"):
            problem = None  # frees the weights first
            problem = Problem(name, num_experts[name], dtype, args.tokens)
            record["results"] += map(asdict, benchmark(name, problem, options))
            record["warnings"] = list(dict.fromkeys(str(each.message) for each in caught))
            if args.output:
                args.output.mkdir(parents=True, exist_ok=True)
                write_json(args.output / f"{NAME}.json", record)
    return finish(record, args.output)
