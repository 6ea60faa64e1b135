"""Puts names in front of errors: of the weight that is wrong, and of the function of the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["errors_of_function", "errors_of_weight"]


@contextmanager
def errors_of_function(name: str) -> Iterator[None]:
    """Begins errors of a public function with its name, so that no other code has to know it.

    Use it as a decorator.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{name}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@contextmanager
def errors_of_weight(name: str) -> Iterator[None]:
    """Says in errors of values, such as a scale that is no number, which weight has them."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
