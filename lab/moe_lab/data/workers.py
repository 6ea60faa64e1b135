"""Calls a function in worker processes before its results are needed."""

import pickle
import re
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from moe_lab.errors import ConfigError

# torch's errors when a tensor cannot be moved to shared memory.
_SHARED_MEMORY = re.compile(r"/torch_\d|shared memory")

T = TypeVar("T")
R = TypeVar("R")


def in_workers(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """Yields function(item) for each item, in order, computed in worker processes.

    Each worker computes at most two results in advance; the items are read when a worker needs
    them. Workers stop when the iterator is closed or when the parent process ends, even if the
    parent is killed. Workers ignore SIGINT and SIGTERM. An exception in a worker is raised in the
    parent process. The state of torch's global generator does not change. Tensors are sent in
    shared memory; ConfigError says if it is full. Function, results and exceptions must be
    picklable. Without workers, the parent process calls the function.
    """
    if num_workers == 0:
        yield from map(function, items)
        return
    loader = DataLoader(
        _Calls(function),
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # otherwise DataLoader uses the global generator
    )
    try:
        results = iter(loader)
    except OSError as error:  # semaphores need shared memory too
        raise _shared_memory_error(error) from error
    try:
        for pickled in results:
            result = pickle.loads(pickled)
            if isinstance(result, _Raised):
                raise result.error
            yield result
    finally:
        del results  # ends the workers; the traceback of an error would keep the iterator


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error


class _Calls(Dataset[Any]):
    """Returns pickled results: if DataLoader cannot pickle a result, the parent hangs."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, item: Any) -> bytes:
        try:
            return _pickled(self.function(item))
        except Exception as error:
            # DataLoader would put the traceback into the message.
            error.add_note(f"raised in a worker process:\n{traceback.format_exc()}")
            raised = _Raised(error)
        try:
            return _pickled(raised)
        except Exception:
            text = f"{type(raised.error).__name__}: {raised.error}"
            return _pickled(_Raised(RuntimeError(text)))


def _pickled(value: Any) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(value))
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) or _SHARED_MEMORY.search(str(error)):
            raise _shared_memory_error(error) from error
        raise


def _shared_memory_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"the shared memory /dev/shm must have room for the batches of the workers, got: {error}; "
        "make it larger (docker run --shm-size=1g), or lower data.num_workers or "
        "data.tokens_per_batch"
    )


def _as_it_is(result: Any) -> Any:
    return result


def _ignore_signals(worker: int) -> None:
    """Ignores SIGINT and SIGTERM: the parent process receives them too and stops the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
