"""Results of finished runs, stored in the folder of each run.

`train_and_test` trains and tests a run once. Later calls read the stored result. An interrupted run
is resumed. `run_unlocked` shares several runs between processes.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ext.checks import is_whole, require
from moe_lab.analysis import Cost, cost
from moe_lab.errors import ConfigError
from moe_lab.files import (
    Locked,
    atomic_file,
    file_lock,
    read_json,
    require_regular,
    write_json,
)
from moe_lab.training.config import AnyConfig, config_differences, config_from_file
from moe_lab.training.logging import read_metrics
from moe_lab.training.loop import Trainer, make_trainer
from moe_lab.training.metrics import Evaluation, evaluate, perplexity
from moe_lab.training.text import Text

BALANCE_BATCHES = 50  # Table 6 averages over "several" training batches
_BALANCE = ("cv_importance", "cv_load", "max_over_mean_load", "cv_tokens")


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
        balance: means of CV(Importance), CV(Load), max/mean Load and CV of tokens per expert. They
            are over all layers and at least the last 50 training batches. {} without a MoE layer.
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
        """Returns the nats per test token at the fraction `share` of the training steps."""
        return self.test_nll if share == 1 else self.earlier_nll[share]


def train_and_test(config: AnyConfig, text: Text, shares: Sequence[float] = ()) -> Result:
    """Returns the result of a run; starts or resumes an unfinished run.

    Args:
        config: the run; its `resume` is ignored.
        text: the encoded corpus of config.data.
        shares: ascending fractions of the training steps in (0, 1); the test part is also evaluated
            after each fraction.

    Raises:
        ConfigError: the output folder contains another run, or a run that was not tested after all
            shares.
        KeyboardInterrupt: SIGINT or SIGTERM stopped the run after saving a checkpoint.
    """
    done = finished(config, text)
    if done is not None:
        tested = [*done.earlier_nll]
        rule = f"be a part of {tested}, the shares of the finished run {done.run}"
        if not {*shares} - {1.0} <= {*tested}:
            raise ConfigError(f"shares must {rule}, got {list(shares)}")
        return done
    stops = {share: max(1, round(share * config.steps)) for share in shares} | {1.0: config.steps}
    run = Path(config.output)
    for steps in stops.values():
        if steps == config.steps or not _test_file(run, steps).is_file():
            trainer = _train_to(steps, config, text)
    records = read_metrics(run, "train")
    tests = {share: _measured(run, steps, len(text.test)) for share, steps in stops.items()}
    nll = {share: Evaluation(test, text.test.num_tokens).nll for share, test in tests.items()}
    values = {
        "config": asdict(config),
        "vocabulary": text.vocabulary.fingerprint(),
        "text": _fingerprints(text),
        "cost": asdict(cost(trainer.model)),
        "test_nll": nll.pop(1.0),
        "earlier_nll": nll,
        "words_per_second": statistics.median(r["words_per_second"] for r in records),
        "balance": _balance(records, math.ceil(BALANCE_BATCHES / config.optimizer.accumulate)),
    }
    write_json(run / "result.json", values)
    result = finished(config, text)
    assert result is not None
    return result


def run_unlocked(runs: Iterable[tuple[str, Path, Callable[[], object]]], hint: str) -> None:
    """Calls functions in sequence, except those that another process is calling.

    Args:
        runs: the name of each run, its lock file, and the function.
        hint: the end of the error message.

    Raises:
        FloatingPointError: runs diverged; the others are finished.
    """
    diverged = []
    for name, lock, run in runs:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with suppress(Locked), file_lock(lock, wait=False):
            try:
                run()
            except FloatingPointError as error:
                diverged.append(f"{name}: {error}")
    if diverged:
        raise FloatingPointError("; ".join([*diverged, hint]))


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


def finished(config: AnyConfig, text: Text) -> Result | None:
    """Reads the result of a run; None if the run is not finished.

    Raises:
        ConfigError: the output folder contains the result of another run, or a corrupted file.
    """
    run = Path(config.output)
    if not (run / "result.json").is_file():
        return None
    path = run / "result.json"
    try:
        values = read_json(path)
        numbers = _numbers(values)
    except ValueError as error:
        raise ConfigError(
            f"{path} must hold the result of a run, got a corrupted file: {error}; delete the file "
            "to test the run again"
        ) from error
    changed = config_differences(config_from_file(values["config"], path), config)
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
        **numbers,
        sentence_nll=_measured(run, config.steps, len(text.test)),
    )


def _numbers(values: Any) -> dict[str, Any]:
    """Returns the numbers of result.json as arguments of `Result`.

    Raises:
        ValueError: an entry is missing or has another type.
    """
    keys = ("config", "vocabulary", "text", "cost", "earlier_nll", "balance")
    known = isinstance(values, dict) and {*keys, "test_nll", "words_per_second"} <= values.keys()
    require(known, "result.json", f"be a table with {', '.join(keys)}", values if known else "less")
    sizes = [field.name for field in fields(Cost)]
    for key, known_names in (("cost", sizes), ("earlier_nll", None), ("balance", None)):
        names = list(values[key]) if isinstance(values[key], dict) else None
        rule = f"have the keys {sizes}" if known_names else "be a table"
        require(names is not None and names == (known_names or names), key, rule, names)
    return {
        "cost": Cost(**{name: int(_number(name, values["cost"][name])) for name in sizes}),
        "test_nll": _number("test_nll", values["test_nll"]),
        "earlier_nll": {
            float(share): _number(share, nll) for share, nll in values["earlier_nll"].items()
        },
        "words_per_second": _number("words_per_second", values["words_per_second"]),
        "balance": {name: _number(name, value) for name, value in values["balance"].items()},
    }


def _number(name: str, value: Any) -> float:
    known = isinstance(value, float) or (is_whole(value) and abs(value) < 2**63)
    require(known and math.isfinite(value), name, "be a finite number", value)
    return float(value)


def _fingerprints(text: Text) -> dict[str, str]:
    """Returns the fingerprints of the parts that determine a result."""
    return {"train": text.train.fingerprint(), "test": text.test.fingerprint()}


def _train_to(steps: int, config: AnyConfig, text: Text) -> Trainer:
    """Trains up to a step, evaluates the test part after it, and returns the trainer."""
    resume = (Path(config.output) / "config.toml").exists()
    trainer = make_trainer(replace(config, steps=steps, resume=resume), text)
    if not trainer.run() or trainer.interrupted:
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


def _measured(run: Path, steps: int, number: int) -> Tensor:
    """Reads the nats of each test sentence after a number of steps, [number] float64.

    Raises:
        ConfigError: the file is corrupted.
    """
    path = _test_file(run, steps)
    try:
        require_regular(path)
        nll = torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises almost any error for a corrupted file
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} cannot be read: {reason}; delete result.json") from error
    if not isinstance(nll, Tensor) or nll.dtype != torch.float64 or nll.shape != (number,):
        found = f"{nll.dtype} {list(nll.shape)}" if isinstance(nll, Tensor) else type(nll).__name__
        raise ConfigError(f"{path} must hold float64 [{number}], got {found}; delete result.json")
    return nll


def _test_file(run: Path, steps: int) -> Path:
    return run / f"test_nll-{steps}.pt"
