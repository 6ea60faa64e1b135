"""Checkpoints of models with sharded experts; any number of ranks can load them.

The tensors have the names and shapes of the model of a single process. Each rank writes its block
of an expert tensor [E, …]. Each rank reads the block that it needs, even if several ranks wrote it.
"""

import atexit
import shutil
import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from moe_ext._plain_names import names_here
from moe_ext.checks import refuse, require, require_sizes
from moe_ext.distributed._checkpoint_folder import MAX_STEP, CheckpointFolder, sums_of, verify
from moe_ext.distributed._parameters import require_ranks
from moe_ext.distributed._planners import LoadPlanner, SavePlanner
from moe_ext.distributed._safe_files import pickled, read_metadata, unpickled, why
from moe_ext.distributed._state import (
    Key,
    ParamGroups,
    Part,
    flat,
    load_optimizers,
    merged_options,
    model_parts,
    new_optimizer_parts,
    optimizer_options,
    optimizer_parts,
    require_same_optimizers,
    require_same_shapes,
    whole_shapes,
)
from moe_ext.files import atomic_file
from moe_ext.ranks._membership import require_group
from moe_ext.ranks._process_groups import duplicate
from moe_ext.ranks.collectives import Ranks
from moe_ext.ranks.layout import Layout

__all__ = ["CheckpointError", "Checkpoints", "Loaded"]

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """Raised on all ranks with the same message if a checkpoint cannot be written or read."""


class Loaded(NamedTuple):
    """Holds the contents of a checkpoint other than the model and the optimizers.

    Attributes:
        step: the step of the checkpoint.
        state: the state that rank 0 saved.
        rank_state: the state that this rank saved; None if it saved none.
    """

    step: int
    state: Any
    rank_state: Any


class Checkpoints:
    """Saves and loads the checkpoints in a folder, atomically and verified by checksum.

    A crash at any moment leaves all existing checkpoints intact. All ranks must call each method
    together. If one rank fails, all ranks raise the same error. After a run went back to an earlier
    step, the next save deletes the checkpoints of later steps: they belong to an abandoned run.

    Args:
        folder: a folder that all ranks can access; the first save creates it.
        process_group: all ranks that train, or their mesh; None: only this rank.
        keep: number of the newest checkpoints to keep.
        stages: the ranks of a pipeline, one of each stage. The models to save and load are then the
            stages of the ranks. Their tensors have the names of the whole model, and process_group
            has the ranks of all stages. None: the models are whole.
        timeout: time that a rank waits for other ranks in `async_save`; None: torch's default.
            `save` and `load` use the timeout of the process group.

    Raises:
        TypeError: stages is not a process group.
        ValueError: keep is not a whole number of at least 1.

    Example:
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> checkpoints = Checkpoints("checkpoints")  # several ranks: pass the process group
        >>> checkpoints.async_save(1, model, [optimizer], {"tokens": 100})
        >>> checkpoints.wait()
        >>> checkpoints.load(model, [optimizer])
        Loaded(step=1, state={'tokens': 100}, rank_state=None)
    """

    def __init__(
        self,
        folder: str | Path,
        process_group: ProcessGroup | DeviceMesh | None = None,
        *,
        keep: int = 3,
        stages: ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        (keep,) = require_sizes("Checkpoints", keep=keep)
        self._folder = CheckpointFolder(Path(folder), keep)
        self._ranks = Layout.of(process_group, "Checkpoints").world
        require_group("Checkpoints: stages", stages, (ProcessGroup,))
        self._stages = Ranks(stages)
        self._timeout = timeout
        self._background: tuple[ThreadPoolExecutor, Ranks] | None = None
        self._under_way: Future[None] | None = None

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints in ascending order.

        Raises:
            CheckpointError: the file `latest` of the folder cannot be read.
        """
        try:
            return list(self._folder.checkpoints())
        except (OSError, ValueError) as error:
            raise CheckpointError(_reason(error)) from error

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        state: Any = None,
        rank_state: Any = None,
    ) -> None:
        """Writes a checkpoint; replaces an existing one of the same step.

        Args:
            step: the number of the checkpoint.
            model: the model, with or without the wrapper of `parallelize`.
            optimizers: the optimizers of the model's parameters.
            state: tensors, numbers, texts, and lists, tuples and dicts of these. Numbers of NumPy
                become those of Python. Only the state of rank 0 is saved.
                ``torch.serialization.add_safe_globals`` allows other classes.
            rank_state: an object like state. The rank_state of every rank is saved.

        Raises:
            TypeError: optimizers is not a list of optimizers.
            ValueError: step is not a whole number of at least 0.
            CheckpointError: a rank failed in this save or in the preceding `async_save`, or state
                contains another class. Or the folder has a later step, and no model was loaded
                since the last save. Existing checkpoints do not change.
        """
        self.wait()
        (step,) = require_sizes("Checkpoints", 0, step=self._same_step(step))
        parts, files = self._collect(step, model, optimizers, state, rank_state)
        self._write(self._ranks, step, parts, files)

    def async_save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        state: Any = None,
        rank_state: Any = None,
    ) -> None:
        """Copies all values in memory and returns; a background thread writes the checkpoint.

        The arguments are those of `save`. At most one save runs in the background: the next save or
        load waits for it and raises its error. Call `wait` before you destroy the process group.
        If no later call raises the error of a save, Python prints the error at exit.
        """
        self.wait()
        (step,) = require_sizes("Checkpoints", 0, step=self._same_step(step))
        parts, files = self._collect(step, model, optimizers, state, rank_state, copy=True)
        if self._background is None:
            # A separate group keeps the thread's collectives apart from those of the training.
            timeout = self._timeout or default_pg_timeout
            ranks = duplicate(self._ranks, "gloo", timeout)
            self._background = ThreadPoolExecutor(1), ranks
        thread, ranks = self._background
        self._under_way = thread.submit(self._write, ranks, step, parts, files)
        atexit.register(self.wait)  # reports an error that no later call raises

    def wait(self) -> None:
        """Blocks until no save runs in the background.

        Raises:
            CheckpointError: the background save failed.
        """
        atexit.unregister(self.wait)
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def load(
        self,
        model: nn.Module | None = None,
        optimizers: Iterable[Optimizer] = (),
        *,
        step: int | None = None,
        fallback: bool = False,
    ) -> Loaded:
        """Loads a checkpoint, which any number of ranks may have written.

        Loading never runs code from the checkpoint, and reads only files in its folder.

        Args:
            model: the model, with or without the wrapper of `parallelize`. None: load only state
                and rank_state.
            optimizers: optimizers of the same classes, whose groups have the same parameters, as
                those that were saved; (): load no optimizer. Options come from the checkpoint,
                except capturable, differentiable, foreach and fused.
            step: the step of the checkpoint; None: the newest checkpoint.
            fallback: whether to warn and load the preceding checkpoint if a checkpoint is
                corrupted.

        Returns:
            The step, state and rank_state, in a `Loaded`.

        Raises:
            CheckpointError: the checkpoint is missing or corrupted, or does not match the model or
                the optimizers. The model and the optimizers are not changed.
            TypeError: optimizers is not a list of optimizers.
            ValueError: optimizers are given without a model.
        """
        self.wait()
        optimizers = _require_optimizers(optimizers)
        rule = "be given with optimizers, whose parameters it names"
        require(model is not None or not optimizers, "Checkpoints.load: model", rule, model)
        step, path = self._intact(self._same_step(step), fallback)
        together = partial(_together, self._ranks, f"loading {path}")
        parts, options = together(
            lambda: ({}, []) if model is None else self._parts_and_options(model, optimizers)
        )
        self._require_different_stages(together, parts)
        shapes = whole_shapes(parts, self._ranks)
        options = merged_options(options, self._ranks)
        # No rank loads a tensor before all have checked what they will load.
        states, load = together(
            lambda: self._checked(path, model, optimizers, parts, shapes, options)
        )
        together(load)
        if model is not None:
            self._folder.continued_from = step
        return Loaded(step, *states)

    def _collect(
        self,
        step: int,
        model: nn.Module,
        optimizers: Iterable[Optimizer],
        state: Any,
        rank_state: Any,
        copy: bool = False,
    ) -> tuple[dict[Key, Part], dict[str, bytes]]:
        """Returns this rank's tensors, or copies if copy is set, and its other files' contents.

        The arguments are those of `save`.
        """
        optimizers = _require_optimizers(optimizers)
        together = partial(_together, self._ranks, self._saving(step))

        def collect() -> tuple[dict[Key, Part], list[tuple[str, ParamGroups]]]:
            self._require_group()
            parts, options = self._parts_and_options(model, optimizers)
            parts |= optimizer_parts(model, optimizers)
            if copy:
                stager = DefaultStager(StagingOptions(False, False, False, False))  # a plain copy
                values = stager.stage(flat(parts))
                assert isinstance(values, dict)
                parts = {k: p._replace(value=values[".".join(k)]) for k, p in parts.items()}
            return parts, options

        def other_files() -> dict[str, bytes]:
            files = {}
            if self._ranks.rank == 0:
                version = str(torch.__version__)
                files["state.pt"] = pickled("state", (state, options, version))
            if rank_state is not None:
                files[f"rank-{self._ranks.rank}.pt"] = pickled("rank_state", rank_state)
            return files

        parts, options = together(collect)
        self._require_different_stages(together, parts)
        options = merged_options(options, self._ranks)
        return parts, together(other_files)

    def _same_step(self, step: T) -> T:
        """Checks the step on all ranks together, and returns it; None is allowed in `load`."""
        steps = self._ranks.gather_objects(step)
        for number in steps:
            if number is not None:
                require_sizes("Checkpoints", 0, step=number)
                require(number < MAX_STEP, "Checkpoints: step", f"be below {MAX_STEP:.0e}", number)
        same = all(number == step for number in steps)
        require(same, "Checkpoints: step", "be equal on all ranks", steps)
        return step

    def _parts_and_options(
        self, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> tuple[dict[Key, Part], list[tuple[str, ParamGroups]]]:
        """Returns this rank's parts of the model and the options of its optimizers."""
        require_ranks("Checkpoints", model, self._ranks, self._stages)
        return model_parts(model), optimizer_options(model, optimizers)

    def _require_different_stages(
        self, together: Callable[[Callable[[], None]], None], parts: Mapping[Key, Part]
    ) -> None:
        """Raises CheckpointError on all ranks if two stages have a tensor of the same name."""
        if self._stages.size == 1:
            return
        names = [name for kind, name, *_ in parts if kind == "model"]
        number = Counter(chain.from_iterable(self._stages.gather_objects(names)))
        twice = sorted(name for name in number if number[name] > 1)
        rule = "have other names of tensors in each stage: those of the whole model"
        together(lambda: require(not twice, "Checkpoints: model", rule, twice[:8]))

    def _require_group(self) -> None:
        """Raises ValueError if the ranks' process group was destroyed: torch would save alone."""
        if self._ranks.size > 1 and not dist.is_initialized():
            rule = "exist until the save has ended (call wait before destroy_process_group)"
            refuse("Checkpoints: process_group", rule, None)

    def _saving(self, step: int) -> str:
        return f"saving step {step} in {self._folder.path}"

    def _write(
        self,
        ranks: Ranks,
        step: int,
        parts: Mapping[Key, Part],
        files: Mapping[str, bytes],
    ) -> None:
        folder, first = self._folder, ranks.rank == 0
        together = partial(_together, ranks, self._saving(step))

        def write_tensors() -> None:
            try:
                _write_tensors(ranks, folder.temporary(step), parts)
            finally:  # without a group, torch writes the tensors of each rank as if it were alone
                self._require_group()

        together(self._require_group)
        token = ranks.gather_objects(uuid4().hex)[0]
        together(lambda: folder.begin(step, token) if first else None)
        try:
            together(lambda: folder.require_shared(step, token))
            together(write_tensors)
            sums = together(lambda: _write_files(ranks.rank, folder.temporary(step), files))
            all_sums = ChainMap(*ranks.gather_objects(sums))
            together(lambda: folder.publish(step, all_sums) if first else None)
            together(lambda: folder.require_published(step))
        except CheckpointError:
            if first:
                folder.abandon(step)
            raise

    def _intact(self, step: int | None, fallback: bool) -> tuple[int, Path]:
        """Verifies checksums; returns the step and folder of the checkpoint that `load` must read.

        The arguments step and fallback are those of `load`.
        """
        ranks = self._ranks
        doing = f"loading from {self._folder.path}"
        present = ranks.gather_objects(_together(ranks, doing, self._folder.checkpoints))[0]
        if not present or step not in (None, *present):
            wanted = "a checkpoint" if step is None else f"step {step}"
            listed = ", ".join(map(str, present)) or "none"
            raise CheckpointError(f"{self._folder.path} must contain {wanted}, got {listed}")
        candidates = [item for item in present.items() if step is None or item[0] <= step]
        while True:
            number, path = candidates.pop()
            check = partial(verify, path, ranks.rank, ranks.size)
            try:
                _together(ranks, f"loading {path}", check)
            except CheckpointError as error:
                if not (fallback and candidates):
                    raise
                instead = candidates[-1][1]
                warnings.warn(f"{error}; loading {instead} instead", stacklevel=3)
            else:
                return number, path

    def _checked(
        self,
        path: Path,
        model: nn.Module | None,
        optimizers: Sequence[Optimizer],
        parts: dict[Key, Part],
        shapes: Mapping[str, torch.Size],
        options: Sequence[tuple[str, ParamGroups]],
    ) -> tuple[tuple[Any, Any], Callable[[], None]]:
        """Checks all of a checkpoint but the values of its tensors; changes nothing.

        parts are this rank's tensors of the model, shapes the full shapes by name. options are
        those of the optimizers, with the names of the parameters of all ranks.

        Returns:
            state and rank_state; and a function that loads the model and the optimizers.
        """
        state, saved_options, version = _common_state(path / "state.pt")
        own = path / f"rank-{self._ranks.rank}.pt"
        states = state, unpickled(own) if own.exists() else None
        if model is None:
            return states, lambda: None
        reader = _Reader(path, shapes)
        try:
            metadata = reader.read_metadata()
        except Exception as error:
            if version == torch.__version__:
                raise
            raise CheckpointError(
                f"torch {torch.__version__} cannot read a checkpoint written by torch {version}: "
                f"{_reason(error)}; use torch {version}"
            ) from error
        saved = {
            metadata.planner_data[name]: entry
            for name, entry in metadata.state_dict_metadata.items()
        }
        shapes_there = {
            key[1]: entry.size
            for key, entry in saved.items()
            if key[0] == "model" and isinstance(entry, TensorStorageMetadata)
        }
        require_same_shapes("the saved state", shapes_there, shapes)
        require_same_optimizers("the saved optimizers", saved_options, options)
        parts = parts | new_optimizer_parts(model, optimizers, saved)
        values = flat(parts)

        def load() -> None:
            planner = LoadPlanner(parts)
            try:
                with _errors_of(rank=0):
                    dcp.load(values, storage_reader=reader, planner=planner, no_dist=True)
            except (OSError, ValueError):
                raise
            except Exception as error:  # a corrupted file raises almost any error
                raise ValueError(f"the tensors in {path} cannot be read: {why(error)}") from error
            values_of_keys = {key: values[".".join(key)] for key in parts}
            load_optimizers(model, optimizers, values_of_keys, saved_options)

        return states, load


class _Reader(dcp.FileSystemReader):
    """Reads checkpoints of earlier versions under the current names, without wrappers."""

    def __init__(self, path: Path, wanted: Iterable[str]) -> None:
        super().__init__(path)
        self._wanted = list(wanted)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        keys: dict[str, Key] = metadata.planner_data
        names = names_here({key[1] for key in keys.values()}, self._wanted)
        new = {old: (key[0], names[key[1]], *key[2:]) for old, key in keys.items()}
        fqn = {old: ".".join(key) for old, key in new.items()}
        return replace(
            metadata,
            planner_data={fqn[old]: key for old, key in new.items()},
            state_dict_metadata={fqn[k]: v for k, v in metadata.state_dict_metadata.items()},
            storage_data={
                replace(index, fqn=fqn[index.fqn]): v for index, v in metadata.storage_data.items()
            },
        )


def _require_optimizers(optimizers: Iterable[Optimizer]) -> tuple[Optimizer, ...]:
    """Returns the optimizers; raises TypeError unless they are a list of optimizers."""
    given = tuple(optimizers) if isinstance(optimizers, Iterable) else ()
    wrong = [type(item).__name__ for item in given if not isinstance(item, Optimizer)]
    if wrong or not isinstance(optimizers, Iterable):
        kind = type(optimizers).__name__ + (f" of {', '.join(wrong)}" if wrong else "")
        rule = "must be a list of torch.optim.Optimizer"
        raise TypeError(f"Checkpoints: optimizers {rule}, got {kind}")
    return given


def _together(ranks: Ranks, doing: str, function: Callable[[], T]) -> T:
    """Returns function(); if it fails on a rank, all ranks raise an error, prefixed by doing."""
    reason = cause = None
    try:
        result = function()
    except Exception as error:
        reason, cause = _reason(error), error
    failed: dict[str, list[str]] = {}  # reason -> ranks
    for rank, text in enumerate(ranks.gather_objects(reason)):
        if text is not None:
            failed.setdefault(text, []).append(str(rank))
    if not failed:
        return result
    texts = [
        text if len(where) == ranks.size else f"{text} (rank {', '.join(where)})"
        for text, where in failed.items()
    ]
    raise CheckpointError(f"{doing}: {'; '.join(texts)}") from cause


def _write_tensors(ranks: Ranks, folder: Path, parts: Mapping[Key, Part]) -> None:
    try:
        with _errors_of(ranks.rank):
            dcp.save(
                flat(parts),
                storage_writer=dcp.FileSystemWriter(folder),
                planner=SavePlanner(parts),
                process_group=ranks.group,
                no_dist=ranks.size == 1,
            )
    except RuntimeError as error:  # torch does not report why a write failed
        free = shutil.disk_usage(folder).free
        raise OSError(f"{error} (the disk has {free:,} bytes free)") from error


def _write_files(rank: int, folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Writes files to folder; returns the checksums of all files that this rank wrote there."""
    for name, content in files.items():
        with atomic_file(folder / name) as file:
            file.write(content)
    first = [".metadata"] if rank == 0 else []
    return sums_of(folder, [*files, *first, *(path.name for path in folder.glob(f"__{rank}_*"))])


@contextmanager
def _errors_of(rank: int) -> Iterator[None]:
    """Reraises the original error of one rank; ignores torch's warning for a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            yield
        except CheckpointException as failed:
            if rank in failed.failures:
                raise failed.failures[rank][0] from None


def _common_state(path: Path) -> tuple[Any, list[tuple[str, ParamGroups]], str]:
    """Reads the state, the options of the optimizers and the version of torch."""
    content = unpickled(path)
    match content:
        case (state, list(options), str(version)) if all(
            isinstance(kind, str) and all(isinstance(group, dict) for group in groups)
            for kind, groups in options
        ):
            return state, options, version
    raise ValueError(f"{path} must hold a state, the options of optimizers and a version of torch")


def _reason(error: Exception) -> str:
    """Returns an error as text; with the name of its class, if the text alone is not clear."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    known = isinstance(error, CheckpointError | ValueError)
    return str(error) if known else f"{type(error).__name__}: {error}"
