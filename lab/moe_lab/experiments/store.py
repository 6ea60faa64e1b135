"""The store of runs: one small JSON file next to the page of a study.

The file OUTPUT/NAME.json holds the settings that all runs share, and each finished run with its
arm, its seed, its results and the machine. A run that the file holds is not repeated, on any
machine. The page is made of the file alone. All functions raise ConfigError if the file is
corrupted or belongs to other settings.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_ext.checks import require
from moe_ext.info import cpu_name
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm, by_settings, parse_arm
from moe_lab.experiments.page import Claims, Page, publish
from moe_lab.experiments.runs import ArmRuns, Run, Runs
from moe_lab.files import Locked, file_lock, read_json, write_json
from moe_lab.training.config import AnyConfig, config_from_file, options_of_results

# What the code of a page raises for numbers that are missing or of another type.
_WRONG_RESULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_HINT = "restore the file, or give another --output"


@dataclass(frozen=True)
class Stored:
    # What all runs share, as data for JSON; options that are newer than the file have defaults.
    settings: dict[str, Any]
    runs: list[Run] = field(default_factory=list)  # finished; ordered by arm and seed
    diverged: list[Run] = field(default_factory=list)  # arm and seed; they are not repeated

    def by_arm(self) -> Runs:
        by_arm_and_seed = Runs()
        for run in self.runs:
            by_arm_and_seed.setdefault(parse_arm(run["arm"]), ArmRuns())[run["seed"]] = run
        return by_arm_and_seed

    def find(self, arm: Arm, seed: int) -> Run | None:
        """Returns the run of an arm and a seed if it is finished or has diverged."""
        all_runs = [*self.runs, *self.diverged]
        same = (run for run in all_runs if (run["arm"], run["seed"]) == (str(arm), seed))
        return next(same, None)

    def data(self, **more: Any) -> dict[str, Any]:
        diverged = {"diverged": self.diverged} if self.diverged else {}
        return {"settings": self.settings, "runs": self.runs, **diverged, **more}


class Store:
    """The JSON file of a study; `bases` are its models in their order, see `Arm.base`."""

    def __init__(self, path: Path, bases: Sequence[str] = ()) -> None:
        self.path, self.bases = path, bases

    def _locked(self) -> AbstractContextManager[None]:
        """Locks the file: only one program at a time reads and writes it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return file_lock(self.path.with_name(f".{self.path.name}.lock"), wait=True)

    def read(self, settings: Mapping[str, Any] | None = None) -> Stored:
        """Reads the file, which must have these settings if given; a missing file has no runs."""
        if not self.path.is_file():
            return Stored(dict(settings or {}))
        try:
            values = read_json(self.path)
            stored = _checked(values, self.path)
        except ValueError as error:
            raise ConfigError(f"{error}; {_HINT}") from error
        if "task" in stored.settings:
            defaults = config_from_file({"task": stored.settings["task"]}, self.path)
            for key, value in shared_options(defaults).items():
                stored.settings.setdefault(key, value)
        if settings is not None:
            self._require_same(f"{self.path} must hold runs", stored.settings, settings)
        return stored

    def _require_same(self, what: str, given: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        # The path of the corpus may differ; the contents of the corpus are compared.
        keys = sorted((given.keys() | wanted.keys()) - {"corpus"})
        if different := [key for key in keys if given.get(key) != wanted.get(key)]:
            a, b = ({key: options.get(key) for key in different} for options in (wanted, given))
            raise ConfigError(f"{what} with {a}, got {b}; {_HINT}")

    def holds(
        self, settings: Mapping[str, Any], arm: Arm, seed: int, options: Mapping[str, Any]
    ) -> bool:
        """Returns whether a run is finished or has diverged."""
        run = self.read(settings).find(arm, seed)
        if run is not None and "options" in run:  # older runs have only the name of the arm
            self._require_same(f"{self.path} must hold runs of {arm}", run["options"], options)
        return run is not None

    def add(self, settings: Mapping[str, Any], run: Run, diverged: bool = False) -> None:
        """Adds a run, unless another process has added it."""
        with self._locked():
            stored = self.read(settings)
            arm, seed = parse_arm(run["arm"]), run["seed"]
            if stored.find(arm, seed) is None:
                (stored.diverged if diverged else stored.runs).append(run)
            key = by_settings(self.bases)
            stored.runs.sort(key=lambda run: (key(parse_arm(run["arm"])), run["seed"]))
            write_json(self.path, stored.data())

    def page(self, stored: Stored, page_of: Callable[[Stored], Page | None]) -> Page | None:
        """Makes the page of stored runs, which come from the user, or returns None."""
        try:
            return page_of(stored) if stored.runs else None
        except ConfigError:
            raise
        except _WRONG_RESULTS as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error)
            rule = f"{self.path} must hold the results of this study"
            raise ConfigError(f"{rule}, got {reason}; {_HINT}") from error

    def report(self, page_of: Callable[[Stored], Page | None]) -> Stored:
        """Writes the page of the stored runs and its plot, and the claims into the file."""
        with self._locked():
            stored = self.read()
            page = self.page(stored, page_of)
            if page is None:
                print("nothing to report yet: the compared models have no finished run")
            else:
                claims = page.part(Claims)
                data = stored.data(claims=claims.data) if claims else stored.data()
                publish(self.path.parent, self.path.stem, page, data)
            return stored


def _checked(values: Any, path: Path) -> Stored:
    """Converts the contents of a file; raises ValueError if they are not those of a study."""
    kinds: dict[str, type] = {"settings": dict, "runs": list, "diverged": list}
    table: dict[str, Any] = {"diverged": []} | values if isinstance(values, dict) else {}
    known = all(isinstance(table.get(key), kind) for key, kind in kinds.items())
    require(known, str(path), "be a table with settings and runs", type(values).__name__)
    for run in [*table["runs"], *table["diverged"]]:
        kinds = {"arm": str, "seed": int, "options": dict}
        run_of: dict[str, Any] = {"options": {}} | run if isinstance(run, dict) else {}
        known = all(isinstance(run_of.get(key), kind) for key, kind in kinds.items())
        require(known, f"{path}: runs", "each have an arm and a seed", run)
        try:
            parse_arm(run["arm"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return Stored(table["settings"], table["runs"], table["diverged"])


def run_missing(
    store: Store,
    settings: Mapping[str, Any],
    planned: Iterable[tuple[Arm, int, Mapping[str, Any]]],
    run: Callable[[Arm, int], Run],
    locks: Path,
) -> None:
    """Runs what a store lacks, and stores each run as soon as it is finished.

    A stored run has its "seconds", the processor time since it was last started, and the "machine".
    You can start the same study several times: each process skips runs that another process has
    begun.

    Args:
        store: the store.
        settings: what all runs share, as data for JSON.
        planned: the arm, the seed and the options of the arm of each run, in their order.
        run: function from arm and seed to the numbers of the finished run, as data for JSON.
        locks: the folder of the lock files of the runs.

    Raises:
        FloatingPointError: runs diverged; the others are finished and stored.
    """
    errors = []
    locks.mkdir(parents=True, exist_ok=True)
    for arm, seed, options in planned:
        with suppress(Locked), file_lock(locks / f".{arm}-seed{seed}.lock", wait=False):
            if store.holds(settings, arm, seed, options):
                continue
            begin = {"arm": str(arm), "seed": seed, "options": dict(options)}
            started = time.process_time()
            try:
                values = run(arm, seed)
            except FloatingPointError as error:
                errors.append(f"{arm} with seed {seed}: {error}")
                store.add(settings, begin | {"error": str(error)}, diverged=True)
                continue
            seconds = round(time.process_time() - started, 1)
            machine = f"{cpu_name()}; torch {torch.__version__}"
            store.add(settings, begin | values | {"seconds": seconds, "machine": machine})
    if errors:
        hint = "the same command continues without diverged runs, --report writes the page"
        raise FloatingPointError("; ".join([*errors, hint]))


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
