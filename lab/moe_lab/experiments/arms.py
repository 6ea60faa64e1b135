"""Arms of a study, and the options of all studies with arms. The module needs no torch."""

import argparse
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.cli import SEEDS, Option, one, several

# The word in an arm's name, and the option of a configuration, by attribute.
_OPTIONS = {
    "rate": ("rate", "optimizer.learning_rate"),
    "expert_rate": ("experts", "optimizer.expert_learning_rate"),
    "dropout": ("dropout", "model.dropout"),
}
_NAME = re.compile(
    r"(?P<model>\S+)(?: (?P<pair>[^\s-]+-[^\s-]+))?(?: x(?P<times>\S+))?"
    r"(?P<attends_language> attends language,?)?"
    + "".join(rf"(?: {word} (?P<{name}>\S+))?" for name, (word, _) in _OPTIONS.items())
)
# The two paragraphs after the options of a study with arms.
_FILES = (
    "The file OUTPUT/{files}.json keeps every finished run, so the study can grow over many "
    "occasions and machines. {interrupted} To share the runs, start the command several times. "
    "The command also writes the page OUTPUT/{files}.md and its plot; --report writes them from "
    "the file, without runs and without the corpus."
)
_STATUS = (
    "{stopped} Status 1 means that training diverged. Status 2 means that an option, file or "
    "folder cannot be used; the error message names it."
)


@dataclass(frozen=True)
class Arm:
    """A model of a study, with the settings in which it differs from the other models.

    `str` makes the name of an arm, such as "moe-64 x4 rate 0.016 experts 0.008"; `parse_arm` reads
    it. None stands for the value of the study.
    """

    model: str
    pair: str = ""  # the only language pair of its text, such as "en-de"; "": all pairs
    times: float = 1  # factor of the number of training steps, or of the size of the text
    attends_language: bool = False  # whether the attention sees the token of the target language
    rate: float | None = None  # the peak learning rate
    expert_rate: float | None = None  # the peak learning rate of the experts
    dropout: float | None = None

    def __str__(self) -> str:
        length = "" if self.times == 1 else f"x{self.times:g}"
        return " ".join(filter(None, [self.base, length, self.trial]))

    @property
    def base(self) -> str:
        """The model, and the language pair if it has only one."""
        return f"{self.model} {self.pair}".rstrip()

    @property
    def trial(self) -> str:
        """The options in the name, such as "rate 0.016 dropout 0.1"; "" for the usual options."""
        given = " ".join(
            f"{word} {getattr(self, name):g}"
            for name, (word, _) in _OPTIONS.items()
            if getattr(self, name) is not None
        )
        if not self.attends_language:
            return given
        return f"attends language, {given}" if given else "attends language"

    @property
    def usual(self) -> "Arm":
        """The arm with the usual options of the study."""
        return Arm(self.model, self.pair, self.times)

    @property
    def overrides(self) -> list[str]:
        """The options of the configuration that the arm changes, as key=value."""
        options = ["model.attend_language=true"] if self.attends_language else []
        return options + [
            f"{option}={getattr(self, name)}"
            for name, (_, option) in _OPTIONS.items()
            if getattr(self, name) is not None
        ]


def parse_arm(name: str) -> Arm:
    """Reads the name of an arm; raises ValueError for another text."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"an arm must be a model with settings, such as 'moe-4 x4', got {name!r}")
    values: dict[str, Any] = {key: text for key, text in match.groupdict().items() if text}
    for key in values.keys() & {"times", *_OPTIONS}:
        values[key] = float(values[key])
        if not (math.isfinite(values[key]) and values[key] >= 0) or values.get("times") == 0:
            raise ValueError(f"{key} of an arm must be a positive number, got {name!r}")
    return Arm(**values | {"attends_language": "attends_language" in values})


def by_settings(bases: Sequence[str]) -> Callable[[Arm], Any]:
    """Returns the key that sorts arms by their options, their length and then their `Arm.base`."""
    return lambda arm: (
        *(arm.attends_language, arm.dropout or 0, arm.rate or 0, -(arm.expert_rate or math.inf)),
        *(arm.times != 1, arm.times),
        bases.index(arm.base) if arm.base in bases else len(bases),
    )


def _parsed(name: str) -> Arm:
    try:
        return parse_arm(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


SEEDS_AND_ARMS: dict[str, Option] = SEEDS | {
    "--arms": several(_parsed, None, "run only these models") | {"metavar": "ARM"}
}


def runs_folder(name: str, resumes: bool) -> dict[str, Option]:
    """Returns the option of the folder of the runs of a study."""
    what = "folder of the runs" if resumes else "folder of the locks of the runs"
    return {"--runs": one(str, f"runs/{name}", what)}


def end_of_help(files: str, resumes: bool) -> str:
    """Returns the end of the help of a study whose page and data have the name `files`."""
    if resumes:
        interrupted = "A run that is interrupted continues from its checkpoint in RUNS."
        stopped = "Ctrl-C or SIGTERM saves the current run and ends the command with status 130."
        stopped += " The same command continues the run."
    else:
        interrupted = "A run that is interrupted begins again."
        stopped = "Ctrl-C ends the command with status 130."
    return "\n\n".join(
        textwrap.fill(text.format(files=files, interrupted=interrupted, stopped=stopped), 100)
        for text in (_FILES, _STATUS)
    )
