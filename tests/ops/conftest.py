"""Drops the cases of operators that the emulation of CUDA cannot run."""

from itertools import compress
from operator import not_

from operators import ROWS

MOST_TOKENS = 60_000  # with two experts each; more take seconds


def pytest_collection_modifyitems(config, items):
    possible = [is_possible(getattr(item, "callspec", None)) for item in items]
    config.hook.pytest_deselected(items=[*compress(items, map(not_, possible))])
    items[:] = compress(items, possible)


def is_possible(callspec):
    """Returns whether the operator has a kernel for the device, and whether its tokens are few."""
    sizes = callspec.params if callspec else {}
    if sizes.get("device", "cpu") == "cpu" or not {"name", "sizes"} <= sizes.keys():
        return True
    return "cuda" not in ROWS[sizes["name"]].lacks and (
        sizes["device"] != "emulated" or num_tokens(**sizes["sizes"]) <= MOST_TOKENS
    )


def num_tokens(T=0, k=1, N=0, counts=(), **_):
    return max(T, T * k // 2, N, sum(counts) // 2)
