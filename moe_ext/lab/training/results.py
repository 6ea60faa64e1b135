"""Results of finished runs, stored in the folder of each run.

`train_and_test` trains and tests a run once. Later calls read the stored result. An interrupted run
is resumed.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_ext.lab.analysis import Cost, cost
from moe_ext.lab.files import atomic_file, write_json
from moe_ext.lab.training.config import AnyConfig, ConfigError, config_differences, config_from_dict
from moe_ext.lab.training.logging import read_metrics
from moe_ext.lab.training.loop import Trainer
from moe_ext.lab.training.metrics import Evaluation, evaluate, mean_of, perplexity
from moe_ext.lab.training.text import Text

BALANCE_BATCHES = 50  # Table 6 averages over "several" training batches


@dataclass(frozen=True)
class Result:
    """The result of a finished run.

    Attributes:
        run: folder of the run.
        seed: seed of the run.
        cost: operations and parameters of the model.
        test_nll: nats per token of the test part, after the last step.
        earlier_nll: nats per token of the test part after fractions of the training steps, by
            fraction.
        words_per_second: predictions per second in training, median over the log lines.
        balance: means of CV(Importance), CV(Load), max/mean Load and CV of tokens per expert, over
            the last training batches and all layers; {} if the model has no MoE layer.
        sentence_nll: [N] float64, nats of each test sentence after the last step.
    """

    run: Path
    seed: int
    cost: Cost
    test_nll: float
    earlier_nll: dict[float, float]
    words_per_second: float
    balance: dict[str, float]
    sentence_nll: Tensor

    @property
    def perplexity(self) -> float:
        return perplexity(self.test_nll)

    def nll_at(self, share: float) -> float:
        """Returns the nats per token of the test part after a fraction of the training steps."""
        return self.test_nll if share == 1 else self.earlier_nll[share]


def train_and_test(config: AnyConfig, text: Text, shares: Sequence[float] = ()) -> Result:
    """Returns the result of a run; starts or resumes the run if it is not finished.

    Args:
        config: the run; its `resume` is ignored.
        text: the encoded corpus of config.data.
        shares: ascending fractions of the training steps in (0, 1); the test part is also evaluated
            after each fraction.

    Raises:
        ConfigError: the output folder contains another run.
        KeyboardInterrupt: SIGINT or SIGTERM stopped the run after saving a checkpoint.
    """
    done = finished(config, text)
    if done is not None:
        return done
    stops = {share: max(1, round(share * config.steps)) for share in shares} | {1.0: config.steps}
    run = Path(config.output)
    for steps in stops.values():
        if steps == config.steps or not _test_file(run, steps).is_file():
            trainer = _train_to(steps, config, text)
    records = read_metrics(run, "train")
    recent = records[-math.ceil(BALANCE_BATCHES / config.log.log_every) :]
    keys = ("cv_importance", "cv_load", "max_over_mean_load", "cv_tokens")
    tests = {share: _measured(run, steps) for share, steps in stops.items()}
    nll = {share: Evaluation(test, text.test.num_tokens).nll for share, test in tests.items()}
    values = {
        "config": asdict(config),
        "vocabulary": text.vocabulary.fingerprint(),
        "text": _fingerprints(text),
        "cost": asdict(cost(trainer.model)),
        "test_nll": nll.pop(1.0),
        "earlier_nll": nll,
        "words_per_second": statistics.median(r["words_per_second"] for r in records),
        "balance": mean_of(
            {key: statistics.fmean(record[key]) for key in keys}
            for record in recent
            if keys[0] in record
        ),
    }
    write_json(run / "result.json", values)
    result = finished(config, text)
    assert result is not None
    return result


def finished(config: AnyConfig, text: Text) -> Result | None:
    """Reads the result of a run; None if the run is not finished.

    Raises:
        ConfigError: the output folder contains the result of another run.
    """
    run = Path(config.output)
    if not (run / "result.json").is_file():
        return None
    values = json.loads((run / "result.json").read_text("utf-8"))
    changed = config_differences(config_from_dict(values["config"]), config)
    changed = [key for key in changed if key != "data.corpus"]  # the contents are compared
    if (values["vocabulary"], values["text"]) != (
        text.vocabulary.fingerprint(),
        _fingerprints(text),
    ):
        changed.append("the text of data.corpus")
    if changed:
        raise ConfigError(
            f"{', '.join(changed)} must be as in the finished run {run}; "
            "restore the value, or give another output folder"
        )
    return Result(
        run=run,
        seed=config.seed,
        cost=Cost(**values["cost"]),
        test_nll=values["test_nll"],
        earlier_nll={float(share): nll for share, nll in values["earlier_nll"].items()},
        words_per_second=values["words_per_second"],
        balance=values["balance"],
        sentence_nll=_measured(run, config.steps),
    )


def _fingerprints(text: Text) -> dict[str, str]:
    """Returns the fingerprints of the parts that determine a result."""
    return {"train": text.train.fingerprint(), "test": text.test.fingerprint()}


def _train_to(steps: int, config: AnyConfig, text: Text) -> Trainer:
    """Trains up to a step, evaluates the test part after it, and returns the trainer."""
    resume = (Path(config.output) / "config.toml").exists()
    trainer = Trainer(replace(config, steps=steps, resume=resume), text)
    if not trainer.run():
        raise KeyboardInterrupt
    test = evaluate(
        trainer.model,
        text.test,
        tokens_per_batch=config.data.tokens_per_batch,
        title="testing" if config.log.progress else None,
    )
    with atomic_file(_test_file(trainer.folder, steps)) as file:
        torch.save(test.sentence_nll, file)
    return trainer


def _measured(run: Path, steps: int) -> Tensor:
    return torch.load(_test_file(run, steps), weights_only=True)


def _test_file(run: Path, steps: int) -> Path:
    return run / f"test_nll-{steps}.pt"
