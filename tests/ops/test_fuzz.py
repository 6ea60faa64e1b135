"""Hostile arguments: fuzz_operators.py says what is changed and what must hold."""

import os

import pytest
from fuzz_operators import run_batch


def run(seed):
    _, failures = run_batch(seed)
    assert not failures, "\n\n".join(failures)


@pytest.mark.parametrize("seed", [0, 1])
def test_hostile_calls(seed):
    """5,000 calls, the same in every run."""
    run(seed)


@pytest.mark.long
@pytest.mark.parametrize("batch", range(40))
def test_other_hostile_calls(batch):
    """100,000 calls, other ones in every run; a failure names the seed of its batch."""
    run(int.from_bytes(os.urandom(6)))
