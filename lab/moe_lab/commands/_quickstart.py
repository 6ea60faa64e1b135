"""The work of ``moe-lab quickstart``: the runs of both models and the printed report."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from moe_lab.analysis.experts import ExpertReport, by_specialisation, expert_reports
from moe_lab.analysis.routed_text import route_text
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.comparison import Comparison
from moe_lab.experiments.page import new_axes, perplexity_axes
from moe_lab.experiments.runs import ArmRuns, Run, test_nll
from moe_lab.experiments.study import concurrent_runs
from moe_lab.files import atomic_file
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import perplexity


def plot(runs: Mapping[str, Run], folders: Mapping[str, Path], path: Path) -> None:
    """Plots the learning curves of both models, and the load of each expert over time."""
    figure, (curves, load) = new_axes(12, 4.5, columns=2, dpi=120)
    for arm, label in (("moe", "mixture of experts"), ("dense", "dense, equal ops")):
        records = read_metrics(folders[arm], "dev")
        curves.plot(
            [record["tokens"] / 1e6 for record in records],
            [record["perplexity"] for record in records],
            marker="o",
            label=f"{label}: test {perplexity(test_nll(runs[arm])):.1f}",
        )
    perplexity_axes(curves, "training tokens (millions)", "Learning curves")

    records = read_metrics(folders["moe"], "train")
    loads = torch.tensor([record["load"][0] for record in records])  # [log lines, E]
    steps = [record["step"] for record in records]
    load.plot(steps, loads, color="tab:blue", alpha=0.25, linewidth=1)
    load.plot(steps, loads.max(1).values, color="tab:red", label="largest")
    load.axhline(1.0, color="black", linewidth=0.8, linestyle="--", label="even share")
    load.set(xlabel="step", ylabel="tokens of each expert / mean", ylim=(0, None))
    load.legend()
    load.set_title(f"Load of the {loads.shape[1]} experts")
    with atomic_file(path) as file:
        figure.savefig(file, format="png")


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


def train_and_report(options: argparse.Namespace) -> dict[str, Run]:
    """Trains both models, prints the report, and returns the runs by model."""
    started = time.perf_counter()
    options.name, options.config, options.against = "quickstart", "small/moe-64", []
    config, dense_config = Comparison(options).configs()
    options.at_once, threads = concurrent_runs([config, dense_config], 2)
    options.overrides += threads
    options.seeds = [config.seed]
    study, output = Comparison(options), options.output
    print(f"reading the corpus {config.data.corpus} (made on the first run)", flush=True)
    settings = study.settings()
    how = "one model after the other"
    if options.at_once > 1:
        how = f"both at the same time, threads of each: {study.configs()[0].num_threads}"
    print(
        f"{settings['train_tokens']:,} training tokens, a vocabulary of {settings['pieces']:,}; "
        f"{config.steps:,} steps for each model; {how}",
        flush=True,
    )
    study.run_missing(settings)
    stored = study.store.read(settings).by_arm()
    if not all(config.seed in stored[Arm(model)] for model in study.models):
        raise ConfigError(
            f"{output} must hold two finished runs, but one is missing: another command trains it, "
            "or the run diverged"
        )
    runs = {model: stored[Arm(model)][config.seed] for model in study.models}
    folders = {model: output / f"{model}-seed{config.seed}" for model in study.models}
    from moe_lab.training.checkpoint import load_run  # imports FSDP, which takes a second

    trained = load_run(folders["moe"])
    routed = route_text(trained.model, study.text.train, num_positions=100_000)
    plot(runs, folders, output / "quickstart.png")

    moe, dense = (perplexity(test_nll(runs[model])) for model in study.models)
    k, num_experts = config.model.moe.experts_per_token, config.model.moe.num_experts
    print(f"\n{'':24}{'test perplexity':>16}{'ops/timestep':>15}{'parameters':>13}{'tokens/s':>10}")
    for name, model, ppl in (
        (f"MoE, {k} of {num_experts} experts", "moe", moe),
        ("dense, one wide expert", "dense", dense),
    ):
        ops, parameters = ArmRuns({config.seed: runs[model]}).size_cells()
        speed = runs[model]["words_per_second"]
        print(f"{name:24}{ppl:16.2f}{ops:>15}{parameters:>13}{speed:10,.0f}")
    print("(ops and parameters without embedding and softmax, as in the paper)")
    if options.at_once > 1:
        print("(tokens/s while both models were trained at the same time)")
    print(f"\nMoE against dense: perplexity {100 * (moe / dense - 1):+.1f}%")
    balance = runs["moe"]["balance"]
    print(
        f"balance in training: CV(Importance) {balance['cv_importance']:.3f}, "
        f"CV(Load) {balance['cv_load']:.3f}, "
        f"max/mean load {balance['max_over_mean_load']:.2f}"
    )
    print(
        "\nThe three most specialised experts: the wordpieces that set them apart, each with the\n"
        "share of its occurrences that the expert gets, and the contexts [wordpiece] with the\n"
        "highest gates "
        f"(even share: {100 * k / num_experts:.1f}% of the tokens):"
    )
    for report in by_specialisation(expert_reports(routed, study.text.vocabulary.words))[:3]:
        print(describe(report))
    print(
        f"\n{output / 'quickstart.png'}: learning curves and load of the experts\n"
        f"all experts: moe-lab inspect-experts {folders['moe']}\n"
        f"done in {(time.perf_counter() - started) / 60:.1f} minutes"
    )
    return runs
