"""The benchmarks on several ranks: bytes, figures, and the limit of the bandwidth."""

import functools
import json
import os
import subprocess
from types import SimpleNamespace
from typing import get_args
from unittest.mock import patch

import pytest
from launch import launch
from moe_lab.analysis.cluster import plan
from moe_lab.analysis.devices import DEVICES
from moe_lab.benchmarks import cases
from moe_lab.benchmarks._distributed_ranks import BYTES, PASSES, Key, RankTimes
from moe_lab.benchmarks.distributed import print_results, results_of
from moe_lab.errors import ConfigError
from moe_lab.training.config import config_from_dict

from moe_ext.distributed import ExchangeUnit

# Each of 2 ranks has 2 experts. With k = 4 each token uses all of them, so the bytes are known.
WIDTH, TOKENS, K = 8, 6, 4


def results(folder, arguments):
    path = folder / "results.json"
    arguments = ["--processes", "2", "--rounds", "2", "--warm-up", "0", *arguments.split()]
    assert cases.run("distributed", [*arguments, "--hidden", "8", "--json", str(path)]) == 0
    return json.loads(path.read_text())["results"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs the ranks in processes that have imported the layer; the long tests use torchrun."""
    folder = tmp_path_factory.mktemp("benchmark")
    script = folder / "benchmark.py"
    script.write_text("import sys\nfrom moe_lab.__main__ import main\nsys.exit(main())\n")

    def start(command, env):
        done = launch(script, command[command.index("moe_lab") + 1 :], ranks=2)
        return subprocess.CompletedProcess(command, done.status)

    arguments = f"--chunks 1 2 --tokens {TOKENS} --experts 2 --k {K} --width {WIDTH}"
    with patch.object(cases.subprocess, "run", start):
        return results(folder, arguments)


def test_bytes_that_the_layer_sends(run):
    assert (*get_args(ExchangeUnit), cases.NODES) == cases.UNITS
    steps = [result for result in run if result["exchange"]]
    assert [(r["exchange"], r["chunks"]) for r in steps] == [
        ("rows", 1), ("rows", 2), ("tokens", 1), ("tokens", 2)
    ]  # fmt: skip
    for result in steps:
        assert 0 <= result["waits"] < 1 and result["by_raw"][1] > 0
        forward, backward = result["bytes"]["forward"], result["bytes"]["backward"]
        # Each token has 2 experts on the other rank: 2 rows, or one row for both.
        chunks = result["chunks"]
        number, counts = (2, 2 + chunks) if result["exchange"] == "rows" else (1, 3 * chunks)
        rows = 2 * TOKENS * number * 2 * WIDTH * 4
        assert forward["rows"] == backward["rows"] == rows
        gates = 2 * TOKENS * 2 * 4 if result["exchange"] == "tokens" else 0
        # An int32 index goes with each gate, and the gradient of the gate comes back.
        assert (forward["slots"], backward["slots"]) == (2 * gates, gates)
        # The other rank receives an int64 count for each chunk and each expert; with chunks of
        # tokens, for each expert in each chunk.
        assert (forward["counts"], backward["counts"]) == (2 * counts * 8, 0)
        # All-reduce of importance and load: 2 ranks, 2 vectors, 4 experts, 4 bytes.
        assert forward["losses"] == backward["losses"] == 2 * 2 * 4 * 4
        for counted in (forward, backward):
            assert counted["rows"] + counted["slots"] == counted["minimum"]


@pytest.mark.parametrize("exchange", ["rows", "tokens"])
def test_the_plan_of_a_cluster_has_the_same_bytes(run, exchange):
    moe = {"num_experts": 4, "k": K, "hidden_sizes": [8]}
    model = {"d_model": WIDTH, "layers": ["moe"], "moe": moe}
    config = config_from_dict({"model": model, "data": {"tokens_per_batch": TOKENS}})
    planned = plan(config, DEVICES["k40"], 2, exchange=exchange).exchange_bytes
    (result,) = (r for r in run if (r["exchange"], r["chunks"]) == (exchange, 1))
    sent = sum(b["rows"] + b["slots"] for b in result["bytes"].values())
    assert sent == 2 * planned


@pytest.mark.long
def test_bytes_of_a_hierarchical_layer(tmp_path):
    """With k1 = 2, a token that leaves twice needs two rows, of its k1 · k2 = 4 otherwise."""
    arguments = "--chunks 1 --tokens 6 --experts 8 --group-size 4 --k 2 --width 12"
    passes_of_exchange = {r["exchange"]: r["bytes"] for r in results(tmp_path, arguments)}
    for passes in passes_of_exchange.values():
        for counted in (passes or {}).values():
            assert counted["rows"] + counted["slots"] == counted["minimum"]
    for name in PASSES:
        assert (
            0
            < passes_of_exchange["groups"][name]["rows"]
            <= passes_of_exchange["rows"][name]["rows"] / 1.2
        )


def test_figures_worked_by_hand(capsys):
    """Two ranks, two rounds. A time is the time of the slower rank."""
    step = functools.partial(Key, 2, "step", "rows")
    seconds = {
        Key(1, "alone"): ([3.0, 3.0], None),
        Key(2, "alone"): ([4.0, 3.0], [2.0, 4.0]),
        Key(2, "transfers", "rows"): ([2.0, 2.0], [1.0, 2.0]),
        Key(2, "raw", "rows"): ([1.0, 2.0], [1.0, 1.0]),
        step(1): ([6.0, 6.0], [5.0, 6.0]),
        step(2): ([5.0, 5.0], [5.0, 5.0]),
    }
    everything = []
    for rank in (0, 1):
        rank_seconds = {key: samples[rank] for key, samples in seconds.items() if samples[rank]}
        waited = {key: [0.5 * s for s in samples] for key, samples in rank_seconds.items()}
        counted = dict.fromkeys(PASSES, dict.fromkeys(BYTES, 0) | {"rows": rank + 1, "counts": 10})
        passes = {key: counted for key in rank_seconds if key.what == "step"}
        everything.append(RankTimes(rank_seconds, waited, passes, 1.0))
    single, one, two = results_of(everything, SimpleNamespace(tokens=10))
    assert (single.processes, single.exchange, single.efficiency) == (1, None, 1.0)
    assert single.by_raw is single.hidden is None
    assert one.tokens_per_second == 2 * 10 / 6
    assert one.efficiency == 3 / 6
    assert one.by_alone[1] == pytest.approx(4 / 6)
    assert one.waits == 0.5
    assert (one.alone_ms, one.transfers_ms, one.raw_ms) == (4000, 2000, 1500)
    assert one.by_raw == pytest.approx([1.25, 1.5, 1.75])  # quartiles of 2 / 1 and 2 / 2
    assert one.raw_mb_per_second == pytest.approx((3 + 3 + 20 + 20) / 1.5 / 1e6)
    assert one.hidden is None  # one chunk
    assert two.hidden == (0.5, 0.5, 0.5)  # (6 - 5) / min(2, 4)
    assert two.bytes["forward"] == dict.fromkeys(BYTES, 0) | {"rows": 3, "counts": 20}
    print_results([single, one, two])
    out = capsys.readouterr().out
    assert "| 2 | rows | 1 | forward | 0.000 | 0.000 | – | 0.02 | 0.00 | 0.000 |" in out
    assert "| 2 | rows | 2000.00 | 1500.00 | 0 | 1.500 (1.250 to 1.750) |" in out
    assert "| 50% | 50% (50% to 50%) |" in out


def test_a_limited_link(monkeypatch):
    """Checks only the command, because limiting a link needs root."""
    commands = []

    def note(command, env):
        commands.append((command, env))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(cases.subprocess, "run", note)
    assert cases.run("distributed", ["--bandwidth", "200", "--processes", "1", "3"]) == 3
    ((command, env),) = commands
    assert command[:4] == ["unshare", "--net", "sh", "-c"]
    assert "tbf rate 1600mbit" in command[4]
    assert command[command.index("--nproc-per-node") + 1] == "3"
    program = ["--module", "moe_lab", "benchmark", "distributed"]
    assert command[-9:] == [*program, "--bandwidth", "200", "--processes", "1", "3"]
    assert env["OMP_NUM_THREADS"] == "1" and env["PATH"] == os.environ["PATH"]


def test_two_nodes(monkeypatch):
    """Checks only the command; two network namespaces need root."""
    commands = []
    monkeypatch.setattr(
        cases.subprocess,
        "run",
        lambda command, env: (
            commands.append((command, env)) or subprocess.CompletedProcess(command, 0)
        ),
    )
    assert cases.run("distributed", ["--bandwidth", "200", "--processes", "4", "--nodes", "2"]) == 0
    ((command, env),) = commands
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert "veth" in command[4] and "tbf rate 1600mbit" in env["LIMIT"]
    with pytest.raises(ConfigError, match="--processes must be one multiple of --nodes = 2"):
        cases.run("distributed", ["--processes", "3", "--nodes", "2"])


@pytest.mark.long
def test_bytes_of_a_recurrent_layer(tmp_path):
    """With k = E, a row of each rank goes to the other one, with the expert of each rank."""
    path = tmp_path / "results.json"
    arguments = "--batch 1 32 --steps 3 --width 4 --experts 2 --k 2 --rounds 2 --json"
    assert cases.run("recurrent-exchange", [*arguments.split(), str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["batch"], row["way"]) for row in rows] == [
        (1, "rows"), (1, "gathered"), (32, "rows"), (32, "gathered")
    ]  # fmt: skip
    weights = 2 * 2 * 8 * 16 * 4  # two passes, two experts [8, 16]
    for row in rows:
        state = 2 * row["batch"] * 3 * (8 + 16) * 4  # of two ranks; an input and an output
        assert row["predicted"] == (2 * state if row["way"] == "rows" else weights)
        # Rows also have counts: each of two ranks sends one expert's and one chunk's each step.
        counts = 2 * 3 * 2 * 8 if row["way"] == "rows" else 0
        assert row["sent"] == row["predicted"] + counts
    assert [row["chosen"] for row in rows] == [True, False, False, True]
