"""Hostile arguments: fuzz_operators.py says what is changed and what must hold."""

import os

import pytest
from fuzz_operators import run_batch


def run(*batch):
    _, failures = run_batch(*batch)
    assert not failures, "\n\n".join(failures)


def test_hostile_calls():
    """500 calls, the same in every run."""
    run(0, 500)


@pytest.mark.long
@pytest.mark.parametrize("batch", range(42))
def test_more_hostile_calls(batch):
    """5,000 calls, the same in every run, and 100,000 other ones; a failure names its seed."""
    run(batch if batch < 2 else int.from_bytes(os.urandom(6)))
