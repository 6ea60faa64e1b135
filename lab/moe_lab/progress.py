"""Progress bars for long loops."""

from collections.abc import Iterable, Sized
from typing import TypeVar

from tqdm import tqdm  # type: ignore[import-untyped]

__all__ = ["progress"]

T = TypeVar("T")


def progress(
    items: Iterable[T], title: str | None, unit: str, total: int | None = None
) -> Iterable[T]:
    """Iterates over the items and shows a progress bar on stderr, if title is not None.

    The bar appears after one second and disappears after the last item. No bar is shown if stderr
    is not a terminal. `total` is the number of items, by default their length if they have one.
    """
    if title is None:
        return items
    if total is None and isinstance(items, Sized):
        total = len(items)
    return tqdm(
        items,
        desc=title,
        unit=f" {unit}",
        unit_scale=total is None,  # 123k in place of 123456
        total=total,
        delay=1,
        leave=False,
        disable=None,
        dynamic_ncols=True,
    )
