"""What the studies of routers and of balancing losses share: the configuration and the plot."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from moe_lab.experiments.arms import Arm
from moe_lab.experiments.page import Page, Plot, new_axes
from moe_lab.experiments.runs import Runs, Value, test_nll
from moe_lab.experiments.single_run import BALANCE_BATCHES, Result
from moe_lab.experiments.store import Stored
from moe_lab.experiments.study import TrainedStudy
from moe_lab.training.config import Config, read_config
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import perplexity

_SETTINGS = (
    "num_threads=1",
    "steps=1200",
    "data.vocab_size=10000",
    "model.num_sampled=1024",
    "optimizer.learning_rate=8e-3",
    "log.eval_every=0",
    "log.save_every=400",
    f"log.log_every={BALANCE_BATCHES}",
    "log.tensorboard=false",
)


class RoutingStudy(TrainedStudy):
    """Trains small/moe-32, by default with several options of its MoE layer."""

    given: Sequence[str] = ("data.corpus=CORPUS",)
    common: ClassVar[Sequence[str]] = _SETTINGS  # of all models; the command may override them
    overrides: ClassVar[Mapping[str, Sequence[str]]] = {}  # of a model in addition

    def config(self, arm: Arm, overrides: Sequence[str]) -> Config:
        model_overrides = self.overrides.get(arm.model, ())
        options = [*self.common, *overrides, *model_overrides, *arm.overrides]
        return read_config("small/moe-32", options, Config)

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        (load,) = read_metrics(result.run, "train")[-1]["load"]  # of the only MoE layer
        return {"load": load}

    def filled(self, stored: Stored, **fields: Any) -> Page:
        steps, tokens = (stored.settings[key] for key in ("steps", "data.tokens_per_batch"))
        size_of_run = (
            f"A run has {steps:,} steps of {tokens:,} tokens (words and ends of sentences); "
            f"the training part has {stored.settings['train_tokens']:,} tokens."
        )
        return super().filled(stored, size_of_run=size_of_run, **fields)


def plot(
    runs: Runs, models: Sequence[str], balance: Value, title: str | None = None, **axis: str
) -> Plot:
    """Plots the test perplexity of each run over a number that describes its balance.

    `title` is the title of the legend, `axis` the label and the scale of the number.
    """
    figure, axes = new_axes(7, 4.2)
    for model in models:
        arm_runs = runs[Arm(model)].values()
        ppl = [perplexity(test_nll(run)) for run in arm_runs]
        axes.plot([*map(balance, arm_runs)], ppl, "o", label=model)
    axes.set(ylabel="test perplexity", **axis)
    axes.legend(title=title)
    return Plot("perplexity and balance", figure)
