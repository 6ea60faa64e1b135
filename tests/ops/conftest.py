"""Drops the cases of operators that the emulation of CUDA cannot run."""

from itertools import compress
from operator import not_

from operators import ROWS

MOST_TOKENS = 60_000  # with two experts each; more take seconds
MOST_LOGITS = 5_000_000


def pytest_collection_modifyitems(config, items):
    possible = [is_possible(item) for item in items]
    config.hook.pytest_deselected(items=[*compress(items, map(not_, possible))])
    items[:] = compress(items, possible)


def is_possible(item):
    """Returns whether the device has a kernel, and is to run this case, which is not large."""
    callspec = getattr(item, "callspec", None)
    case = callspec.params if callspec else {}
    if case.get("device", "cpu") == "cpu" or not {"name", "sizes"} <= case.keys():
        return True
    if "cuda" in ROWS[case["name"]].lacks:
        return False
    if case["device"] != "emulated":
        return True
    sizes = case["sizes"]
    is_small = num_tokens(**sizes) <= MOST_TOKENS
    is_small = is_small and sizes.get("T", 0) * sizes.get("V", 0) <= MOST_LOGITS
    return is_small and item.get_closest_marker("emulated").args != (False,)


def num_tokens(T=0, k=1, N=0, counts=(), **_):
    return max(T, T * k // 2, N, sum(counts) // 2)
