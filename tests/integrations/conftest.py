"""What several tests of models use."""

import sys

import pytest
from optional import Optional

packed_checkpoints = Optional("packed_checkpoints")


@pytest.fixture(autouse=True)
def quiet():
    """Hides the messages and the progress bars of transformers, if a test has imported it."""
    if "transformers" in sys.modules:
        logging = sys.modules["transformers"].utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Returns a file with experts in Q4_0, query layers in Q8_0, and its dequantized model."""
    path = tmp_path_factory.mktemp("mixed") / "model.gguf"
    kind = packed_checkpoints.TYPES.Q4_0
    return path, packed_checkpoints.write_gguf(path, "qwen3_moe", kind)


@pytest.fixture(scope="module")
def mixed_path(mixed):
    return mixed[0]
