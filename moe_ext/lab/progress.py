"""Progress bars for what may take more than a moment."""

from collections.abc import Iterable, Sized
from typing import TypeVar

__all__ = ["progress"]

T = TypeVar("T")


def progress(
    items: Iterable[T], title: str | None, unit: str, total: int | None = None
) -> Iterable[T]:
    """The items, with a bar while they are taken, if that lasts longer than a second.

    The bar is on stderr and goes when the items have ended. Where stderr is no terminal, or tqdm is
    not installed, there is none.

    Args:
        items: what to go through, once.
        title: what is being done; None is no bar.
        unit: what an item is.
        total: how many there are; None is their len(), or unknown.
    """
    if title is None:
        return items
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
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
