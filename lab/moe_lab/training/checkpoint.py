"""The checkpoints of a run, and the trained model of its newest checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from moe_ext.distributed import CheckpointError, Checkpoints, Loaded
from moe_lab.data import AnyVocabulary
from moe_lab.errors import ConfigError, config_errors
from moe_lab.models import AnyModel
from moe_lab.training.config import AnyConfig, config_from_file
from moe_lab.training.folder import load_vocabulary, vocabulary_file
from moe_lab.training.model import make_model

# What the state of a checkpoint holds; see `Trainer`.
_KEYS = ("tokens", "epoch", "batch", "config", "vocabulary", "text", "schedules")


def checkpoints_of(
    run: Path, process_group: ProcessGroup | None = None, keep: int = 1
) -> Checkpoints:
    """Opens the checkpoints in a run's folder; saving keeps the newest ``keep``."""
    return Checkpoints(run / "checkpoints", process_group, keep=keep)


def load_states(checkpoints: Checkpoints, run: Path, fallback: bool = False) -> Loaded:
    """Loads the training state of a run's newest checkpoint, without a model."""
    if not checkpoints.steps():
        raise ConfigError(
            f"there is no checkpoint in {run}; train first, or give the folder of a run"
        )
    delete = "; delete the checkpoint's folder to use the previous one"
    with config_errors(after=delete, kinds=CheckpointError):
        loaded = checkpoints.load(fallback=fallback)
    state = loaded.state
    known = isinstance(state, dict) and {*_KEYS} <= state.keys()
    if not known or not all(isinstance(state[key], str) for key in ("vocabulary", "text")):
        raise ConfigError(
            f"the checkpoint of step {loaded.step} in {run} must hold {', '.join(_KEYS)}, "
            "got the state of another program"
        )
    return loaded


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in evaluation mode, with its vocabulary, configuration and step."""

    model: AnyModel
    vocabulary: AnyVocabulary
    config: AnyConfig
    step: int


def load_run(run: str | Path, device: str = "cpu") -> TrainedModel:
    """Loads the model of a run from its newest checkpoint."""
    run = Path(run)
    checkpoints = checkpoints_of(run)
    step, state, _ = load_states(checkpoints, run)
    config = config_from_file(state["config"], run / "checkpoints")
    path = run / vocabulary_file(config.data)
    restore = f"; restore {path.name} in the run's folder"
    vocabulary = load_vocabulary(config.data, path, after=restore)
    check_vocabulary(vocabulary, state, path)
    model = make_model(config.model, len(vocabulary))
    checkpoints.load(model, step=step)
    return TrainedModel(model.to(device).eval(), vocabulary, config, step)


def check_vocabulary(vocabulary: AnyVocabulary, state: dict[str, Any], source: object) -> None:
    """Checks that a vocabulary is the vocabulary of a checkpoint."""
    if vocabulary.fingerprint() != state["vocabulary"]:
        raise ConfigError(
            f"the vocabulary of {source} must be the vocabulary of the run (SHA-256 "
            f"{state['vocabulary'][:12]}), got {len(vocabulary)} entries with SHA-256 "
            f"{vocabulary.fingerprint()[:12]}; give the original text and data options, "
            "or start a new run in another folder"
        )
