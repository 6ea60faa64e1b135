"""The table of studies and their command lines; torch is imported when a study runs."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.cli import (
    CONFIG,
    OVERRIDES,
    REPORT,
    THREAD_LIMIT,
    Option,
    at_least,
    help_of,
    module_of,
    one,
    positive,
    require_checkpoint,
    several,
)
from moe_lab.cli import parse as parse_options
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import SEEDS_AND_ARMS, end_of_help, runs_folder
from moe_lab.names import PARTS_AND_ALL


class Entry(NamedTuple):
    """The command line of a study; its module has the documentation and the function `run`."""

    options: Mapping[str, Option] = {}  # The arguments that other studies do not have.
    defaults: Mapping[str, Any] = {}  # Of common options.
    arms: bool = False  # Whether the study has arms and seeds.
    files: str = ""  # Name of its files, if not that of the study.
    resumes: bool = True  # Whether an interrupted run continues; otherwise it begins again.
    report: bool = True  # Whether --report writes the page of the stored data.
    check: Callable[[Any], object] = lambda options: None  # Refuses contradictions of arguments.


def _share(text: str) -> float:
    """Parses a number in (0, 1] from `text`, as an argparse type."""
    value = positive()(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {text!r}")
    return value


def _check_folders(options: Any) -> None:
    if options.report == bool(options.folders):
        raise ConfigError("the folder of a run must be given, or --report instead")
    for folder in options.folders:
        require_checkpoint(folder)


STUDIES = {
    "balanced": Entry(OVERRIDES, {"seeds": [1]}, arms=True),
    "capacity": Entry(
        OVERRIDES
        | {"--text": {"choices": ["sources", "prose"], "default": "sources", "help": "the corpus"}},
        arms=True,
        files="capacity_TEXT",
    ),
    "efficiency": Entry(
        {
            "--threads": one(at_least(1, THREAD_LIMIT), 1, "number of threads"),
            "--rounds": one(at_least(2), 20, "interleaved rounds"),
            "--width": one(at_least(1), 512, "d_model"),
            "--tokens": several(at_least(64), [1_280, 5_120], "tokens of a training step"),
        }
    ),
    "facts": Entry(
        {
            "--bits": one(positive(), 2.0, "bits of the facts for each parameter of the layer"),
            "--epochs": one(at_least(1), 50, "number of epochs"),
            "--logit-std": one(positive(), 3.0, "standard deviation of the gates' logits at the "
                               "start"),
            "--rate": one(positive(), 0.03, "peak learning rate of the mixtures"),
            "--dense-rate": one(positive(), 0.015, "peak learning rate of the dense layer"),
        },
        arms=True,
        resumes=False,
    ),
    "fine-tuning": Entry(
        {
            "--corpus": {"default": "builtin", "help": "the corpus of the model"},
            "--target": {"default": "sources", "help": "the corpus of the adapters"},
            "--pieces": one(at_least(3), 2_000, "number of wordpieces"),
            "--steps": one(at_least(2), 800, "training steps of the model"),
            "--lora-steps": one(at_least(2), 400, "training steps of the adapters"),
        },
        arms=True,
        files="fine_tuning",
        resumes=False,
    ),
    "kneser-ney": Entry(
        {
            "config": {"help": f"{CONFIG}; only its [data] and num_threads are used"},
            **OVERRIDES,
            "--order": one(at_least(1), 5, "n of the longest n-grams"),
            "--discounts": {"type": int, "choices": (1, 3), "default": 3,
                            "help": "number for each order; 3 is modified Kneser-Ney"},
            "--shares": several(_share, [1.0], "fractions of the training sentences"),
        },
        report=False,
    ),
    "lora": Entry(
        OVERRIDES
        | {
            "--target": {"default": "sources", "help": "the corpus of the adapters"},
            "--lora-steps": one(at_least(1), 600, "training steps of the adapters"),
        },
        arms=True,
    ),
    "losses": Entry(OVERRIDES, arms=True),
    "multilingual": Entry(OVERRIDES, arms=True, files="multilingual_captions"),
    "packed": Entry(OVERRIDES, arms=True),
    "paper-tables": Entry(report=False),
    "routers": Entry(OVERRIDES, arms=True),
    "specialisation": Entry(
        {
            "folders": {"nargs": "*", "metavar": "RUN", "help": "the folders of training runs"},
            "--part": {"choices": PARTS_AND_ALL, "default": "train", "help": "part of the corpus"},
            "--positions": one(at_least(1), 200_000, "number of words"),
            "--permutations": one(at_least(2), 1_000, "shuffles of the labels"),
            "--layer": one(int, 0, "index among the MoE layers"),
            "--threads": one(at_least(0, THREAD_LIMIT), 0, "threads; 0 is torch's number"),
        },
        check=_check_folders,
    ),
    "translation": Entry(
        OVERRIDES | {"--pair": {"default": "en-de", "help": "the language pair, such as en-de"}},
        arms=True,
        files="translation_captions_PAIR",
    ),
}  # fmt: skip


def usual_options(name: str, *options: str) -> dict[str, Any]:
    """Returns the defaults of some options of a study, without names those of all."""
    named_options = STUDIES[name].options.items()
    usual = {
        key.strip("-").replace("-", "_"): option.get("default") for key, option in named_options
    }
    return {key: usual[key] for key in options or usual}


def parse(name: str, arguments: Sequence[str] | None = None) -> Any:
    """Parses and checks the arguments of a study; None: those of the command line."""
    entry, epilog = STUDIES[name], None
    options = dict(entry.options)
    if entry.arms:
        options |= SEEDS_AND_ARMS | runs_folder(name, entry.resumes)
        epilog = end_of_help(entry.files or name, entry.resumes)
    output = one(Path, Path("runs", "results"), "folder of the page and its data")
    options |= {"--output": output} | (REPORT if entry.report else {})
    help = help_of("studies", name)
    parsed = parse_options(help, options, arguments, epilog=epilog, **entry.defaults)
    entry.check(parsed)
    return parsed


def run(name: str, arguments: Sequence[str] | None = None) -> Any:
    """Runs a study and returns its stored runs or its data.

    Args:
        name: a key of `STUDIES`.
        arguments: the arguments after the name; None: those of the command line.
    """
    options = parse(name, arguments)
    return module_of("studies", name).run(options)
