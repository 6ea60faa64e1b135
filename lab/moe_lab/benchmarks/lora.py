"""Compares adapters (LoRA) of frozen experts on moe_ext with PEFT's own path on grouped_mm.

    pip install './lab[benchmark]' peft         # and transformers
    moe-lab benchmark lora                      # Qwen3-30B's layer, 1 thread
    moe-lab benchmark lora --dtype bfloat16 --rows 32 64 --output monday
    moe-lab benchmark lora --report */lora_speed.json

The problem is one experts layer of Qwen3-30B-A3B: transformers' own class, with random frozen
weights and random tokens. E is halved until the layer's weights fit into --weights GiB in float32;
the table shows both numbers ("64 of 128"). The adapters are those of PEFT, with --rank on both
parameters. A pass is forward and backward: the gradients of x, gates and all A and B.

    moe_ext      the layer of PEFT with experts_implementation="moe_ext" and the import of
                 moe_ext.integrations.peft: the operator gets A and B
    frozen       the layer without adapters on moe_ext: forward, and the gradients of x and gates
    grouped_mm   the layer of PEFT with grouped_mm of transformers: PEFT forms W + B A

The passes have uniform random routing with --rows rows for each expert on average. The limit is
that of moe-lab benchmark layer, for the operations and the bytes of the frozen pass and of the
products with A and B. Peak memory is that of torch's allocations in a call, without weights and
inputs. "on paper" is the size of the tensors that moe_ext needs at a time:

- the hidden layer before its activation, and y
- the gradients of the experts' input rows, of x, A and B
- B in the order of the operator, which differs from that of PEFT

Before any measurement, the command compares outputs and gradients with those of grouped_mm. Rounds
are interleaved and timed as in moe-lab benchmark layer. With --output, the command writes
lora_speed.md, .json and .png to a folder.
"""

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_lab.benchmarks import measurement
from moe_lab.benchmarks.harness import Quartiles, Row
from moe_lab.benchmarks.measurement import Extra, Stacked, by
from moe_lab.benchmarks.peers import random_routing
from moe_lab.benchmarks.roofline import Work
from moe_lab.benchmarks.shapes import MODELS, Shape
from moe_lab.benchmarks.tables import cell, list_of_remarks, percent_of_limit, place, plot
from moe_lab.benchmarks.transformers_experts import build_layer
from moe_lab.markdown import markdown_table
from moe_lab.packages import require_transformers

NAME = "lora_speed"
COMMAND = "moe-lab benchmark lora --output docs/results"
MODEL, OURS, FROZEN, PEER = "qwen3_moe", "ours", "frozen", "grouped_mm"
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj"]


class Problem:
    """An experts layer with adapters of PEFT, and the inputs of every pass.

    Args:
        num_experts: the number of experts.
        dtype: of the weights, the adapters and x.
        rows: the mean numbers of rows of an expert, one for each pass.
        rank: of the adapters.
    """

    beside, has_peak, device, activation = (FROZEN,), True, "cpu", "swiglu"

    def __init__(
        self, num_experts: int, dtype: torch.dtype, rows: Sequence[int], rank: int
    ) -> None:
        peft: Any = require_transformers("--dtype", "peft", "benchmark")
        model = MODELS[MODEL]
        self.dtype, self.hidden, self.rank = dtype, model.intermediate_size, rank
        self.layer = build_layer(MODEL, num_experts, dtype).requires_grad_(False)
        self.config: Any = self.layer.config
        holder = nn.Module()
        holder.experts = self.layer
        options = {"target_modules": [], "target_parameters": PARAMETERS, "r": rank}
        lora = peft.LoraConfig(**options, init_lora_weights=False)
        adapted = peft.get_peft_model(holder, lora, autocast_adapter_dtype=False)
        self.adapted: nn.Module = adapted.base_model.model.experts
        self.adapters = [p for p in adapted.parameters() if p.requires_grad]
        self.passes = {f"{each} rows": each * num_experts // model.k for each in rows}
        tokens = max(self.passes.values())
        self.shape = Shape(tokens, num_experts, model.k, model.hidden_size, model.intermediate_size)
        self.inputs = {name: self._step(tokens) for name, tokens in self.passes.items()}
        self.used_experts = num_experts

    def _step(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns x, the experts of each token, their gates and the gradient of y."""
        shape = self.shape._replace(tokens=tokens)
        x, upstream = (torch.randn(tokens, shape.d_model).to(self.dtype) for _ in range(2))
        gates = torch.randn(tokens, shape.k).softmax(dim=-1).to(self.dtype)
        return x.requires_grad_(), random_routing(shape), gates.requires_grad_(), upstream

    def work(self, which: str) -> Work:
        """Returns the work of a pass: W twice, A and B three times for each row."""
        rows = self.passes[which] * self.shape.k
        weights = 3 * self.shape.d_model * self.hidden
        thin = sum(each.numel() for each in self.adapters) / self.shape.num_experts
        moved = self.dtype.itemsize * 2 * self.shape.num_experts * (weights + thin)
        return Work(2 * rows * (2 * weights + 3 * thin), moved)

    def paper_mib(self, which: str) -> float:
        """Returns the memory of the tensors that the help lists."""
        (_, _, k, width, hidden, _), tokens = self.shape, self.passes[which]
        rows = tokens * k * (2 * hidden + width)
        adapters = sum(each.numel() for each in self.adapters)
        second = sum(each.numel() for each in self.adapters[1::2])  # B
        return self.dtype.itemsize * (rows + 2 * tokens * width + adapters + second) / 2**20

    def extra(self, implementation: str, which: str) -> Extra:
        weights = sum(each.nbytes for each in self.layer.parameters())
        return Extra(memory=3 * weights if implementation == PEER else 0)

    def call(self, implementation: str, which: str) -> Callable[[], object]:
        return partial(self.results, implementation, which)

    def results(self, implementation: str, which: str) -> Mapping[str, Stacked]:
        """Runs a pass with an implementation; returns y and the gradients by name."""
        x, index, gates, upstream = self.inputs[which]
        self.config._experts_implementation = PEER if implementation == PEER else "moe_ext"
        y = (self.layer if implementation == FROZEN else self.adapted)(x, index, gates)
        leaves = [x, gates, *([] if implementation == FROZEN else self.adapters)]
        dx, dgates, *rest = torch.autograd.grad(y, leaves, upstream)
        named = {f"gradient {i} of the adapters": grad for i, grad in enumerate(rest)}
        return {"y": [y.detach()], "dx": [dx], "dgates": [dgates]} | {
            name: [grad] for name, grad in named.items()
        }


def run(args: Any) -> int:
    return measurement.run_page(
        args,
        NAME,
        _measure,
        page_of,
        lambda record, results: plot(results, record["environment"], lambda result: result.name),
    )


def _measure(args: Any) -> dict[str, Any]:
    """Measures the layer in each dtype; returns the record of the run."""
    require_transformers("--dtype", "moe_ext.integrations.peft", "benchmark")
    args.device, args.minutes = "cpu", None
    todo = [
        (
            MODEL,
            f"{MODEL}, {dtype}",
            partial(Problem, args.num_experts, getattr(torch, dtype), *how),
        )
        for dtype in args.dtype
        for how in [(args.rows, args.rank)]
    ]

    def examine(name: str, problem: Problem, record: dict[str, Any]) -> None:
        for result in measurement.measure(name, problem, [PEER], args):
            result["rank"] = problem.rank
            result["paper_mib"] = {which: problem.paper_mib(which) for which in problem.passes}
            record["results"].append(result)

    packages = ("transformers", "peft")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return measurement.measure_all(todo, examine, args, versions=versions)


def _table(group: Sequence[Row]) -> str:
    """Formats the results of one dtype and number of threads; a line for each pass."""
    lines = []
    for result in group:
        of_model = MODELS[MODEL].num_experts
        experts = result.shape.num_experts
        for which, limit_ms in result.limit_ms.items():
            ours, frozen = (result.figures[name][which] for name in (OURS, FROZEN))
            lines.append(
                [
                    *(f"{experts}" if experts == of_model else f"{experts} of {of_model}", which),
                    *(f"{Quartiles(*ours['ms']):.4g}", f"{limit_ms:.4g}", percent_of_limit(ours)),
                    f"{frozen['ms'][1]:.4g} ({1 / frozen['ratio_to_ours'][1]:.2f})",
                    cell(result, PEER, which, lambda found: f"{found['ms'][1]:.4g}"),
                ]
            )
    header = ["E", "rows of an expert", "moe_ext, ms", "limit, ms", "% of limit"]
    return markdown_table([*header, "frozen, ms (moe_ext / frozen)", "grouped_mm, ms"], lines)


def _memory_table(group: Sequence[Row]) -> str:
    names = (OURS, FROZEN, PEER)
    lines = []
    for result in group:
        for which, paper in result.paper_mib.items():
            found = [result.peak_mib.get(name, {}).get(which) for name in names]
            sizes = ["–" if size is None else f"{size:,.0f}" for size in found]
            lines.append([which, *sizes, f"{paper:,.0f}"])
    return markdown_table(["rows of an expert", "moe_ext", FROZEN, PEER, "on paper"], lines)


def page_of(record: dict[str, Any], results: Sequence[Row]) -> str:
    """Formats the page of a run, or of several merged runs."""
    occasions = max(result.occasions for result in results)
    runs = f"medians over up to {occasions} runs (minimum-maximum)"
    spread = runs if occasions > 1 else "medians over the rounds (quartiles)"
    parts = [
        "# Adapters of frozen experts\n",
        f"```\n{COMMAND}\n```\n",
        f"{record['environment']}; {record['versions']}\n",
        f"Forward and backward of the experts of Qwen3-30B-A3B with adapters of rank "
        f"{results[0].rank}. `--help` explains the implementations and the columns. Figures are "
        f"{spread}. In brackets after grouped_mm is its time divided by the time of moe_ext.\n",
    ]
    for (dtype, threads), group in by(results, lambda r: (r.dtype, r.threads)).items():
        gflops = max(result.gemm_gflops for result in group)
        gbytes = max(result.stream_gbytes for result in group)
        peaks = f"GEMM peak {gflops:.0f} GF/s, stream {gbytes:.1f} GB/s.\n"
        parts += [f"## {dtype}, {place(threads)}\n", peaks, _table(group)]
    for dtype, group in by(results, lambda result: result.dtype).items():
        first = [result for result in group if result.threads == group[0].threads]
        what = "MiB without weights and inputs.\n"
        parts += [f"## Peak memory, {dtype}\n", what, _memory_table(first)]
    if remarks := list_of_remarks(results):
        parts += ["## Not timed\n", remarks]
    return "\n".join(parts)
