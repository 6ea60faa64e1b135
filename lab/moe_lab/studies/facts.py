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
dense layer has as many operations as the largest mixture.

One seed takes 3 minutes on an idle processor. The file OUTPUT/facts.json (default: runs/results)
keeps every finished run; the same command continues the study. To share the runs, start the command
several times. The script also writes facts.md and facts.png. --report writes them without training.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import FeedForwardExperts, HierarchicalNoisyTopKGate, MoE
from moe_lab.analysis.costs import moe_ops
from moe_lab.cli import add_output, add_seeds, at_least, make_parser, positive
from moe_lab.experiments.report import markdown_table
from moe_lab.experiments.statistics import PairedDifference, mean_difference
from moe_lab.experiments.stored import Report, Run, Stored, report_stored, run_missing
from moe_lab.experiments.study import verdict
from moe_lab.models.parts import evaluating
from moe_lab.progress import progress

WIDTH = 16  # D, of a key and of a value's vector
VALUES = 256  # V, distinct values

# Hidden units of an expert and of the dense layer.
HIDDEN, DENSE_HIDDEN = 16, 160

# Each fact has 2 groups, and 2 experts in each group.
K = 2
NUM_EXPERTS = (4, 16, 64, 256, 1024)
DENSE, MIXTURES = "dense", tuple(f"moe-{number}" for number in NUM_EXPERTS)

# One mixture also learns corpora of other sizes, to show that the usual one exceeds its capacity.
SATURATION, SIZES = "moe-16", (0.25, 0.5, 2.0, 4.0)
ARMS = (DENSE, *MIXTURES, *(f"{SATURATION} x{size:g}" for size in SIZES))

# Every model has the same number of steps: a larger corpus has larger batches.
BATCHES, WARMUP, BETAS = 32, 100, (0.9, 0.99)
MARGIN = 0.15  # of "proportional", set before the runs
_AT_ONCE = 8_192  # facts in a batch of the evaluation


class Settings(NamedTuple):
    """Options that all runs share.

    Attributes:
        bits: bits of the facts for each parameter of the layer.
        epochs: number of epochs.
        logit_std: standard deviation of the gates' logits at the start. The standard deviation of
            their noise is Softplus(0) = 0.69 at the start.
        rate: peak learning rate of the mixtures.
        dense_rate: peak learning rate of the dense layer.
    """

    bits: float = 2.0
    epochs: int = 50
    logit_std: float = 3.0
    rate: float = 0.03
    dense_rate: float = 0.015


class Facts(NamedTuple):
    """A corpus of facts.

    Attributes:
        keys: [N, D] normal numbers.
        values: [N] int64, the index of each key's value.
        vectors: [V, D], the fixed vector of each value.
    """

    keys: Tensor
    values: Tensor
    vectors: Tensor


def make_facts(number: int, seed: int) -> Facts:
    """Makes random facts; the same seed gives the same facts."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(VALUES, WIDTH, generator=generator)
    keys = torch.randn(number, WIDTH, generator=generator)
    return Facts(keys, torch.randint(VALUES, (number,), generator=generator), vectors)


def make_layer(arm: str, logit_std: float) -> MoE | FeedForwardExperts:
    """Creates the layer of an arm, with torch's default generator; see `Settings`."""
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


def learn(layer: MoE | FeedForwardExperts, facts: Facts, settings: Settings, title: str) -> None:
    """Trains the layer with Adam; the rate falls linearly to 0 after the warmup.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    rate = settings.rate if isinstance(layer, MoE) else settings.dense_rate
    optimizer = torch.optim.Adam(layer.parameters(), lr=rate, betas=BETAS, fused=True)
    steps = settings.epochs * BATCHES
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - step / steps)
    )
    for _ in progress(range(settings.epochs), title, "epochs"):
        for rows in torch.randperm(len(facts.keys)).chunk(BATCHES):
            logits, aux_loss = recalled(layer, facts.keys[rows], facts.vectors)
            loss = F.cross_entropy(logits, facts.values[rows]) + aux_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if not loss.isfinite():
            raise FloatingPointError(f"{title}: the loss is not finite")


def arm_and_size(name: str) -> tuple[str, float]:
    """Splits the name of an arm, such as "moe-16 x0.5", into layer and relative size."""
    arm, _, size = name.partition(" x")
    return arm, float(size or 1)


def run_of(name: str, seed: int, settings: Settings) -> Run:
    """Trains the layer of an arm on its facts and measures what it has stored.

    Args:
        name: the name of the arm.
        seed: seed of the facts, the weights, the order of the facts and the gate's noise.
        settings: the options of the study.
    """
    arm, size = arm_and_size(name)
    torch.manual_seed(seed)
    layer = make_layer(arm, settings.logit_std)
    parameters = num_parameters(layer)
    number = round(size * settings.bits * parameters / math.log2(VALUES))
    facts = make_facts(number, seed)
    learn(layer, facts, settings, f"{name}-seed{seed}")
    experts, gate = layer_ops(layer)
    return {
        "facts": number,
        "parameters": parameters,
        "ops_of_experts": experts,
        "ops_of_gate": gate,
        "bits": stored_bits(layer, facts),
    }


Table = dict[str, dict[int, Run]]  # the finished runs by arm and seed


def by_arm(runs: Sequence[Run]) -> Table:
    table: Table = {}
    for run in runs:
        table.setdefault(run["arm"], {})[run["seed"]] = run
    return table


def mean_of(runs: dict[int, Run], key: str) -> float:
    return statistics.fmean(run[key] for run in runs.values())


def compared_mixtures(table: Table) -> list[str]:
    """Returns the mixtures with the most seeds; the runs of the others are not finished yet."""
    found = [arm for arm in MIXTURES if arm in table]
    most = max((len(table[arm]) for arm in found), default=0)
    return [arm for arm in found if len(table[arm]) == most]


def deviations(table: Table) -> dict[str, PairedDifference | None]:
    """Compares the bits per parameter of each of `compared_mixtures` with their mean.

    Returns:
        By arm, the relative deviation as a fraction, over the seeds that all these mixtures have
        and with which they have stored anything.
    """
    arms = compared_mixtures(table)
    seeds = sorted(set.intersection(*(set(table[arm]) for arm in arms))) if arms else []

    def density(arm: str, seed: int) -> float:
        return float(table[arm][seed]["bits"] / table[arm][seed]["parameters"])

    means = {seed: statistics.fmean(density(arm, seed) for arm in arms) for seed in seeds}
    known = [seed for seed, mean in means.items() if mean]
    return {
        arm: mean_difference([density(arm, seed) / means[seed] - 1 for seed in known])
        for arm in arms
    }


def log_bits(run: Run) -> float:
    """Returns ln of the stored bits, at least 0, so that a layer may store nothing."""
    return math.log(max(1.0, run["bits"]))


def claims(table: Table) -> list[list[str]]:
    """Returns the rows of the table of claims: claim, compared, value, verdict."""
    rows = []
    for arm, gap in deviations(table).items():
        rows.append(
            [
                "the bits are proportional to the parameters",
                f"{arm} against the mean of the mixtures, within 15%",
                _percent(gap),
                verdict(gap, -MARGIN, MARGIN),
            ]
        )
    if DENSE in table:
        for arm in (arm for arm in MIXTURES if arm in table):
            seeds = sorted(table[arm].keys() & table[DENSE].keys())
            ratio = mean_difference(
                [log_bits(table[arm][seed]) - log_bits(table[DENSE][seed]) for seed in seeds]
            )
            shown = "" if ratio is None else ratio.text(lambda value: f"{math.exp(value):.2f}")
            rows.append(
                [
                    "a mixture stores more than a dense layer of no fewer operations",
                    f"bits of {arm} divided by those of {DENSE}",
                    shown,
                    verdict(ratio, 0.0, math.inf),
                ]
            )
    return rows


def _percent(gap: PairedDifference | None) -> str:
    return "" if gap is None else gap.text(lambda value: f"{100 * value:+.1f}", "%")


def as_markdown(
    table: Table, settings: Settings, claimed: Sequence[Sequence[str]], command: str
) -> str:
    """Formats the page: plot, table, verdicts, command."""
    of_mean = deviations(table)
    rows = []
    for arm in (arm for arm in ARMS if arm in table):
        runs = table[arm]
        first = next(iter(runs.values()))
        rows.append(
            [
                arm,
                f"{first['ops_of_experts']:,} + {first['ops_of_gate']:,}",
                f"{first['parameters']:,}",
                f"{first['facts']:,}",
                len(runs),
                f"{mean_of(runs, 'bits'):,.0f}",
                f"{mean_of(runs, 'bits') / first['parameters']:.3f}",
                _percent(of_mean.get(arm)),
            ]
        )
    sizes = markdown_table(
        [
            "layer", "operations of experts + gate", "parameters", "facts", "seeds",
            "bits stored", "bits per parameter", "against the mixtures' mean, 95%",
        ],
        rows,
    )  # fmt: skip
    verdicts = markdown_table(["claim", "compared", "value, 95%", "verdict"], claimed)
    compared = compared_mixtures(table)
    parameters = [next(iter(table[arm].values()))["parameters"] for arm in compared]
    doublings = math.log2(max(parameters) / min(parameters))
    seconds = sum(run["seconds"] for runs in table.values() for run in runs.values())
    return (
        "# Bits of facts that experts store\n\n"
        "![bits stored against parameters](facts.png)\n\n"
        "The paper's argument for conditional computation is that the capacity of a network to "
        "absorb information is limited by its number of parameters (Sec. 1). This study measures "
        "that capacity alone. A fact is a random key and a random value out of "
        f"{VALUES}, so a fact has {math.log2(VALUES):g} bits and only memory can answer. Keys and "
        "the vectors of values are fixed; only the layer is trained, for "
        f"{settings.epochs:,} epochs of {BATCHES} batches. "
        f"A corpus has {settings.bits:g} bits for each parameter of its layer, more than the "
        f'layer can store. An arm such as "{SATURATION} x2" has a corpus of twice that size. '
        f"The peak learning rate is {settings.rate:g} for the mixtures and "
        f"{settings.dense_rate:g} for the dense layer. The gates' logits start with a standard "
        f"deviation of {settings.logit_std:g}. "
        "The bits stored are N · (log2 V - mean cross-entropy) of the N facts, at least 0.\n\n"
        f"{sizes}\n"
        f"The mean is that of {', '.join(compared)}, which have the most seeds; their parameters "
        f"span {doublings:.2f} doublings. "
        "With three seeds or more, brackets hold the 95% t interval over seeds. A claim is "
        "supported if the whole interval lies inside the claimed range, contradicted if it lies "
        "outside, and otherwise not decided.\n\n"
        f"{verdicts}\n"
        f"All runs took {seconds / 3600:.2f} core-hours.\n\n"
        f"```\n{command}\n```\n"
    )


def plot(table: Table) -> Figure:
    """Plots bits over parameters for all layers, and over the size of the corpus for one."""
    figure = Figure(figsize=(10, 4.2), layout="constrained", dpi=150)
    capacity, saturation = figure.subplots(1, 2)
    found = [arm for arm in MIXTURES if arm in table]
    parameters = [mean_of(table[arm], "parameters") for arm in found]
    bits = [mean_of(table[arm], "bits") for arm in found]
    density = statistics.fmean(
        mean_of(table[arm], "bits") / mean_of(table[arm], "parameters")
        for arm in compared_mixtures(table)
    )
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
    for arm, p, b in zip(found, parameters, bits, strict=True):
        capacity.annotate(arm, (p, b), xytext=(4, -10), textcoords="offset points", fontsize=7)
    if DENSE in table:
        runs = table[DENSE]
        capacity.plot(mean_of(runs, "parameters"), mean_of(runs, "bits"), "s", label="dense")
    capacity.set(xscale="log", yscale="log", xlabel="parameters", ylabel="bits stored")
    capacity.set_title("at most the dense layer's operations")
    capacity.legend()
    names = [SATURATION, *(f"{SATURATION} x{size:g}" for size in SIZES)]
    points = sorted(
        (mean_of(table[name], "facts") * math.log2(VALUES), mean_of(table[name], "bits"))
        for name in names
        if name in table
    )
    if points:
        offered, stored = zip(*points, strict=True)
        saturation.plot(offered, offered, "--", color="grey", label="all facts")
        saturation.plot(offered, stored, "o-", label=SATURATION)
        saturation.legend()
    saturation.set(xlabel="bits of all facts", ylabel="bits stored", ylim=(0, None))
    saturation.set_title("the corpus exceeds the capacity")
    return figure


def main(arguments: Sequence[str] | None = None) -> Table:
    """Runs the study and returns the finished runs."""
    parser = make_parser(__doc__)
    add_seeds(parser)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="train only these")
    usual = Settings()
    parser.add_argument("--epochs", type=at_least(1), default=usual.epochs)
    for name, what in (
        ("bits", "bits of the facts for each parameter"),
        ("logit_std", "standard deviation of the gates' logits at the start"),
        ("rate", "peak learning rate of the mixtures"),
        ("dense_rate", "peak learning rate of the dense layer"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=positive(),
            default=getattr(usual, name),
            help=f"{what} (%(default)s)",
        )
    parser.add_argument("--runs", default="runs/facts", help="folder of the lock files")
    add_output(parser)
    parser.add_argument("--report", action="store_true", help="write the page without training")
    options = parser.parse_args(arguments)
    settings = Settings(*(getattr(options, name) for name in Settings._fields))
    path, locks = options.output / "facts.json", Path(options.runs)
    if not options.report:
        torch.set_num_threads(1)
        run_missing(
            [(arm, seed) for arm in options.arms for seed in options.seeds],
            lambda arm, seed: run_of(arm, seed, settings),
            path,
            settings._asdict(),
            ARMS,
            locks,
        )

    def report(stored: Stored) -> Report | None:
        table = by_arm(stored.runs)
        if not any(arm in table for arm in MIXTURES):
            return None
        claimed = claims(table)
        changes = [
            f"--{name.replace('_', '-')} {value:g}"
            for name, value in stored.settings.items()
            if value != getattr(usual, name)
        ]
        command = " ".join(["moe-lab study facts", *changes])
        page = as_markdown(table, Settings(**stored.settings), claimed, command)
        return Report(page, claimed, plot(table))

    return by_arm(report_stored(path, report))
