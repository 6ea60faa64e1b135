"""Measures how many bits of facts a layer stores with its parameters, at equal operations (Sec. 1).

    moe-lab study facts
    moe-lab study facts --seeds 1 --arms dense moe-4 moe-16
    moe-lab study facts --report

A fact is a random key and a random value, so that only memory can answer. A key is a vector of 16
normal numbers, a value one of 256 fixed random vectors. Seed and number of facts determine the
corpus. The layer maps the key to a vector, and the softmax of its products with the 256 vectors
predicts the value. Only the layer is trained. Of N facts, it stores these bits:

    N · (log2(256) - mean of -log2 p(value | key))          at least 0

A corpus has 2 bits for each parameter of its layer, more than the layer can store. The mixtures
have 4 to 1,024 experts in groups (App. B), with 2 experts in each of 2 groups for each fact. The
dense layer has as many operations as the largest mixture. An arm such as "moe-16 x2" has a corpus
of twice that size. One seed takes 3 minutes on an idle processor.
"""

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import FeedForwardExperts, HierarchicalNoisyTopKGate, MoE
from moe_lab.analysis.costs import moe_ops
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import as_percent, verdict
from moe_lab.experiments.page import Claims, Page, Plot, new_axes
from moe_lab.experiments.runs import PairedDifference, Run, Runs, mean_difference, number_of
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import Study
from moe_lab.markdown import markdown_table
from moe_lab.models.parts import evaluating
from moe_lab.progress import progress
from moe_lab.studies.entries import usual_options

NUM_EXPERTS = (4, 16, 64, 256, 1024)
DENSE, MIXTURES = "dense", tuple(f"moe-{number}" for number in NUM_EXPERTS)

# One mixture also learns corpora of other sizes, to show that the usual one exceeds its capacity.
SATURATION, SIZES = "moe-16", (0.25, 0.5, 2.0, 4.0)
MODELS = (DENSE, *MIXTURES)
ARMS = (*map(Arm, MODELS), *(Arm(SATURATION, times=size) for size in SIZES))

WIDTH = 16  # D, of a key and of a value's vector
VALUES = 256  # V, distinct values

# Hidden units of an expert and of the dense layer.
HIDDEN, DENSE_HIDDEN = 16, 160
K = 2  # each fact has 2 groups, and 2 experts in each group

# Every model has the same number of steps: a larger corpus has larger batches.
BATCHES, WARMUP, BETAS = 32, 100, (0.9, 0.99)
bits_of, num_parameters_of = number_of("bits"), number_of("parameters")
MARGIN = 0.15  # of "proportional", set before the runs
_AT_ONCE = 8_192  # facts in a batch of the evaluation


class FactsStudy(Study):
    name = "facts"
    own = usual_options("facts")
    models = MODELS
    usual = tuple(map(str, ARMS))
    arm_settings = ("times",)

    def settings(self) -> dict[str, Any]:
        torch.set_num_threads(1)
        return self.own_settings()

    def run(self, arm: Arm, seed: int) -> Run:
        return run_of(arm, seed, self.own_settings())

    def page(self, stored: Stored) -> Page | None:
        runs = stored.by_arm()
        compared = compared_mixtures(runs)
        if not compared:
            return None
        model_deviations = deviations(runs)
        rows = []
        for arm, arm_runs in runs.items():
            first, bits = next(iter(arm_runs.values())), arm_runs.mean(bits_of)
            rows.append(
                [
                    arm,
                    f"{first['ops_of_experts']:,} + {first['ops_of_gate']:,}",
                    f"{first['parameters']:,}",
                    f"{first['facts']:,}",
                    len(arm_runs),
                    f"{bits:,.0f}",
                    f"{bits / first['parameters']:.3f}",
                    as_percent(model_deviations.get(str(arm))),
                ]
            )
        header = [
            "layer", "operations of experts + gate", "parameters", "facts", "seeds",
            "bits stored", "bits per parameter", "against the mixtures' mean, 95%",
        ]  # fmt: skip
        claimed = claims(runs)
        parameters = [runs[Arm(model)].mean(num_parameters_of) for model in compared]
        return self.filled(
            stored,
            plot=plot(runs),
            values=VALUES,
            bits_of_fact=math.log2(VALUES),
            batches=BATCHES,
            layers=markdown_table(header, rows),
            compared=", ".join(compared),
            doublings=math.log2(max(parameters) / min(parameters)),
            claims=Claims(
                markdown_table(["claim", "compared", "value, 95%", "verdict"], claimed), claimed
            ),
            hours=sum(run["seconds"] for run in stored.runs) / 3600,
        )


class Facts(NamedTuple):
    keys: Tensor  # [N, D] normal numbers
    values: Tensor  # [N] int64, the index of each key's value
    vectors: Tensor  # [V, D], the fixed vector of each value


def make_facts(number: int, seed: int) -> Facts:
    """Makes random facts; the same seed gives the same facts."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(VALUES, WIDTH, generator=generator)
    keys = torch.randn(number, WIDTH, generator=generator)
    return Facts(keys, torch.randint(VALUES, (number,), generator=generator), vectors)


def make_layer(arm: str, logit_std: float) -> MoE | FeedForwardExperts:
    """Creates the layer of an arm, with torch's default generator.

    The noise of the gates has the deviation 0.69 at the start.
    """
    if arm == DENSE:
        return FeedForwardExperts(1, WIDTH, (DENSE_HIDDEN,))
    num_experts = int(arm.partition("-")[2])
    num_groups = math.isqrt(num_experts)
    gate = HierarchicalNoisyTopKGate(WIDTH, num_groups, num_experts // num_groups, K)
    # From zero, a gate would first select by noise alone, and a fact would change its experts.
    for weight in (gate.w_gate, gate.w_gate_secondary):
        nn.init.normal_(weight, std=logit_std * WIDTH**-0.5)
    return MoE(WIDTH, num_experts, K * K, gate=gate, hidden_sizes=(HIDDEN,))


def layer_ops(layer: MoE | FeedForwardExperts) -> tuple[int, int]:
    """Counts the multiply-adds of a fact in the experts and in the gate."""
    if isinstance(layer, MoE):
        count = moe_ops(layer)
        return count.experts, count.gate
    return sum(weight.numel() for weight in layer.parameters()), 0


def num_parameters(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def recalled(layer: MoE | FeedForwardExperts, keys: Tensor, vectors: Tensor) -> tuple[Tensor, Any]:
    """Returns the logits [N, V] of the values, and the weighted balancing losses."""
    if isinstance(layer, MoE):
        y, aux = layer(keys)
        return y @ vectors.T, aux.loss
    return layer(keys, None) @ vectors.T, 0.0


def stored_bits(layer: MoE | FeedForwardExperts, facts: Facts) -> float:
    """Computes the bits that the layer has stored of the facts, at least 0."""
    nats = 0.0
    with evaluating(layer), torch.inference_mode():
        for rows in torch.arange(len(facts.keys)).split(_AT_ONCE):
            logits, _ = recalled(layer, facts.keys[rows], facts.vectors)
            nats += float(F.cross_entropy(logits, facts.values[rows], reduction="sum"))
    return max(0.0, (len(facts.keys) * math.log(VALUES) - nats) / math.log(2))


def learn(
    layer: MoE | FeedForwardExperts, facts: Facts, settings: Mapping[str, Any], title: str
) -> None:
    """Trains the layer with Adam; the rate falls linearly to 0 after the warmup."""
    rate = settings["rate" if isinstance(layer, MoE) else "dense_rate"]
    optimizer = torch.optim.Adam(layer.parameters(), lr=rate, betas=BETAS, fused=True)
    steps = settings["epochs"] * BATCHES
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
    )
    for _ in progress(range(settings["epochs"]), title, "epochs"):
        for rows in torch.randperm(len(facts.keys)).chunk(BATCHES):
            logits, aux_loss = recalled(layer, facts.keys[rows], facts.vectors)
            loss = F.cross_entropy(logits, facts.values[rows]) + aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if not loss.isfinite():
            raise FloatingPointError(f"{title}: the loss is not finite")


def run_of(arm: Arm, seed: int, settings: Mapping[str, Any]) -> Run:
    """Trains the layer of an arm on its facts and measures what it has stored."""
    torch.manual_seed(seed)
    layer = make_layer(arm.model, settings["logit_std"])
    parameters = num_parameters(layer)
    number = round(arm.times * settings["bits"] * parameters / math.log2(VALUES))
    facts = make_facts(number, seed)
    learn(layer, facts, settings, f"{arm}-seed{seed}")
    experts, gate = layer_ops(layer)
    return {
        "facts": number,
        "parameters": parameters,
        "ops_of_experts": experts,
        "ops_of_gate": gate,
        "bits": stored_bits(layer, facts),
    }


def compared_mixtures(runs: Runs) -> list[str]:
    """Returns the mixtures with the most seeds; the runs of the others are not finished yet."""
    seeds = {model: len(runs[Arm(model)]) for model in MIXTURES}
    most = max(seeds.values())
    return [model for model, number in seeds.items() if number == most > 0]


def deviations(runs: Runs) -> dict[str, PairedDifference | None]:
    """Compares the bits per parameter of each of `compared_mixtures` with their mean.

    The relative deviations are over the seeds with which all these mixtures have stored anything.
    """
    runs_of_models = {model: runs[Arm(model)] for model in compared_mixtures(runs)}
    seeds = sorted(set.intersection(*map(set, runs_of_models.values()))) if runs_of_models else []
    density = {
        model: {seed: bits_of(arm_runs[seed]) / num_parameters_of(arm_runs[seed]) for seed in seeds}
        for model, arm_runs in runs_of_models.items()
    }
    means = {seed: statistics.fmean(bits[seed] for bits in density.values()) for seed in seeds}
    known = [seed for seed, mean in means.items() if mean]
    return {
        model: mean_difference([bits[seed] / means[seed] - 1 for seed in known])
        for model, bits in density.items()
    }


def log_bits(run: Run) -> float:
    return math.log(max(1.0, run["bits"]))  # a layer may store nothing


def claims(runs: Runs) -> list[list[str]]:
    """Returns the rows of the table of claims: claim, compared, value, verdict."""
    rows = [
        [
            "the bits are proportional to the parameters",
            f"{model} against the mean of the mixtures, within 15%",
            as_percent(gap),
            verdict(gap, -MARGIN, MARGIN),
        ]
        for model, gap in deviations(runs).items()
    ]
    for model in (model for model in MIXTURES if runs[Arm(model)] and runs[Arm(DENSE)]):
        ratio = runs[Arm(model)].minus(runs[Arm(DENSE)], log_bits)
        rows.append(
            [
                "a mixture stores more than a dense layer of no fewer operations",
                f"bits of {model} divided by those of {DENSE}",
                "" if ratio is None else ratio.text(lambda value: f"{math.exp(value):.2f}"),
                verdict(ratio, 0.0, math.inf),
            ]
        )
    return rows


def plot(runs: Runs) -> Plot:
    """Plots bits over parameters for all layers, and over the size of the corpus for one."""
    figure, (capacity, saturation) = new_axes(10, 4.2, columns=2)
    sizes = {  # parameters and bits of the layers
        arm.model: (arm_runs.mean(num_parameters_of), arm_runs.mean(bits_of))
        for arm, arm_runs in runs.items()
        if arm.times == 1
    }
    models = [model for model in MIXTURES if model in sizes]
    parameters, bits = zip(*(sizes[model] for model in models), strict=True)
    density = statistics.fmean(sizes[m][1] / sizes[m][0] for m in compared_mixtures(runs))
    line = [density * p for p in parameters]
    capacity.plot(parameters, line, "--", color="grey", label=f"{density:.2f} bits per parameter")
    capacity.fill_between(
        parameters,
        [(1 - MARGIN) * b for b in line],
        [(1 + MARGIN) * b for b in line],
        color="grey",
        alpha=0.2,
        label=f"within {100 * MARGIN:.0f}%",
    )
    capacity.plot(parameters, bits, "o", label="4 to 1,024 experts")
    for arm, p, b in zip(models, parameters, bits, strict=True):
        capacity.annotate(arm, (p, b), xytext=(4, -10), textcoords="offset points", fontsize=7)
    if DENSE in sizes:
        capacity.plot(*sizes[DENSE], "s", label="dense")
    capacity.set(xscale="log", yscale="log", xlabel="parameters", ylabel="bits stored")
    capacity.set_title("at most the dense layer's operations")
    capacity.legend()
    points = sorted(
        (arm_runs.mean(number_of("facts")) * math.log2(VALUES), arm_runs.mean(bits_of))
        for arm, arm_runs in runs.items()
        if arm.model == SATURATION
    )
    if points:
        offered, stored = zip(*points, strict=True)
        saturation.plot(offered, offered, "--", color="grey", label="all facts")
        saturation.plot(offered, stored, "o-", label=SATURATION)
        saturation.legend()
    saturation.set(xlabel="bits of all facts", ylabel="bits stored", ylim=(0, None))
    saturation.set_title("the corpus exceeds the capacity")
    return Plot("bits stored against parameters", figure)


run = FactsStudy.start
