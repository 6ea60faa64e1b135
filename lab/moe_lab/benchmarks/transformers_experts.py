"""Compares the experts of transformers' models on moe_ext with transformers' implementations.

    pip install './lab[benchmark]'              # transformers
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

Before any measurement, the command compares outputs and gradients of the other implementations with
those of moe_ext. Rounds are interleaved and timed as in moe-lab benchmark layer, whose help
explains "~", "–" and figures of several runs. Each round calls an implementation twice and times
the second call.

- batched_mm copies the weights of the experts for every token. It is not timed if the copies need
  more than --memory GiB.
- In backward, eager creates a gradient of all weights for each expert. It is not timed if these
  gradients need more than --patience seconds.
- Peak memory is that of torch's allocations in one call, without weights and inputs.

With --output, the command writes transformers_experts.md, .json and .png to a folder.
"""

import importlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_lab.benchmarks import measurement, tables
from moe_lab.benchmarks.harness import Row
from moe_lab.benchmarks.measurement import Extra, Stacked, best_ratio
from moe_lab.benchmarks.peers import Inputs, hf_extra
from moe_lab.benchmarks.roofline import Work, experts_work
from moe_lab.benchmarks.shapes import MODELS, Shape, experts_of_model
from moe_lab.benchmarks.tables import number, spread_of
from moe_lab.experiments.page import Page
from moe_lab.packages import require_transformers

NAME = "transformers_experts"
MOE_EXT = "moe_ext"  # the name in transformers' registry


def run(args: Any) -> int:
    return measurement.run_page(args, NAME, _measure, page_of)


def _measure(args: Any) -> dict[str, Any]:
    require_transformers("--implementations", "moe_ext.integrations.transformers")
    args.device, args.minutes = "cpu", None
    todo = [
        (name, name, partial(Problem, name, num_experts, getattr(torch, dtype), args.tokens))
        for dtype in args.dtype
        for name, num_experts in args.num_experts.items()
    ]

    def examine(name: str, problem: "Problem", record: dict[str, Any]) -> None:
        record["results"] += measurement.measure(name, problem, args.implementations, args)
        record["warnings"] = list(dict.fromkeys(str(warning.message) for warning in caught))

    version = measurement.versions_of("transformers")
    with warnings.catch_warnings(record=True) as caught:  # a warning says what moe_ext cannot run
        return measurement.measure_all(todo, examine, args, versions=version, warnings=[])


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


def build_layer(name: str, num_experts: int, dtype: torch.dtype) -> nn.Module:
    """Builds transformers' experts layer of a model with random weights."""
    model = MODELS[name]
    modules = f"transformers.models.{name}"
    modeling = require_transformers("--models", f"{modules}.modeling_{name}")
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


class Problem(measurement.LayerProblem):
    """An experts layer of a model with random weights, and the inputs of every task."""

    passes, has_peak = tuple(TASKS), True

    def __init__(self, name: str, num_experts: int, dtype: torch.dtype, tokens: int) -> None:
        model = MODELS[name]
        self.shape = Shape(tokens, num_experts, model.k, model.hidden_size, model.intermediate_size)
        self.activation, self.hidden, self.dtype = model.activation, model.intermediate_size, dtype
        self.layer = build_layer(name, num_experts, dtype)
        self.config: Any = self.layer.config
        large = Inputs.draw(self.shape, dtype)
        self.steps = {
            name: [self._few(task.tokens) for _ in range(task.steps)] if task.tokens else [large]
            for name, task in TASKS.items()
        }
        self.used_experts = large.used_experts

    def _few(self, tokens: int) -> Inputs:
        return Inputs.draw(self.shape._replace(tokens=tokens), self.dtype)

    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.layer.parameters())

    def work(self, task_name: str) -> Work:
        task, d, itemsize = TASKS[task_name], self.shape.d_model, self.dtype.itemsize
        flops, moved = 0.0, 0.0
        for step in self.steps[task_name]:
            tokens, rows, used = len(step.x), step.expert_index.numel(), step.used_experts
            sizes = (tokens, rows, used, self.shape.num_experts, d, self.hidden)
            step_work = experts_work(*sizes, gated=True, itemsize=itemsize)[task.backward]
            weights = 2 * d * self.hidden if task.recompute else 0
            flops += step_work.flops + 2 * rows * weights
            moved += step_work.bytes + itemsize * (tokens * d * task.recompute + used * weights)
        return Work(flops, moved)

    def extra(self, implementation: str, task_name: str) -> Extra:
        index = self.steps[task_name][0].expert_index
        return hf_extra(implementation, self, TASKS[task_name].backward, index)

    def results(self, implementation: str, task_name: str) -> Mapping[str, Stacked]:
        """Runs a task with an implementation; returns outputs and gradients by name."""
        task, steps = TASKS[task_name], self.steps[task_name]
        self.config._experts_implementation = (
            MOE_EXT if implementation == "ours" else implementation
        )
        if not task.backward:
            with torch.no_grad():
                return {"y": [self.layer(*step[:3]) for step in steps]}
        (step,) = steps
        forward = partial(checkpoint, self.layer, use_reentrant=False)
        y = (forward if task.recompute else self.layer)(*step[:3])
        names, parameters = zip(*self.layer.named_parameters(), strict=True)
        inputs = [step.x, step.gates, *parameters]
        dx, dgates, *grads = torch.autograd.grad(y, inputs, step.upstream, materialize_grads=True)
        return {"y": [y.detach()], "dx": [dx], "dgates": [dgates]} | {
            f"gradient of {name}": grad for name, grad in zip(names, grads, strict=True)
        }


def _label(result: Row) -> str:
    return f"{result.name}\nE = {experts_of_model(result.shape, result.name)}"


def _rows_of_expert(result: Row, task: str) -> str:
    tokens, shape = TASKS[task].tokens or result.shape.tokens, result.shape
    return f"{tokens * shape.k / shape.num_experts:.3g}"


def _time_table(group: Sequence[Row]) -> str:
    """Formats the results of one dtype and number of threads."""
    columns: dict[str, tables.Column] = {
        "model": lambda result, _: result.name,
        "E": lambda result, _: experts_of_model(result.shape, result.name),
        "task": lambda _, task: task,
        "T·k/E": _rows_of_expert,
        **tables.MOE_EXT_TIMES,
    }
    peers = list(dict.fromkeys(name for result in group for name in result.figures))[1:]
    columns |= {name: tables.ms_of(name) for name in peers}
    columns["best / moe_ext"] = lambda result, task: number(best_ratio(result, task), ".2f")
    return tables.pass_table(columns, group)


def page_of(record: dict[str, Any], results: Sequence[Row]) -> Page:
    about = (
        "`--help` has the sources of the sizes, and explains tasks and columns. Figures are "
        f"{spread_of(results)}. The time of another implementation is in ms; in brackets is this "
        "time divided by the time of moe_ext. T·k/E is the mean number of rows of an expert. The "
        "time of a decode task is that of 10 passes."
    )
    sections = tables.time_sections(results, _time_table)
    sections += tables.memory_sections(results, tables.peak_table)
    sections += tables.list_section("Not timed", tables.remarks_of(results))
    sections += tables.list_section("Warnings", record["warnings"])
    figure = tables.plot(results, record["environment"], _label)
    title = "The experts of transformers' models"
    return tables.page_of_run(title, record, about, figure, sections)
