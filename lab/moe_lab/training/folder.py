"""The output folder of a training run.

The folder contains::

    config.toml  vocabulary.txt  metrics.jsonl  checkpoints/  tensorboard/

A model of wordpieces has wordpieces.model instead of vocabulary.txt. The files are written
atomically: a crash leaves the old or the new file. The configuration is written first, so a folder
with config.toml contains a run to resume.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from moe_lab.data import AnyVocabulary, Vocabulary, Wordpieces
from moe_lab.errors import ConfigError, config_errors
from moe_lab.files import Locked, file_lock, write_text
from moe_lab.training.config import (
    AnyConfig,
    DataConfig,
    ParallelDataConfig,
    config_differences,
    read_config,
    to_toml,
)
from moe_lab.training.logging import RunLog, read_metrics


def vocabulary_file(data: DataConfig | ParallelDataConfig) -> str:
    """Returns the name of the file that holds the vocabulary of a text."""
    return "vocabulary.txt" if data.kind == "words" else "wordpieces.model"


def load_vocabulary(
    data: DataConfig | ParallelDataConfig, path: str | Path, before: str = "", after: str = ""
) -> AnyVocabulary:
    """Reads the vocabulary of a text; before and after surround the message of an error."""
    kind = Vocabulary if data.kind == "words" else Wordpieces
    with config_errors(before, after, (OSError, ValueError)):
        return kind.load(path)


class RunFolder:
    """The output folder of a configuration, checked before the run begins; writes nothing yet."""

    def __init__(self, config: AnyConfig) -> None:
        self.config = config
        self.path = Path(config.output)
        if not config.output:
            raise ConfigError("output must be the folder of the run, got ''; give output=runs/NAME")
        parent = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not parent.is_dir():
            raise ConfigError(
                f"output must be a folder, got the file {parent}; give another folder"
            )
        if config.resume:
            self._check_run()
        # A run that is killed at its start leaves at most a hidden temporary file.
        elif self.path.is_dir() and any(file.name[0] != "." for file in self.path.iterdir()):
            raise ConfigError(
                f"{self.path} is not empty; continue the run in it with resume=true, "
                "or give another folder with output=..."
            )

    def _check_run(self) -> None:
        """Checks that the folder contains a run of this configuration."""
        written = self.path / "config.toml"
        if not written.is_file():
            raise ConfigError(
                f"there is no run in {self.path} to resume; omit resume=true to start a new run"
            )
        # The path of the corpus may differ; the contents of the corpus are compared.
        changed = [
            key
            for key in config_differences(read_config(written), self.config)
            if key not in ("steps", "data.corpus")
        ]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} must be as in {written} to resume the run; restore the "
                "value, or start a new run in another folder"
            )
        read_metrics(self.path)  # a corrupted file stops the run here, before it writes

    def check_steps(self, step: int) -> None:
        """Raises ConfigError if the run has already made more steps than the configuration."""
        if step > self.config.steps:
            raise ConfigError(
                f"steps must be at least {step}, the steps of the run in {self.path}, got "
                f"{self.config.steps}; give another folder with output=... for a shorter run"
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the folder, which is created if missing."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with file_lock(self.path / ".training.lock", wait=False):
                yield
        except Locked:
            raise ConfigError(
                f"another run is training in {self.path}; wait until it ends, or give "
                "another folder with output=..."
            ) from None

    def check_unchanged(self, before: int | None, now: int | None) -> None:
        """Raises ConfigError if another run has trained in the folder in the meantime.

        `before` is the step of the newest checkpoint that this run knows, `now` that of the newest
        in the folder; None: there is none.
        """
        begun = before is None and not self.config.resume and (self.path / "config.toml").exists()
        if begun or now != before:
            raise ConfigError(
                f"another run has trained in {self.path} in the meantime; resume the run "
                "with resume=true, or give another folder with output=..."
            )

    @contextmanager
    def begin(self, step: int, vocabulary: AnyVocabulary) -> Iterator[RunLog]:
        """Writes the configuration, which makes a killed run resumable, then the vocabulary.

        Yields the log of the run.
        """
        write_text(self.path / "config.toml", to_toml(replace(self.config, resume=False)))
        file = self.path / vocabulary_file(self.config.data)
        if step == 0 or not file.is_file():
            vocabulary.save(file)
        config, title = self.config, self.path.name
        log = RunLog(self.path, config.log, start_step=step, steps=config.steps, title=title)
        with closing(log):
            yield log
