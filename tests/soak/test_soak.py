"""The short forms of the soak tests, and the memory of a long run.

    pytest tests/soak --long

`restarts.py` and `faults.py` say how to run the long forms.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import faults
import pytest
import restarts
import torch

from moe_ext import HierarchicalMoE, MoE
from moe_ext.distributed import ExpertParallel, clip_grad_norm_, parallelize

STEPS = 2000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class TwoLayers(torch.nn.Module):
    """A flat and a hierarchical layer."""

    def __init__(self, group):
        super().__init__()
        options = {"hidden_sizes": (256,), "recompute": True}
        parallel = ExpertParallel(group, exchange="tokens", num_chunks=2)
        self.flat = MoE(64, 16, 2, parallel=parallel, **options)
        self.groups = HierarchicalMoE(64, 4, 8, 2, process_group=group, **options)

    def forward(self, x):
        y, aux = self.flat(x)
        z, more = self.groups(x + y)
        return z, aux.loss + more.loss


def train(group, rank):
    """Returns the mean resident set of this rank in each quarter of the steps."""
    draw = torch.Generator().manual_seed(rank)
    model = parallelize(TwoLayers(group), group)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    quarters = [[], [], [], []]
    for step in range(STEPS):
        num_tokens = int(torch.randint(0, 2048, (), generator=draw))
        y, loss = model(torch.randn(num_tokens, 64, generator=draw))
        (y.square().sum() / 2048 + loss).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        quarters[4 * step // STEPS].append(resident_bytes())
    return [mean(quarter) for quarter in quarters]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
def test_memory_does_not_grow(workers):
    for quarters in workers.run(2, train, seconds=900):
        assert quarters[3] <= 1.02 * quarters[1], quarters


@pytest.fixture
def python_path(monkeypatch):
    """Lets the ranks import what this process can import."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.mark.long
@pytest.mark.usefixtures("python_path")
def test_killed_ranks_continue(capsys):
    assert restarts.main(["--kills", "3"]) == 0, capsys.readouterr()
    report = json.loads(capsys.readouterr().out)
    assert report.pop("status") == report.pop("status_undisturbed") == 0
    assert report == {"kills": 3, "steps": 28, "of": 28, "same_losses": True}


@pytest.mark.long
@pytest.mark.usefixtures("python_path")
def test_killed_ranks_continue_in_other_numbers(capsys):
    arguments = ["--kind", "mesh", "--steps", "20", "--steps-between", "10"]
    assert restarts.main(arguments) == 0, capsys.readouterr()
    report = json.loads(capsys.readouterr().out)
    assert report["kills"] > 0 and report["steps"] == 20 and len({*report["sizes"]}) > 1


@pytest.fixture
def namespaces():
    """Skips the test if this process cannot make nodes."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if not Path("/dev/net/tun").exists():
        pytest.skip("needs /dev/net/tun")
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make network and mount namespaces")


@pytest.mark.long
@pytest.mark.usefixtures("namespaces", "python_path")
def test_a_killed_rank_and_a_flipped_bit(capsys):
    # With this seed, a rank is killed first; then the run is killed and a bit is flipped.
    status = faults.main(["--faults", "2", "--kinds", "kill", "bit", "--seed", "1"])
    printed, errors = capsys.readouterr()
    assert status == 0, printed + errors
    rows = [line for line in printed.splitlines() if line.startswith(("| kill", "| bit"))]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:5] for row in cells] == [
        ["kill", "1", "0", "1", "0"],
        ["bit", "1", "0", "1", "0"],
    ]
    report = json.loads(printed.splitlines()[-1])
    assert report.pop("steps") > 0
    assert report == {"faults": 2, "hung": 0, "same_losses": True}
    # The rank that was not killed says why it ended.
    (message,) = [line for line in printed.splitlines() if line.startswith("- kill, 1 times: ")]
    assert "error: " in message
