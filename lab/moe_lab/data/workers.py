"""Calls a function in worker processes before its results are needed."""

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")
R = TypeVar("R")


def in_workers(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """Yields function(item) for each item, in order, computed in worker processes.

    Each worker computes at most two results in advance. Workers stop when the iterator is closed or
    when the parent process ends, even if the parent is killed. Workers ignore SIGINT and SIGTERM.
    An exception in a worker is raised in the parent process. The state of torch's global generator
    does not change. Tensors are sent in shared memory.

    Args:
        function: the function to call. Function, results and exceptions must be picklable.
        items: arguments of the calls, read in the parent process when a worker needs an item.
        num_workers: number of worker processes; 0 calls the function in the parent process. Unless
            Python's start method is fork, the program needs ``if __name__ == "__main__":``.
    """
    if num_workers == 0:
        return map(function, items)
    return _in_workers(function, items, num_workers)


def _in_workers(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    loader = DataLoader(
        _Calls(function),
        batch_size=None,
        sampler=items,
        num_workers=num_workers,
        collate_fn=_as_it_is,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # otherwise DataLoader uses the global generator
    )
    for result in loader:
        if isinstance(result, _Raised):
            raise result.error
        yield result


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error


class _Calls(Dataset[Any]):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.function(item)
        except Exception as error:
            # DataLoader would put the traceback into the message.
            error.add_note(f"raised in a worker process:\n{traceback.format_exc()}")
            return _Raised(error)


def _as_it_is(result: Any) -> Any:
    return result


def _ignore_signals(worker: int) -> None:
    """Ignores SIGINT and SIGTERM: the parent process receives them too and stops the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
