"""Trains and tests one run."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_lab.analysis.costs import Cost, cost
from moe_lab.errors import ConfigError
from moe_lab.files import atomic_file, require_regular
from moe_lab.training.config import AnyConfig
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import Evaluation, evaluate, perplexity
from moe_lab.training.text import Text

if TYPE_CHECKING:
    from moe_lab.training.loop import Trainer

BALANCE_BATCHES = 50  # Table 6 averages over "several" training batches
_BALANCE = ("cv_importance", "cv_load", "max_over_mean_load", "cv_tokens")


@dataclass(frozen=True)
class Result:
    """The result of a finished run; nats are those of the test part."""

    run: Path  # its folder
    seed: int
    cost: Cost
    test_nll: float  # nats per token after the last step
    earlier_nll: dict[float, float]  # nats per token, by the fraction of the training steps
    words_per_second: float  # predictions in training, median over the log lines
    # Means over all layers and at least the last 50 training batches; {} without a MoE layer.
    balance: dict[str, float]
    sentence_nll: Tensor  # [N] float64, nats of each sentence after the last step

    @property
    def perplexity(self) -> float:
        return perplexity(self.test_nll)

    def record(self) -> dict[str, Any]:
        """Returns the numbers as data for JSON, with the learning curve on the dev part."""
        return {
            "cost": asdict(self.cost),
            "test_nll": self.test_nll,
            "earlier_nll": {str(share): nll for share, nll in self.earlier_nll.items()},
            "words_per_second": self.words_per_second,
            "balance": self.balance,
            "dev": [[row["tokens"], row["nll"]] for row in read_metrics(self.run, "dev")],
        }


def train_and_test(config: AnyConfig, text: Text, shares: Sequence[float] = ()) -> Result:
    """Trains a run, or resumes an unfinished one, and tests it.

    The folder of the run keeps the tests that are finished, so they are not repeated. The test part
    is also evaluated after the fractions `shares` of the training steps, which ascend in (0, 1).

    Raises:
        ConfigError: the output folder contains another run, or one that has trained for longer.
        KeyboardInterrupt: SIGINT or SIGTERM stopped the run after saving a checkpoint.
    """
    stops = {share: max(1, round(share * config.steps)) for share in shares} | {1.0: config.steps}
    run = Path(config.output)
    for steps in stops.values():
        if steps == config.steps or not _test_file(run, steps, text).is_file():
            trainer = _train_to(steps, config, text)
    records = read_metrics(run, "train")
    tests = {
        share: Evaluation(read_test(run, steps, text), text.test.num_tokens)
        for share, steps in stops.items()
    }
    last = tests.pop(1.0)
    return Result(
        run=run,
        seed=config.seed,
        cost=cost(trainer.model),
        test_nll=last.nll,
        earlier_nll={share: test.nll for share, test in tests.items()},
        words_per_second=statistics.median(record["words_per_second"] for record in records),
        balance=_balance(records, math.ceil(BALANCE_BATCHES / config.optimizer.accumulate)),
        sentence_nll=last.sentence_nll,
    )


def _train_to(steps: int, config: AnyConfig, text: Text) -> "Trainer":
    """Trains up to a step, evaluates the test part after it, and returns the trainer."""
    from moe_lab.training.loop import make_trainer  # imports FSDP, which takes a second

    resume = (Path(config.output) / "config.toml").exists()
    trainer = make_trainer(replace(config, steps=steps, resume=resume), text)
    if not trainer.run() or trainer.interrupted:
        raise KeyboardInterrupt
    file = _test_file(trainer.folder, steps, text)
    if not file.is_file():
        test = evaluate(
            trainer.model,
            text.test,
            tokens_per_batch=config.data.tokens_per_batch,
            title="testing" if config.log.progress else None,
        )
        with atomic_file(file) as opened:
            torch.save(test.sentence_nll, opened)
    return trainer


def _balance(records: Sequence[Mapping[str, Any]], num_steps: int) -> dict[str, float]:
    """Returns the means of the balance metrics over at least the last num_steps steps.

    A record of the log has the means over the steps since the record before.
    """
    ends = [record["step"] for record in records]
    recent = [
        (record, end - begin)
        for record, begin, end in zip(records, [0, *ends[:-1]], ends, strict=True)
        if end > ends[-1] - num_steps and _BALANCE[0] in record
    ]
    weights = [steps for _, steps in recent]
    return {
        key: statistics.fmean((statistics.fmean(record[key]) for record, _ in recent), weights)
        for key in (_BALANCE if recent else ())
    }


def read_test(run: Path, steps: int, text: Text) -> Tensor:
    """Reads the nats of each test sentence after a number of steps, [N] float64."""
    path, number = _test_file(run, steps, text), len(text.test)
    try:
        require_regular(path)
        nll = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises almost any error for a corrupted file
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read: {reason}; delete the file") from error
    if not isinstance(nll, Tensor) or nll.dtype != torch.float64 or nll.shape != (number,):
        kind = f"{nll.dtype} {list(nll.shape)}" if isinstance(nll, Tensor) else type(nll).__name__
        raise ConfigError(f"{path} must hold float64 [{number}], got {kind}; delete the file")
    return nll


def _test_file(run: Path, steps: int, text: Text) -> Path:
    return run / f"test_nll-{steps}-{text.test.fingerprint()[:8]}.pt"
