"""Keeps transformers quiet."""

import sys

import pytest


@pytest.fixture(autouse=True)
def quiet():
    """Hides the messages and the progress bars of transformers, if a test has imported it."""
    if "transformers" in sys.modules:
        logging = sys.modules["transformers"].utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
