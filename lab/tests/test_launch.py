"""The process group of a training run."""

import pytest
from moe_lab.training import launch
from moe_lab.training.config import Config

import moe_ext.distributed


@pytest.fixture
def torchrun(monkeypatch):
    """Lets this process look like a rank of torchrun, without a process group."""
    monkeypatch.setattr(launch.dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(moe_ext.distributed, "init_process_group", lambda backend, timeout: None)
    monkeypatch.setattr(launch.dist, "destroy_process_group", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")


@pytest.mark.parametrize(
    "message",
    [
        "Application timeout caused pair closure",
        "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.77.0.2]:41190",
        "Timed out waiting 20000ms for recv operation to complete",
    ],
)
@pytest.mark.usefixtures("torchrun")
def test_a_lost_rank_is_one_clear_error(message):
    expected = "another rank ended or did not answer within timeout=600 seconds; see the errors"
    with pytest.raises(ConnectionError, match=expected), launch.process_group_of_run(Config()):
        raise RuntimeError(message)


@pytest.mark.usefixtures("torchrun")
def test_other_errors_stay():
    with pytest.raises(RuntimeError, match="a bug"), launch.process_group_of_run(Config()):
        raise RuntimeError("a bug")
