"""Checkpoints and the other files of a run folder:

    config.toml  vocabulary.txt  metrics.jsonl  checkpoints/step-00000500.pt  tensorboard/

Each file is written so that a crash leaves the old one or the new one, whole. config.toml comes
first: where it is, there is a run to resume.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ext.data import Vocabulary
from moe_ext.data.files import atomic_file
from moe_ext.models import LanguageModel
from moe_ext.training.config import Config, ConfigError, config_from_dict


def save_checkpoint(run: Path, state: dict[str, Any], keep: int) -> Path:
    """Write the state, which holds its "step", and delete all but the newest `keep`."""
    path = run / "checkpoints" / f"step-{state['step']:08d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        torch.save(state, file)
    for old in checkpoints(run)[:-keep]:
        old.unlink()
    return path


def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted((run / "checkpoints").glob("step-*.pt"))


def load_checkpoint(run: Path) -> dict[str, Any]:
    """The newest checkpoint of a run, on the CPU.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    found = checkpoints(run)
    if not found:
        raise ConfigError(
            f"there is no checkpoint in {run}; train first, or give the folder of a run"
        )
    try:
        return torch.load(found[-1], map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{found[-1]} cannot be read ({type(error).__name__}); delete it to use the one before"
        ) from error


@dataclass(frozen=True)
class TrainedModel:
    """A model from its newest checkpoint, in evaluation mode, and what is needed to use it."""

    model: LanguageModel
    vocabulary: Vocabulary
    config: Config
    step: int


def load_run(run: str | Path, device: str = "cpu") -> TrainedModel:
    """The newest model of a run folder.

    Raises:
        ConfigError: the folder does not hold one.
    """
    run = Path(run)
    state = load_checkpoint(run)
    config = config_from_dict(state["config"])
    try:
        vocabulary = Vocabulary.load(run / "vocabulary.txt")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; restore the run's vocabulary.txt") from error
    check_vocabulary(vocabulary, state, run / "vocabulary.txt")
    model = LanguageModel(config.model, len(vocabulary))
    model.load_state_dict(state["model"])
    return TrainedModel(model.to(device).eval(), vocabulary, config, state["step"])


def check_vocabulary(vocabulary: Vocabulary, state: dict[str, Any], source: object) -> None:
    """Compares the vocabulary with the one that the checkpoint was trained with.

    Raises:
        ConfigError: they differ; it names `source`, where the vocabulary is from.
    """
    if vocabulary.fingerprint() != state["vocabulary"]:
        raise ConfigError(
            f"the vocabulary of {source} ({len(vocabulary)} words, "
            f"{vocabulary.fingerprint()[:12]}) is not the one the run was trained with "
            f"({state['vocabulary'][:12]}); give the original text and data options, "
            "or start a new run in another folder"
        )
