"""Trains a model with strictly balanced gates and compares its two kinds of masks (App. F).

    moe-lab study balanced data.corpus=CORPUS
    moe-lab study balanced steps=500 --output runs/balanced
    moe-lab study balanced --report

Trains configs/small/moe-32-balanced.toml. The study stops if an expert does not get exactly m =
round(k·T/E) tokens of a training batch. The page has

- the dev perplexity under the threshold mask and under the batchwise mask, at several steps
- the fraction of assignments in which the two masks disagree
- the fraction of tokens without an expert

The page shows the first seed; the default is the single seed 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_ext import MoE, MoEAux, batchwise_masks
from moe_ext.gates import rows_per_expert
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.page import Page, Plot, new_axes, perplexity_axes, table_of
from moe_lab.experiments.runs import Run
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.markdown import markdown_table
from moe_lab.training.config import Config, read_config
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import evaluate


class Balanced(TrainedStudy):
    name = "balanced"
    given = ("data.corpus=CORPUS",)
    models = usual = ("moe-32-balanced",)

    def config(self, arm: Arm, overrides: Sequence[str]) -> Config:
        config = read_config(f"small/{arm.model}", ["num_threads=1", *overrides], Config)
        moe = config.model.moe
        if moe.gate != "balanced" or moe.num_groups:
            raise ConfigError(
                'model.moe must have gate = "balanced" and num_groups = 0, '
                f"got {moe.gate!r} and {moe.num_groups}"
            )
        if "moe" not in config.model.layers:
            raise ConfigError(f'model.layers must include "moe", got {config.model.layers}')
        return config

    def run(self, arm: Arm, seed: int) -> Run:
        from moe_lab.training.loop import make_trainer  # imports FSDP, which takes a second

        config = self.config_of_run(arm, seed, self.options.overrides)
        config = replace(config, resume=(Path(config.output) / "config.toml").exists())
        trainer = make_trainer(config, self.text)
        checks = []
        for layer in trainer.model.layers:
            if isinstance(layer, MoE):
                checks.append(EqualLoads(config.model.moe.k, config.model.moe.num_experts))
                layer.register_forward_hook(checks[-1])
        if not trainer.run() or trainer.interrupted:
            raise KeyboardInterrupt("balanced: training was interrupted; the run is saved")

        def test_perplexity() -> float:
            size = config.data.tokens_per_batch
            return evaluate(trainer.model, self.text.test, tokens_per_batch=size).perplexity

        test = {"perplexity": test_perplexity()}
        with batchwise_masks(trainer.model):
            test["perplexity_batchwise"] = test_perplexity()
        dev = read_metrics(trainer.folder, "dev")
        train = [
            {"step": record["step"]}
            | {key: record[key][0] for key in ("mask_disagreement", "share_without_expert")}
            for record in read_metrics(trainer.folder, "train")
        ]
        return {
            "checked_batches": sum(check.num_batches for check in checks),
            "final": {
                **{key: train[-1][key] for key in ("mask_disagreement", "share_without_expert")},
                "difference": dev[-1]["perplexity"] / dev[-1]["perplexity_batchwise"] - 1,
            },
            "test": test,
            "dev": dev,
            "train": train,
        }

    def page(self, stored: Stored) -> Page | None:
        run = stored.runs[0]
        test = run["test"]
        end = {key: f"{100 * value:.2f}%" for key, value in run["final"].items()}
        last = [
            ["disagreement of the masks, training batches", end["mask_disagreement"], "below 10%"],
            ["increase of dev perplexity by the threshold mask", end["difference"], "at most 2%"],
            ["tokens without an expert, training batches", end["share_without_expert"], ""],
            ["test perplexity, threshold mask", f"{test['perplexity']:.2f}", ""],
            ["test perplexity, batchwise mask", f"{test['perplexity_batchwise']:.2f}", ""],
        ]
        steps: dict[str, Callable[[Mapping[str, float]], str]] = {
            "step": lambda dev: f"{dev['step']:,}",
            "dev perplexity, threshold mask": lambda dev: f"{dev['perplexity']:.2f}",
            "batchwise mask": lambda dev: f"{dev['perplexity_batchwise']:.2f}",
            "difference": lambda dev: (
                f"{100 * (dev['perplexity'] / dev['perplexity_batchwise'] - 1):+.2f}%"
            ),
        }
        return self.filled(
            stored,
            plot=plot(run["dev"], run["train"]),
            run=run,
            steps=table_of(steps, [(record,) for record in run["dev"]]),
            end=markdown_table(["after the last step", "value", "aim"], last),
        )


class EqualLoads:
    """A forward hook that counts batches and checks that each expert gets round(k·T/E) tokens."""

    def __init__(self, k: int, num_experts: int) -> None:
        self.k, self.num_experts = k, num_experts
        self.num_batches = 0

    def __call__(self, layer: MoE, inputs: Any, outputs: tuple[Any, MoEAux]) -> None:
        if not layer.training:
            return
        aux = outputs[1]
        assert aux.token_offsets is not None  # it has no fixed k
        m = rows_per_expert(self.k, len(aux.token_offsets) - 1, self.num_experts)
        if not (aux.tokens_per_expert == m).all():
            raise RuntimeError(
                f"balanced: every expert must get {m} tokens of a training batch, "
                f"got {aux.tokens_per_expert.tolist()}"
            )
        self.num_batches += 1


def plot(dev: list[dict[str, Any]], train: list[dict[str, Any]]) -> Plot:
    """Plots perplexity under both masks (left), mask disagreement and unrouted tokens (right)."""
    figure, (left, right) = new_axes(12, 4.5, columns=2, dpi=120)
    steps = [record["step"] for record in dev]
    for key, label in (("perplexity_batchwise", "batchwise"), ("perplexity", "threshold")):
        values = [record[key] for record in dev]
        style = {"marker": "o", "linestyle": "--" if key == "perplexity" else "-"}
        left.plot(steps, values, label=f"{label} mask: {values[-1]:.1f} at the end", **style)
    perplexity_axes(left, "step", "Perplexity under both masks")

    steps = [record["step"] for record in train]
    for key, label in (
        ("mask_disagreement", "disagreement of the masks"),
        ("share_without_expert", "tokens without an expert"),
    ):
        right.plot(steps, [100 * record[key] for record in train], label=label)
    right.axhline(10, color="black", linewidth=0.8, linestyle="--")
    right.set(xlabel="step", ylabel="%, in training batches", ylim=(0, None))
    right.grid(alpha=0.3)
    right.legend()
    right.set_title("The masks in training")
    return Plot("perplexity and masks against steps", figure)


run = Balanced.start
