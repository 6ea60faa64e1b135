"""Compares adapters (LoRA) of frozen experts on moe_ext with PEFT's own path on grouped_mm.

    pip install './lab[benchmark]' peft         # and transformers
    moe-lab benchmark lora                      # Qwen3-30B's layer, 1 thread
    moe-lab benchmark lora --dtype bfloat16 --rows 32 64 --output monday
    moe-lab benchmark lora --report */lora_speed.json

The problem is one experts layer of Qwen3-30B-A3B: transformers' own class, with random frozen
weights and random tokens. E is halved until the layer's weights fit into --weights GiB in float32;
the table shows both numbers ("64 of 128"). The adapters have --rank in both layers. A pass is
forward and backward: the gradients of x, gates and all A and B.

    moe_ext      ops.experts with A and B, as `moe_ext.LoRAExperts` calls it
    frozen       ops.experts without adapters: forward, and the gradients of x and gates
    PEFT         the layer of PEFT with experts_implementation="moe_ext" and the import of
                 moe_ext.integrations.peft: the operator gets A and B, in another order
    grouped_mm   the layer of PEFT with grouped_mm of transformers: PEFT forms W + B A

The passes have uniform random routing with --rows rows for each expert on average. The limit is
that of moe-lab benchmark layer, for the operations and the bytes of the frozen pass and of the
products with A and B. The GEMM peak is that of torch.mm or ops.experts, whichever is faster. Peak
memory is that of torch's allocations in a call, without weights and inputs. "on paper" is the size
of the tensors that moe_ext needs at a time:

- the hidden layer before its activation, and y
- the gradients of the experts' input rows, of x, A and B

Before any measurement, the command compares outputs and gradients with those of PEFT. Rounds are
interleaved and timed as in moe-lab benchmark layer. With --output, the command writes
lora_speed.md, .json and .png to a folder.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_lab.benchmarks import measurement, tables
from moe_lab.benchmarks.harness import Row
from moe_lab.benchmarks.measurement import Extra, Stacked
from moe_lab.benchmarks.peers import Inputs
from moe_lab.benchmarks.roofline import Work, peak_probe
from moe_lab.benchmarks.shapes import MODELS, Shape, experts_of_model
from moe_lab.benchmarks.transformers_experts import build_layer
from moe_lab.experiments.page import Page
from moe_lab.packages import require_transformers

NAME = "lora_speed"
MODEL = "qwen3_moe"
MOE_EXT, FROZEN, PEFT, PEER = "ours", "frozen", "PEFT", "grouped_mm"
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


class Problem(measurement.LayerProblem):
    """An experts layer with adapters of PEFT, and the inputs of every pass.

    `dtype` is that of the weights, the adapters and x. Each of `rows` is the mean number of rows of
    an expert in a pass.
    """

    beside, has_peak = (FROZEN,), True
    passes: Mapping[str, int]  # the tokens of each pass

    def __init__(
        self, num_experts: int, dtype: torch.dtype, rows: Sequence[int], rank: int
    ) -> None:
        peft: Any = require_transformers("--dtype", "peft")
        model = MODELS[MODEL]
        self.dtype, self.hidden, self.rank = dtype, model.intermediate_size, rank
        self.layer: Any = build_layer(MODEL, num_experts, dtype).requires_grad_(False)
        self.config: Any = self.layer.config
        holder = nn.Module()
        holder.experts = self.layer
        options = {"target_modules": [], "target_parameters": PARAMETERS, "r": rank}
        lora = peft.LoraConfig(**options, init_lora_weights=False)
        adapted = peft.get_peft_model(holder, lora, autocast_adapter_dtype=False)
        self.adapted: Any = adapted.base_model.model.experts
        wrappers = [self.adapted.base_layer, self.adapted]
        self.peft_weights = [w for wrapper in wrappers for w in _weights_of(wrapper)]
        self.own = [weight.requires_grad_() for weight in self._in_own_order(self.peft_weights)]
        self.scale: float = self.adapted.scaling["default"]
        self.passes = {f"{count} rows": count * num_experts // model.k for count in rows}
        tokens = max(self.passes.values())
        self.shape = Shape(tokens, num_experts, model.k, model.hidden_size, model.intermediate_size)
        self.inputs = {
            name: Inputs.draw(self.shape._replace(tokens=tokens), dtype)
            for name, tokens in self.passes.items()
        }
        self.used_experts = num_experts

    def _in_own_order(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Converts A [E · r, fan_in], B [width, r · E] of PEFT to [E, fan_in, r], [E, r, width]."""
        rank, first, second = self.rank, values[0::2], values[1::2]
        count = len(first[0]) // rank
        pairs = [
            (a.detach().view(count, rank, -1).mT, b.detach().view(-1, rank, count).permute(2, 1, 0))
            for a, b in zip(first, second, strict=True)
        ]
        return [weight.contiguous() for pair in pairs for weight in pair]

    def work(self, which: str) -> Work:
        """Returns the work of a pass: W twice, A and B three times for each row."""
        rows = self.passes[which] * self.shape.k
        weights = 3 * self.shape.d_model * self.hidden
        thin = sum(weight.numel() for weight in self.own) / self.shape.num_experts
        moved = self.dtype.itemsize * 2 * self.shape.num_experts * (weights + thin)
        return Work(2 * rows * (2 * weights + 3 * thin), moved)

    def paper_mib(self, which: str) -> float:
        """Returns the memory of the tensors that the help lists."""
        (_, _, k, width, hidden, _), tokens = self.shape, self.passes[which]
        rows = tokens * k * (2 * hidden + width)
        adapters = sum(weight.numel() for weight in self.own)
        return self.dtype.itemsize * (rows + 2 * tokens * width + adapters) / 2**20

    def extra(self, implementation: str, which: str) -> Extra:
        weights = sum(parameter.nbytes for parameter in self.layer.parameters())
        return Extra(memory=3 * weights if implementation == PEER else 0)

    def call(self, implementation: str, which: str) -> Callable[[], object]:
        return partial(self._run, implementation, which)

    def results(self, implementation: str, which: str) -> Mapping[str, Stacked]:
        """Runs a pass with an implementation; returns y and the gradients by name."""
        y, dx, dgates, *rest = self._run(implementation, which)
        if implementation in (PEFT, PEER):
            rest = self._in_own_order(rest)
        named = {f"gradient {i} of the adapters": [grad] for i, grad in enumerate(rest)}
        return {"y": [y], "dx": [dx], "dgates": [dgates]} | named

    def _run(self, implementation: str, which: str) -> list[Tensor]:
        x, index, gates, upstream = self.inputs[which]
        adapters: list[Tensor] = []
        if implementation in (PEFT, PEER):
            self.config._experts_implementation = "moe_ext" if implementation == PEFT else PEER
            y, adapters = self.adapted(x, index, gates), self.peft_weights
        else:
            plan = ops.dispatch_plan(index, self.shape.num_experts)
            lora = None
            if implementation == MOE_EXT:
                adapters = self.own
                pairs = zip(adapters[0::2], adapters[1::2], strict=True)
                lora = [ops.LoRA(a, b, self.scale) for a, b in pairs]
            weights = [self.layer.gate_up_proj.mT, self.layer.down_proj.mT]
            options: Any = {"offsets": plan.offsets, "inverse": plan.inverse, "gates": gates}
            y = ops.experts(x, weights, activation="swiglu", lora=lora, **options)
        return [y.detach(), *torch.autograd.grad(y, [x, gates, *adapters], upstream)]


def _weights_of(wrapper: Any) -> list[Tensor]:
    return [layer["default"].weight for layer in (wrapper.lora_A, wrapper.lora_B)]


def run(args: Any) -> int:
    return measurement.run_page(args, NAME, _measure, page_of)


def _measure(args: Any) -> dict[str, Any]:
    require_transformers("--dtype", "moe_ext.integrations.peft")
    args.device, args.minutes = "cpu", None
    todo = [
        (
            MODEL,
            f"{MODEL}, {dtype}",
            partial(Problem, args.num_experts, getattr(torch, dtype), args.rows, args.rank),
        )
        for dtype in args.dtype
    ]

    def examine(name: str, problem: Problem, record: dict[str, Any]) -> None:
        gemm = peak_probe(problem.dtype, args.threads[0])
        for result in measurement.measure(name, problem, [PEFT, PEER], args, gemm):
            result["rank"] = problem.rank
            result["paper_mib"] = {which: problem.paper_mib(which) for which in problem.passes}
            record["results"].append(result)

    versions = measurement.versions_of("transformers", "peft")
    return measurement.measure_all(todo, examine, args, versions=versions)


def _frozen(result: Row, which: str) -> str:
    figures = result.figures[FROZEN][which]
    return f"{figures['ms'][1]:.4g} ({1 / figures['ratio_to_ours'][1]:.2f})"


TIMES: dict[str, tables.Column] = {
    "E": lambda result, _: experts_of_model(result.shape, MODEL),
    "rows of an expert": lambda _, which: which,
    **tables.MOE_EXT_TIMES,
    "frozen, ms (moe_ext / frozen)": _frozen,
    "PEFT, ms": tables.ms_of(PEFT),
    "grouped_mm, ms": tables.ms_of(PEER),
}
MEMORY: dict[str, tables.Column] = {
    "rows of an expert": lambda _, which: which,
    "moe_ext": tables.peak_of(MOE_EXT, ",.0f"),
    **{name: tables.peak_of(name, ",.0f") for name in (FROZEN, PEFT, PEER)},
    "on paper": lambda result, which: f"{result.paper_mib[which]:,.0f}",
}


def page_of(record: dict[str, Any], results: Sequence[Row]) -> Page:
    about = (
        "Forward and backward of the experts of Qwen3-30B-A3B with adapters of rank "
        f"{results[0].rank}. `--help` explains the implementations and the columns. Figures are "
        f"{tables.spread_of(results)}. In brackets after a time of PEFT is this time divided by "
        "that of moe_ext."
    )
    sections = tables.time_sections(results, partial(tables.pass_table, TIMES))
    sections += tables.memory_sections(results, partial(tables.pass_table, MEMORY))
    sections += tables.list_section("Not timed", tables.remarks_of(results))
    figure = tables.plot(results, record["environment"], lambda result: result.name)
    return tables.page_of_run("Adapters of frozen experts", record, about, figure, sections)
