"""Studies: runs of several arms and seeds, and the page that is made of them."""

import argparse
import io
import json
import multiprocessing
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_lab.cli import exit_status
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import Arm, parse_arm
from moe_lab.experiments.claims import HOW_COMPARED, HOW_DECIDED
from moe_lab.experiments.page import Command, Page, page_of_template
from moe_lab.experiments.runs import Run, commands_of, core_hours
from moe_lab.experiments.single_run import Result, train_and_test
from moe_lab.experiments.store import Store, Stored, run_missing, shared_options
from moe_lab.training.config import AnyConfig
from moe_lab.training.device import set_up_for
from moe_lab.training.text import Text, load_text

PROSE = "The runs of the published page read English prose that [is not public](../lab/studies.md)."
_POLL = 0.2  # seconds between two looks at the signal


class Study(ABC):
    """Runs what the store of a study lacks, and writes its page.

    Args:
        options: the arguments of the command, see `moe_lab.studies.entries`.
        folder: the folder of the runs inside of ``--runs``.
    """

    name: str  # of the store, the page and the plot
    given: Sequence[str] = ()  # words of the command that a user adapts: data.corpus=CORPUS
    own: Mapping[str, Any] = {}  # the options that all runs share, with their usual values
    models: Sequence[str] = ()  # in the order of the store
    usual: Sequence[str] = ()  # the arms of the study without --arms
    arm_settings: Sequence[str] = ()  # the attributes of Arm that --arms may change

    def __init__(self, options: argparse.Namespace, folder: str = "") -> None:
        self.options, self.runs_folder = options, Path(options.runs) / folder
        self.bases = self.models
        self.arms = getattr(options, "arms", None) or list(map(parse_arm, self.usual))
        for arm in self.arms:
            known = {key: getattr(arm, key) for key in self.arm_settings}
            if arm.model not in self.models or arm != Arm(arm.model, **known):
                rule = f"one of {', '.join(self.models)}"
                if self.arm_settings:
                    rule += f", with other values of {', '.join(self.arm_settings)}"
                raise ConfigError(f"--arms must be {rule}, got {str(arm)!r}")

    @property
    def store(self) -> Store:
        return Store(Path(self.options.output) / f"{self.name}.json", self.bases)

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Sets up what the runs need and returns the options that they share."""

    @abstractmethod
    def run(self, arm: Arm, seed: int) -> Run:
        """Runs an arm with a seed and returns its numbers, as data for JSON."""

    @abstractmethod
    def page(self, stored: Stored) -> Page | None:
        """Makes the page; None if there is nothing to report yet."""

    def own_settings(self) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in self.own}

    def command(self, settings: Mapping[str, Any]) -> list[str]:
        """Returns the command of the study with these settings."""
        changed = [
            word
            for name, usual in self.own.items()
            if settings[name] != usual
            for word in (f"--{name.replace('_', '-')}", str(settings[name]))
        ]
        return [*self.program(), *changed]

    def planned(self) -> Iterator[tuple[Arm, int]]:
        """Yields the arm and the seed of each run, in the order in which to run them."""
        for seed in self.options.seeds:
            for arm in self.arms:
                yield arm, seed

    def options_of(self, arm: Arm, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options of an arm that differ from the settings."""
        return {}

    @classmethod
    def start(cls, options: argparse.Namespace) -> Stored:
        """Runs the study of the command's options and returns the stored runs."""
        return cls(options).main()

    def main(self) -> Stored:
        """Runs what is missing unless ``--report`` is given, writes the page, returns the store."""
        if not self.options.report:
            self.run_missing(self.settings())
        return self.store.report(self._page)

    def run_missing(self, settings: Mapping[str, Any]) -> None:
        """Runs what the store lacks; with ``options.at_once``, each in a process of its own."""
        planned = [(*key, self.options_of(key[0], settings)) for key in self.planned()]
        missing = sum(not self.store.holds(settings, *trial) for trial in planned)
        if (number := min(getattr(self.options, "at_once", 1), missing)) > 1:
            alone = argparse.Namespace(**vars(self.options) | {"at_once": 1})
            _run_at_once(type(self), alone, number)
        run_missing(self.store, settings, planned, self.run, self.runs_folder)

    def commands(self, stored: Stored) -> Command:
        return Command(commands_of(self.command(stored.settings), stored.runs, self.usual))

    def program(self) -> list[str]:
        """Returns the command of the study without changed options."""
        stem = type(self).__module__.rpartition(".")[2]
        return ["moe-lab", "study", stem.replace("_", "-"), *self.given]

    def filled(self, stored: Stored, **fields: Any) -> Page:
        """Makes the page from the Markdown file of the study, see `page_of_template`.

        All pages have the settings, the commands and the time of the runs, and how models are
        compared, in addition to the `fields`.
        """
        usual = {
            "settings": stored.settings,
            "how_compared": HOW_COMPARED,
            "how_decided": HOW_DECIDED,
            "prose": PROSE,
            "core_hours": core_hours(stored.runs),
            "commands": self.commands(stored),
        }
        file = sys.modules[type(self).__module__].__file__
        assert file is not None
        return page_of_template(file, **usual | fields)

    def _page(self, stored: Stored) -> Page | None:
        page = self.page(stored)
        if page is None or not stored.diverged:
            return page
        names = ", ".join(f"{run['arm']} with seed {run['seed']}" for run in stored.diverged)
        return Page(page.title, [*page.parts, f"These runs diverged: {names}."])


class TrainedStudy(Study):
    """A study of models that `train_and_test` trains."""

    shares: Sequence[float] = ()  # of the training steps, after which the test part is evaluated
    text: Text  # of the runs, from the call of `settings` on

    @abstractmethod
    def config(self, arm: Arm, overrides: Sequence[str]) -> AnyConfig:
        """Returns the configuration of an arm."""

    def settings_of(self, config: AnyConfig) -> dict[str, Any]:
        """Returns what all runs share: the text by fingerprints, and the options."""
        text = self.text
        return {
            "train_tokens": text.train.num_tokens,
            "pieces": len(text.vocabulary),
            "vocabulary": text.vocabulary.fingerprint(),
            "train": text.train.fingerprint(),
            "test": text.test.fingerprint(),
            **shared_options(config),
        }

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        """Returns what a run adds to its record."""
        return {}

    @property
    def first(self) -> Arm:
        """The arm whose options all runs share."""
        return Arm(self.usual[0])

    def settings(self) -> dict[str, Any]:
        config = self.config(self.first, self.options.overrides)
        set_up_for(config)
        self.text = load_text(config.data)
        return self.settings_of(config)

    def options_of(self, arm: Arm, settings: Mapping[str, Any]) -> dict[str, Any]:
        options = shared_options(self.config(arm, self.options.overrides))
        return {key: value for key, value in options.items() if value != settings.get(key)}

    def config_of_run(self, arm: Arm, seed: int, overrides: Sequence[str]) -> Any:
        """Returns the configuration of a run in the folder RUNS/ARM-seedN."""
        folder = self.runs_folder / f"{str(arm).replace(' ', '-')}-seed{seed}"
        return replace(self.config(arm, overrides), seed=seed, output=str(folder))

    def run(self, arm: Arm, seed: int) -> Run:
        config = self.config_of_run(arm, seed, self.options.overrides)
        result = train_and_test(config, self.text, self.shares)
        return result.record() | self.measured(arm, result)

    def command(self, settings: Mapping[str, Any]) -> list[str]:
        usual = shared_options(self.config(self.first, []))
        changed = [
            f"{key}={json.dumps(settings[key])}"
            for key, value in usual.items()
            if settings[key] != value
        ]
        return [*super().command(settings), *changed]


def _run_at_once(study: type[Any], options: argparse.Namespace, number: int) -> None:
    """Runs what the store of a study lacks in child processes, which share the runs.

    A signal stops the children. Each saves its run, or prints its error.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM came.
        SystemExit: a process failed.
    """
    from moe_lab.training.loop import stop_signal  # imports FSDP, which takes a second

    # Threads that spin while they wait are ten times slower when a core is shared.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    context = multiprocessing.get_context("spawn")
    arguments = study, options
    children = [context.Process(target=_run_in_child, args=arguments) for _ in range(number)]
    with stop_signal() as signalled:
        try:
            for child in children:
                child.start()
            while not signalled() and any(child.is_alive() for child in children):
                time.sleep(_POLL)
            for child in children if signalled() else ():
                child.terminate()
            for child in children:
                child.join()
        finally:
            for child in children:
                child.kill()
        if signalled():
            raise KeyboardInterrupt
    if status := max(abs(child.exitcode or 0) for child in children):
        sys.exit(status)


class _Lines(io.TextIOWrapper):
    """A stream without progress bars, because the children would write over each other."""

    def isatty(self) -> bool:
        return False


def _run_in_child(study: type[Any], options: argparse.Namespace) -> None:
    """Runs what the store of a study lacks, in a child process."""
    os.setpgid(0, 0)  # Ctrl-C reaches only the parent, which forwards it
    sys.stderr = _Lines(sys.stderr.buffer, line_buffering=True)
    child = study(options)
    sys.exit(exit_status(lambda: child.run_missing(child.settings())))


def concurrent_runs(configs: Sequence[AnyConfig], wanted: int) -> tuple[int, list[str]]:
    """Chooses the number of runs to train at the same time, and the threads of each run.

    Call this function before torch's number of threads changes.

    Args:
        configs: the configurations of the arms.
        wanted: the largest number of runs.

    Returns:
        The number of runs, and the override of their number of threads. The number is less than
        `wanted` if the runs would need more threads than torch uses, and 1 on a GPU. If the number
        is greater than 1 and num_threads is 0, each run gets an equal share of torch's threads.
    """
    threads = torch.get_num_threads()
    most = max(1, *(config.num_threads for config in configs))
    number = min(wanted, threads // most)
    if number <= 1 or any(config.device != "cpu" for config in configs):
        return 1, []
    given = any(config.num_threads for config in configs)
    return number, [] if given else [f"num_threads={threads // number}"]
