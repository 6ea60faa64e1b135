"""The files of a run's folder:

    config.toml  vocabulary.txt  metrics.jsonl  checkpoints/  tensorboard/

(wordpieces.model instead of vocabulary.txt for a translation model.)

Each is written so that a crash leaves the old one or the new one, whole. config.toml comes first:
where it is, there is a run to resume. The checkpoints are those of `moe_ext.distributed`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from moe_ext.distributed import CheckpointError, Checkpoints, Loaded
from moe_ext.lab.data import AnyVocabulary, Vocabulary, Wordpieces
from moe_ext.lab.models import AnyModel
from moe_ext.lab.training.config import AnyConfig, ConfigError, TranslationConfig, config_from_dict
from moe_ext.lab.training.model import make_model


def checkpoints_of(
    run: Path, process_group: ProcessGroup | None = None, keep: int = 1
) -> Checkpoints:
    """The checkpoints in a run's folder."""
    return Checkpoints(run / "checkpoints", process_group, keep=keep)


def load_states(checkpoints: Checkpoints, run: Path) -> Loaded:
    """What the newest checkpoint of a run holds beside the model.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if not checkpoints.steps():
        raise ConfigError(
            f"there is no checkpoint in {run}; train first, or give the folder of a run"
        )
    try:
        return checkpoints.load()
    except CheckpointError as error:
        raise ConfigError(f"{error}; delete its folder to use the one before") from error


@dataclass(frozen=True)
class TrainedModel:
    """A model from its newest checkpoint, in evaluation mode, and what is needed to use it."""

    model: AnyModel
    vocabulary: AnyVocabulary
    config: AnyConfig
    step: int


def load_run(run: str | Path, device: str = "cpu") -> TrainedModel:
    """The newest model of a run folder.

    Raises:
        ConfigError: the folder does not hold one.
    """
    run = Path(run)
    checkpoints = checkpoints_of(run)
    step, state, _ = load_states(checkpoints, run)
    config = config_from_dict(state["config"])
    path = run / vocabulary_file(config)
    kind = Wordpieces if isinstance(config, TranslationConfig) else Vocabulary
    try:
        vocabulary: AnyVocabulary = kind.load(path)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{error}; restore the run's {path.name}") from error
    check_vocabulary(vocabulary, state, path)
    model = make_model(config.model, len(vocabulary))
    checkpoints.load(model, step=step)
    return TrainedModel(model.to(device).eval(), vocabulary, config, step)


def vocabulary_file(config: AnyConfig) -> str:
    """Its name in the folder of a run."""
    return "wordpieces.model" if isinstance(config, TranslationConfig) else "vocabulary.txt"


def check_vocabulary(vocabulary: AnyVocabulary, state: dict[str, Any], source: object) -> None:
    """Compares the vocabulary with the one that the checkpoint was trained with.

    Raises:
        ConfigError: they differ; it names `source`, where the vocabulary is from.
    """
    if vocabulary.fingerprint() != state["vocabulary"]:
        raise ConfigError(
            f"the vocabulary of {source} ({len(vocabulary)} entries, "
            f"{vocabulary.fingerprint()[:12]}) is not the one the run was trained with "
            f"({state['vocabulary'][:12]}); give the original text and data options, "
            "or start a new run in another folder"
        )
