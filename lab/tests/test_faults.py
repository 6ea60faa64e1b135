"""The study that disturbs a training run on two nodes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from moe_lab.studies import faults

ROOT = Path(__file__).parents[2]


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
@pytest.mark.usefixtures("namespaces")
def test_a_killed_rank_and_a_flipped_bit(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(faults, "SMALL_MODEL", [*faults.SMALL_MODEL, f"data.corpus={corpus}"])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    report = tmp_path / "faults.json"
    # With this seed, a rank is killed first; then the run is killed and a bit is flipped.
    options = ["--faults", "2", "--kinds", "kill", "bit", "--seed", "1", "--json", str(report)]
    status = faults.main(options)
    printed, errors = capsys.readouterr()
    assert status == 0, printed + errors
    rows = [line for line in printed.splitlines() if line.startswith(("| kill", "| bit"))]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:5] for row in cells] == [
        ["kill", "1", "0", "1", "0"],
        ["bit", "1", "0", "1", "0"],
    ]
    found = json.loads(printed.splitlines()[-1])
    assert found.pop("steps") > 0
    assert found == {"faults": 2, "hung": 0, "same_losses": True}
    # The rank that was not killed says why it ended.
    (message,) = json.loads(report.read_text())["kill"]["messages"]
    assert message.startswith("error: another rank ended or did not answer within timeout=N")
