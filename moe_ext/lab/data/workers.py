"""Work that other processes do ahead of its use."""

import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")
R = TypeVar("R")


def in_workers(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Iterator[R]:
    """function(item) of each item, in their order, by `num_workers` processes; by this one for 0.

    The processes have at most two items each that were not taken yet. They end with the iterator,
    and with this process however that ends; SIGINT and SIGTERM they leave to it. What the function
    raises is raised here. torch's global generator is not moved. Tensors travel in shared memory.

    Args:
        function: and its results and errors can be pickled.
        items: taken here as they are needed.
        num_workers: how many processes. They start as Python starts processes: where that is not
            by fork, the caller's script needs `if __name__ == "__main__":`.
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
        generator=torch.Generator(),  # else it draws from the global one
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
            # DataLoader would make the traceback part of the message.
            error.add_note(f"raised in a worker process:\n{traceback.format_exc()}")
            return _Raised(error)


def _as_it_is(result: Any) -> Any:
    return result


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and a job's end reach all its processes; the first decides what is still needed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
