"""Results of a study that grows over many occasions, in one small JSON file.

The file OUTPUT/NAME.json is both result and input of a study. A run that the file holds is not
repeated, on any machine. The page is made of the file alone.
"""

import json
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_ext.checks import require
from moe_lab.analysis import Cost
from moe_lab.cli import DEFAULT_SEEDS
from moe_lab.errors import ConfigError
from moe_lab.experiments.report import write_report
from moe_lab.experiments.results import Result, run_unlocked
from moe_lab.files import file_lock, read_json, write_json
from moe_lab.training.config import AnyConfig, config_from_file, options_of_results
from moe_lab.training.logging import read_metrics
from moe_lab.training.metrics import perplexity
from moe_lab.training.text import Text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = dict[str, Any]  # the numbers of a finished run, with its "arm" and "seed"

_HINT = "restore the file, or give another --output"


class Stored(NamedTuple):
    """The contents of the file of a study.

    Attributes:
        settings: the options of the study that all runs share, as data for JSON. Options that are
            newer than the file have their defaults.
        runs: the finished runs, ordered by arm and seed.
    """

    settings: dict[str, Any]
    runs: list[Run]


def read_stored(path: Path) -> Stored | None:
    """Reads the file of a study; None if there is no file.

    Raises:
        ConfigError: the file is corrupted.
    """
    if not path.is_file():
        return None
    try:
        values = read_json(path)
        known = isinstance(values, dict) and isinstance(values.get("runs"), list)
        known = known and isinstance(values.get("settings"), dict)
        require(known, str(path), "be a table with settings and runs", type(values).__name__)
        for run in values["runs"]:
            known = isinstance(run, dict) and {"arm", "seed"} <= run.keys()
            require(known, f"{path}: runs", "each have an arm and a seed", run)
    except ValueError as error:
        raise ConfigError(f"{error}; {_HINT}") from error
    settings = values["settings"]
    if "task" in settings:
        defaults = shared_options(config_from_file({"task": settings["task"]}, path))
        for key, value in defaults.items():
            settings.setdefault(key, value)
    return Stored(settings, values["runs"])


def stored_runs(path: Path, settings: Mapping[str, Any]) -> list[Run]:
    """Reads the finished runs of a study with the given settings; [] if there is no file.

    Raises:
        ConfigError: the file is corrupted, or belongs to other settings.
    """
    stored = read_stored(path)
    if stored is None:
        return []
    different = sorted(
        key
        for key in stored.settings.keys() | settings.keys()
        if stored.settings.get(key) != settings.get(key)
    )
    if different:
        found, wanted = (
            {key: each.get(key) for key in different} for each in (stored.settings, settings)
        )
        raise ConfigError(f"{path} must hold runs with {wanted}, got {found}; {_HINT}")
    return stored.runs


def _locked(path: Path) -> AbstractContextManager[None]:
    """Locks the file of a study: only one program at a time reads and writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return file_lock(path.with_name(f".{path.name}.lock"), wait=True)


def run_missing(
    keys: Iterable[tuple[str, int]],
    run: Callable[[str, int], Run],
    path: Path,
    settings: Mapping[str, Any],
    order: Sequence[str],
    locks: Path,
) -> None:
    """Runs what the file of a study lacks, and stores each run as soon as it is finished.

    A stored run has its "seconds", the processor time since it was last started.

    You can start the same study several times: each process skips runs that another process has
    begun.

    Args:
        keys: the arm and seed of each run, in the order in which to run them.
        run: function from arm and seed to the numbers of the finished run, as data for JSON.
        path: the JSON file.
        settings: the options of the study that all runs share, as data for JSON.
        order: the arms in the order of the file.
        locks: the folder of the lock files of the runs, which is created if missing.

    Raises:
        ConfigError: the file is corrupted, or belongs to other settings.
        FloatingPointError: runs diverged; the others are finished and stored.
    """

    def is_stored(arm: str, seed: int) -> bool:
        return any((r["arm"], r["seed"]) == (arm, seed) for r in stored_runs(path, settings))

    def run_and_store(arm: str, seed: int) -> None:
        if is_stored(arm, seed):
            return
        started = time.process_time()
        finished = {"arm": arm, "seed": seed, **run(arm, seed)}
        finished["seconds"] = round(time.process_time() - started, 1)
        with _locked(path):
            if not is_stored(arm, seed):  # by a process with other locks
                runs = [*stored_runs(path, settings), finished]
                runs.sort(key=lambda each: (order.index(each["arm"]), each["seed"]))
                write_json(path, {"settings": dict(settings), "runs": runs})

    run_unlocked(
        (
            (
                f"{arm} with seed {seed}",
                locks / f".{arm}-seed{seed}.lock",
                partial(run_and_store, arm, seed),
            )
            for arm, seed in keys
        ),
        "--report writes the page of the other runs",
    )


class Report(NamedTuple):
    """The report of a study.

    Attributes:
        page: the page, in Markdown.
        claims: the claims and their verdicts, as data for JSON.
        figure: the plot of the page.
    """

    page: str
    claims: Sequence[Any]
    figure: "Figure"


def report_stored(path: Path, report_of: Callable[[Stored], Report | None]) -> list[Run]:
    """Writes the report of the runs in the file of a study, and the claims into the file.

    Args:
        path: the JSON file; the page and its plot are in the same folder.
        report_of: function that makes the report; None if there is nothing to report yet.

    Returns:
        The finished runs.

    Raises:
        ConfigError: the file is corrupted.
    """
    with _locked(path):
        stored = read_stored(path)
        if stored is None or (report := report_of(stored)) is None:
            print("nothing to report yet: the compared models have no finished run")
        else:
            data = {**stored._asdict(), "claims": report.claims}
            write_report(path.parent, path.stem, report.page, data, report.figure)
        return stored.runs if stored else []


def shared_options(config: AnyConfig) -> dict[str, Any]:
    """Returns the options that all runs of a study must share, for its settings.

    The text is known by its fingerprint, and each run has its own seed. The options of [log] that
    are included determine the learning curves.
    """
    options = options_of_results(config)
    del options["seed"], options["data.corpus"]
    return options | {
        "log.eval_every": config.log.eval_every,
        "log.eval_sentences": config.log.eval_sentences,
    }


def shared_settings(config: AnyConfig, text: Text) -> dict[str, Any]:
    """Returns the settings of any study: its text by fingerprints, and `shared_options`."""
    return {
        "pieces": len(text.vocabulary),
        "vocabulary": text.vocabulary.fingerprint(),
        "train": text.train.fingerprint(),
        "test": text.test.fingerprint(),
        **shared_options(config),
    }


def changed_options(settings: Mapping[str, Any], usual: AnyConfig) -> list[str]:
    """Returns the arguments that give the options in `settings` instead of those of `usual`."""
    return [
        f"{key}={json.dumps(settings[key])}"
        for key, value in shared_options(usual).items()
        if settings[key] != value
    ]


def _command_of(command: Iterable[str], runs: Sequence[Run]) -> str:
    """Returns the command of a study with the seeds and arms of these runs."""
    seeds = map(str, sorted({run["seed"] for run in runs}))
    arms = dict.fromkeys(run["arm"] for run in runs)
    return shlex.join([*command, "--seeds", *seeds, "--arms", *arms])


def commands_of(command: Sequence[str], runs: Sequence[Run], usual: Collection[str]) -> str:
    """Formats the commands of stored runs, one on each line.

    The first command is that of the arms in `usual` with the usual seeds. Further seeds of these
    arms follow, then the other arms; each command has the arms with the same seeds.
    """
    same: dict[tuple[bool, tuple[int, ...]], list[Run]] = {}  # of the same seeds
    for arm in dict.fromkeys(run["arm"] for run in runs):
        is_other = arm not in usual
        of_arm = [
            run
            for run in runs
            if run["arm"] == arm and (is_other or run["seed"] not in DEFAULT_SEEDS)
        ]
        same.setdefault((is_other, tuple(sorted(run["seed"] for run in of_arm))), []).extend(of_arm)
    ordered = [same[key] for key in sorted(same, key=lambda key: key[0]) if same[key]]
    return "\n".join([shlex.join(command), *(_command_of(command, some) for some in ordered)])


def record_of(result: Result) -> Run:
    """Converts the result of a run to data for JSON, with its learning curve on the dev part."""
    return {
        "cost": asdict(result.cost),
        "test_nll": result.test_nll,
        "earlier_nll": {str(share): nll for share, nll in result.earlier_nll.items()},
        "words_per_second": result.words_per_second,
        "balance": result.balance,
        "dev": [[record["tokens"], record["nll"]] for record in read_metrics(result.run, "dev")],
    }


def results_of(
    runs: Sequence[Run], arms: Iterable[str], part: str = "test"
) -> dict[str, dict[int, Result]]:
    """Converts what `record_of` made back, without the nats of each sentence.

    Args:
        runs: the stored runs.
        arms: the models of the study; a model without runs gets {}.
        part: "test", or "dev" for results whose test_nll is that of the dev part, at the end of the
            training only.

    Returns:
        The results by arm and seed.
    """
    results: dict[str, dict[int, Result]] = {arm: {} for arm in arms}
    for run in runs:
        earlier = run["earlier_nll"] if part == "test" else {}
        results[run["arm"]][run["seed"]] = Result(
            run=Path(),
            seed=run["seed"],
            cost=Cost(**run["cost"]),
            test_nll=run["test_nll"] if part == "test" else run["dev"][-1][1],
            earlier_nll={float(share): nll for share, nll in earlier.items()},
            words_per_second=run["words_per_second"],
            balance=run["balance"],
            sentence_nll=torch.empty(0),
        )
    return results


def core_hours(runs: Sequence[Run]) -> str:
    """Says how long the runs took."""
    hours = sum(run["seconds"] for run in runs) / 3600
    return (
        f"All runs took at least {hours:.2f} core-hours. "
        "A run that was interrupted counts from its last start."
    )


def mean_curve(runs: Sequence[Run], arm: str) -> list[tuple[float, float]]:
    """Returns the learning curve of the runs of a model: tokens of training, and dev perplexity.

    The perplexity is exp of the mean ln(perplexity) of the runs.
    """
    steps = zip(*(run["dev"] for run in runs if run["arm"] == arm), strict=True)
    return [(step[0][0], perplexity(statistics.fmean(nll for _, nll in step))) for step in steps]
