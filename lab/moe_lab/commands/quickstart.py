"""Trains a small MoE language model and its dense counterpart, and compares them.

    moe-lab quickstart             # 5 minutes on 2 cores; called by scripts/quickstart.sh
    moe-lab quickstart --quick     # seconds: tiny models, for a quick check

The models are configs/small/moe-64.toml with a width of 96, and its dense counterpart. Both learn
from the same batches of wordpieces with equal operations. The corpus is "sources": Python code, the
C++ headers of torch, and documentation. The models train at the same time, each in its own process
with half of the threads. On one core or on a GPU, they train in sequence.

Prints the test perplexity of both, the load balance of the experts, and the specialisation of three
experts. Writes the learning curves and the load of the experts to OUTPUT/quickstart.png.

After the runs are finished, the same command prints the report at once. Ctrl-C or SIGTERM saves
both models and ends the script with status 130; the same command continues the runs. Status 1:
training of a model diverged; the other model is saved. Status 2: an option, file or folder is
invalid; stderr says which.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from moe_lab.analysis import ExpertReport, by_specialisation, expert_reports, route_text
from moe_lab.cli import add_overrides, make_parser
from moe_lab.errors import ConfigError
from moe_lab.experiments.comparison import arms
from moe_lab.experiments.results import Result
from moe_lab.experiments.study import run_study, runs_at_once, size_cells
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import read_config
from moe_lab.training.device import set_up_for
from moe_lab.training.logging import read_metrics
from moe_lab.training.text import load_text

_SETTINGS = [
    "steps=1200",
    "data.corpus=sources",
    "data.kind=bpe",
    "data.vocab_size=2000",
    "model.d_model=96",
    "model.dropout=0.0",
    "model.moe.hidden_sizes=[192]",
    "log.log_every=20",
    "log.eval_every=200",
    "log.eval_sentences=1000",
]
_QUICK = [
    "steps=30",
    "data.vocab_size=1000",
    "data.max_train_sentences=3000",
    "data.tokens_per_batch=512",
    "model.d_model=32",
    "model.moe.num_experts=8",
    "model.moe.k=2",
    "model.moe.hidden_sizes=[32]",
    "optimizer.warmup_steps=10",
    "log.log_every=5",
    "log.eval_every=10",
    "log.eval_sentences=200",
]


def plot(results: dict[str, Result], path: Path) -> None:
    """Plots the learning curves of both models, and the load of each expert over time."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    curves, load = figure.subplots(1, 2)
    for arm, label in (("moe", "mixture of experts"), ("dense", "dense, equal ops")):
        records = read_metrics(results[arm].run, "dev")
        curves.plot(
            [record["tokens"] / 1e6 for record in records],
            [record["perplexity"] for record in records],
            marker="o",
            label=f"{label}: test {results[arm].perplexity:.1f}",
        )
    curves.set(xlabel="training tokens (millions)", ylabel="dev perplexity", yscale="log")
    for formatter in (curves.yaxis.set_major_formatter, curves.yaxis.set_minor_formatter):
        formatter(StrMethodFormatter("{x:.0f}"))
    curves.grid(alpha=0.3, which="both")
    curves.legend()
    curves.set_title("Learning curves")

    records = read_metrics(results["moe"].run, "train")
    loads = torch.tensor([record["load"][0] for record in records])  # [log lines, E]
    steps = [record["step"] for record in records]
    load.plot(steps, loads, color="tab:blue", alpha=0.25, linewidth=1)
    load.plot(steps, loads.max(1).values, color="tab:red", label="largest")
    load.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="even share")
    load.set(xlabel="step", ylabel="tokens of each expert / mean", ylim=(0, None))
    load.legend()
    load.set_title(f"Load of the {loads.shape[1]} experts")
    figure.savefig(path, dpi=120)


def describe(report: ExpertReport) -> str:
    """Formats the share, the words and the contexts of one expert."""
    words = "  ".join(f"{w.word} {100 * w.share:.0f}%" for w in report.words[:8])
    contexts = [
        f"{context.before} [{context.word}] {context.after}".strip()
        for context in report.contexts[:3]
    ]
    return (
        f"  expert {report.expert}, {100 * report.share:.1f}% of the tokens\n"
        f"    words:          {words}\n"
        f"    highest gates:  {'  |  '.join(contexts)}"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Result]:
    """Runs the command and returns the results by model."""
    parser = make_parser(__doc__)
    add_overrides(parser)
    parser.add_argument("--quick", action="store_true", help="train tiny models for a few seconds")
    parser.add_argument("--output", help="folder of the runs (default: runs/quickstart[-quick])")
    options = parser.parse_intermixed_args(arguments)

    started = time.perf_counter()
    quick = _QUICK if options.quick else []
    output = Path(options.output or f"runs/quickstart{'-quick' if options.quick else ''}")
    config = read_config(
        "small/moe-64",
        [f"data.encoded={output / 'encoded'}", *_SETTINGS, *quick, *options.overrides],
    )
    models, at_once = runs_at_once(arms(config), 2)
    set_up_for(models["moe"])
    print(f"reading the corpus {config.data.corpus} (made on the first run)", flush=True)
    text = load_text(config.data)
    how = "one model after the other"
    if at_once > 1:
        how = f"both at the same time, threads of each: {models['moe'].num_threads}"
    print(
        f"{text.train.num_tokens:,} training tokens, a vocabulary of {len(text.vocabulary):,}; "
        f"{config.steps:,} steps for each model; {how}",
        flush=True,
    )
    runs = run_study(models, [config.seed], text, output, at_once=at_once)
    if not all(runs.values()):
        raise ConfigError(
            f"{output} must hold two finished runs, but one is missing: another command trains it, "
            "or the run diverged"
        )
    results = {arm: by_seed[config.seed] for arm, by_seed in runs.items()}
    trained = load_run(results["moe"].run)
    routed = route_text(trained.model, text.train, num_positions=100_000)
    plot(results, output / "quickstart.png")

    moe, dense = results["moe"], results["dense"]
    k, num_experts = config.model.moe.experts_per_token, config.model.moe.num_experts
    print(f"\n{'':24}{'test perplexity':>16}{'ops/timestep':>15}{'parameters':>13}{'tokens/s':>10}")
    for name, r in (
        (f"MoE, {k} of {num_experts} experts", moe),
        ("dense, one wide expert", dense),
    ):
        ops, parameters = size_cells(r.cost)
        print(f"{name:24}{r.perplexity:16.2f}{ops:>15}{parameters:>13}{r.words_per_second:10,.0f}")
    print("(ops and parameters without embedding and softmax, as in the paper)")
    if at_once > 1:
        print("(tokens/s while both models were trained at the same time)")
    print(f"\nMoE against dense: perplexity {100 * (moe.perplexity / dense.perplexity - 1):+.1f}%")
    print(
        f"balance in training: CV(Importance) {moe.balance['cv_importance']:.3f}, "
        f"CV(Load) {moe.balance['cv_load']:.3f}, "
        f"max/mean load {moe.balance['max_over_mean_load']:.2f}"
    )
    print(
        "\nThe three most specialised experts: the wordpieces that set them apart, each with the\n"
        "share of its occurrences that the expert gets, and the contexts [wordpiece] with the\n"
        "highest gates "
        f"(even share: {100 * k / num_experts:.1f}% of the tokens):"
    )
    for report in by_specialisation(expert_reports(routed, text.vocabulary))[:3]:
        print(describe(report))
    print(
        f"\n{output / 'quickstart.png'}: learning curves and load of the experts\n"
        f"all experts: moe-lab inspect-experts {moe.run}\n"
        f"done in {(time.perf_counter() - started) / 60:.1f} minutes"
    )
    return results
