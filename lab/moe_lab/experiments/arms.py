"""Arms of a study, and the command line of a study. The module needs no torch."""

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_lab.cli import add_output, add_overrides, add_seeds, make_parser

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
_EXAMPLES = {  # of the endings of a name, by attribute
    "times": " x4",
    "attends_language": " attends language",
    "rate": " rate 0.004",
    "expert_rate": " experts 0.008",
    "dropout": " dropout 0.1",
}
_ENDING = """
The file OUTPUT/{name}.json keeps every finished run, so the study can grow over many occasions and
machines. A run that is interrupted continues from its checkpoint in RUNS. To share the runs, start
the command several times. The command also writes the page OUTPUT/{name}.md and its plot; --report
writes them from the file, without runs and without the corpus.

Ctrl-C or SIGTERM saves the current run and ends the command with status 130. The same command
continues the run. Status 1 means that training diverged. Status 2 means that an option, file or
folder cannot be used; the error message names it.
"""


@dataclass(frozen=True)
class Arm:
    """A model of a study, with the settings in which it differs from the other models.

    `str` makes the name of an arm, such as "moe-64 x4 rate 0.016 experts 0.008"; `parse_arm` reads
    it.

    Attributes:
        model: the name of the model.
        pair: the only language pair of its text, such as "en-de"; "": all pairs of the study.
        times: factor of the number of training steps, or of the size of the text.
        attends_language: whether the attention sees the token of the target language.
        rate: the peak learning rate; None: the study's.
        expert_rate: the peak learning rate of the experts; None: the rate of all weights.
        dropout: the dropout; None: the study's.
    """

    model: str
    pair: str = ""
    times: float = 1
    attends_language: bool = False
    rate: float | None = None
    expert_rate: float | None = None
    dropout: float | None = None

    def __str__(self) -> str:
        return " ".join(filter(None, [self.base, self.length, self.trial]))

    @property
    def base(self) -> str:
        """The model, and the language pair if it has only one."""
        return f"{self.model} {self.pair}".rstrip()

    @property
    def length(self) -> str:
        """The factor in the name, such as "x4"; "" for 1."""
        return "" if self.times == 1 else f"x{self.times:g}"

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
        found = ["model.attend_language=true"] if self.attends_language else []
        return found + [
            f"{option}={getattr(self, name)}"
            for name, (_, option) in _OPTIONS.items()
            if getattr(self, name) is not None
        ]


def parse_arm(name: str) -> Arm:
    """Reads the name of an arm; raises ValueError for another text."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"an arm must be a model with settings, such as 'moe-4 x4', got {name!r}")
    values: dict[str, Any] = {key: text for key, text in found.groupdict().items() if text}
    for key in values.keys() & {"times", *_OPTIONS}:
        values[key] = float(values[key])
        if not (math.isfinite(values[key]) and values[key] >= 0) or values.get("times") == 0:
            raise ValueError(f"{key} of an arm must be a positive number, got {name!r}")
    return Arm(**values | {"attends_language": "attends_language" in values})


def by_settings(bases: Sequence[str]) -> Callable[[Arm], Any]:
    """Returns the key that sorts arms by their options, their length and then their model.

    Args:
        bases: the models in their order, see `Arm.base`.
    """
    return lambda arm: (
        *(arm.attends_language, arm.dropout or 0, arm.rate or 0, -(arm.expert_rate or math.inf)),
        *(arm.times != 1, arm.times),
        bases.index(arm.base) if arm.base in bases else len(bases),
    )


def _arm_of(models: Sequence[str], settings: Iterable[str]) -> tuple[Callable[[str], Arm], str]:
    """Makes an argparse type for arms, and describes the names that it takes."""
    rule = f"one of {', '.join(models)}"
    if settings:
        rule += f"; endings of a name: {', '.join(repr(_EXAMPLES[name]) for name in settings)}"

    def parse(name: str) -> Arm:
        try:
            arm = parse_arm(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        allowed = Arm(arm.model, **{key: getattr(arm, key) for key in settings})
        if arm.model not in models or arm != allowed:
            raise argparse.ArgumentTypeError(f"must be {rule}, got {name!r}")
        return arm

    return parse, rule


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--report``: the page of what is stored, without further runs."""
    parser.add_argument(
        "--report", action="store_true", help="write the page of the stored runs, and run nothing"
    )


def study_parser(
    description: str | None,
    name: str,
    models: Sequence[str],
    usual: Sequence[str] | None = None,
    settings: Iterable[str] = (),
    overrides: bool = True,
) -> argparse.ArgumentParser:
    """Creates a parser for the common options of studies; call ``parse_intermixed_args`` to parse.

    Args:
        description: the docstring of the study; the help appends what all studies share.
        name: the name of the study.
        models: the models of the study.
        usual: the models without ``--arms``; None: all models.
        settings: the attributes of `Arm` that an arm may change.
        overrides: whether the runs have a configuration, whose options can be changed.
    """
    parser = make_parser((description or "") + _ENDING.format(name=name))
    if overrides:
        add_overrides(parser)
    add_seeds(parser)
    parse, rule = _arm_of(models, settings)
    parser.add_argument(
        "--arms",
        nargs="+",
        type=parse,
        default=[Arm(model) for model in (models if usual is None else usual)],
        metavar="ARM",
        help=f"run only these models ({rule})",
    )
    parser.add_argument("--runs", default=f"runs/{name}", help="folder of the runs (%(default)s)")
    add_output(parser)
    add_report(parser)
    return parser
