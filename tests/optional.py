"""Packages that are imported when a test needs them, not when tests are collected.

They take seconds to import, and each test worker collects all tests.
"""

import pytest


class Optional:
    """A package; a test that uses it is skipped if it is missing."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):  # pytest asks each name of a file whether it is a test
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)
