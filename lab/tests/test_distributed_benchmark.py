"""The benchmark of expert parallelism: bytes, figures, and the limit of the bandwidth."""

import functools
import json
import os
import pathlib
import subprocess

import pytest
from moe_lab.analysis.cluster import DEVICES, plan
from moe_lab.benchmarks import distributed
from moe_lab.benchmarks._distributed_ranks import PASSES, Bytes, Found, Key
from moe_lab.benchmarks._distributed_report import print_results, results_of
from moe_lab.training.config import config_from_dict

# Each of 2 ranks has 2 experts. With k = 4 each token uses all of them, so the bytes are known.
WIDTH, TOKENS, K = 8, 6, 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "results"
    arguments = ["--processes", "2", "--chunks", "1", "2", "--rounds", "2", "--warm-up", "0"]
    arguments += ["--tokens", str(TOKENS), "--experts", "2", "--k", str(K), "--hidden", "8"]
    arguments += ["--width", str(WIDTH), "--json", f"{path}.json", "--plot", f"{path}.png"]
    assert distributed.main(arguments) == 0
    assert pathlib.Path(f"{path}.png").stat().st_size > 1000
    return json.loads(pathlib.Path(f"{path}.json").read_text())["results"]


def test_bytes_that_the_layer_sends(run):
    steps = [result for result in run if result["exchange"]]
    assert [(r["exchange"], r["chunks"]) for r in steps] == [
        ("rows", 1), ("rows", 2), ("tokens", 1), ("tokens", 2)
    ]  # fmt: skip
    for result in steps:
        forward, backward = result["bytes"]["forward"], result["bytes"]["backward"]
        # Each token has 2 experts on the other rank: 2 rows, or one row for both.
        chunks = result["chunks"]
        number, counts = (2, 2 + chunks) if result["exchange"] == "rows" else (1, 3 * chunks)
        rows = 2 * TOKENS * number * 2 * WIDTH * 4
        assert forward["rows"] == backward["rows"] == rows
        gates = 2 * TOKENS * 2 * 4 if result["exchange"] == "tokens" else 0
        assert (forward["gates"], backward["gates"]) == (gates, gates)
        assert (forward["indices"], backward["indices"]) == (2 * gates, 0)
        # The other rank receives an int64 count for each chunk and each expert; with chunks of
        # tokens, for each expert in each chunk.
        assert forward["counts"] == 2 * counts * 8
        assert backward["counts"] == 0
        # All-reduce of importance and load: 2 ranks, 2 vectors, 4 experts, 4 bytes.
        assert forward["losses"] == backward["losses"] == 2 * 2 * 4 * 4
        for each in (forward, backward):
            assert each["rows"] + each["gates"] + each["indices"] == each["minimum"]


@pytest.mark.parametrize("exchange", ["rows", "tokens"])
def test_the_plan_of_a_cluster_has_the_same_bytes(run, exchange):
    moe = {"num_experts": 4, "k": K, "hidden_sizes": [8]}
    model = {"d_model": WIDTH, "layers": ["moe"], "moe": moe}
    config = config_from_dict({"model": model, "data": {"tokens_per_batch": TOKENS}})
    planned = plan(config, DEVICES["k40"], 2, exchange=exchange).exchange_bytes
    (result,) = (r for r in run if (r["exchange"], r["chunks"]) == (exchange, 1))
    sent = sum(b["rows"] + b["gates"] + b["indices"] for b in result["bytes"].values())
    assert sent == 2 * planned


@pytest.fixture(scope="module")
def grouped_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "results.json"
    arguments = ["--processes", "2", "--chunks", "1", "--rounds", "2", "--warm-up", "0"]
    arguments += ["--tokens", "6", "--experts", "8", "--group-size", "4", "--k", "2"]
    assert (
        distributed.main([*arguments, "--hidden", "8", "--width", "12", "--json", str(path)]) == 0
    )
    return {r["exchange"]: r["bytes"] for r in json.loads(path.read_text())["results"]}


def test_bytes_of_a_hierarchical_layer(grouped_run):
    """With k1 = 2, a token that leaves twice needs two rows, of its k1 · k2 = 4 otherwise."""
    for found in grouped_run.values():
        for each in (found or {}).values():
            assert each["rows"] + each["gates"] + each["indices"] == each["minimum"]
    groups, rows = grouped_run["groups"], grouped_run["rows"]
    for name in ("forward", "backward"):
        assert 0 < groups[name]["rows"] <= rows[name]["rows"] / 1.2


def test_figures_of_a_run(run):
    for result in run:
        speed = 1e3 * 2 * TOKENS / result["step_ms"][1]
        assert result["tokens_per_second"] == pytest.approx(speed)
        assert result["efficiency"] is None  # needs a run with one rank
        assert 0 <= result["waits"] < 1
        if result["exchange"]:
            assert result["by_raw"][1] > 0


def test_figures_worked_by_hand(capsys):
    """Two ranks, two rounds. A time is the time of the slower rank."""
    args = type("Arguments", (), {"tokens": 10})
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
        of_rank = {key: each[rank] for key, each in seconds.items() if each[rank]}
        waited = {key: [0.5 * s for s in each] for key, each in of_rank.items()}
        counted = {name: Bytes(rows=rank + 1, counts=10) for name in PASSES}
        passes = {key: counted for key in of_rank if key.what == "step"}
        everything.append(Found(of_rank, waited, passes, 1.0))
    single, one, two = results_of(everything, args)
    assert (single.processes, single.exchange, single.efficiency) == (1, "", 1.0)
    assert single.by_raw is single.hidden is None
    assert one.tokens_per_second == 2 * 10 / 6
    assert one.efficiency == 3 / 6
    assert one.by_alone[1] == pytest.approx(4 / 6)
    assert one.waits == 0.5
    assert (one.alone_ms, one.transfers_ms, one.raw_ms) == (4000, 2000, 1500)
    assert one.by_raw == pytest.approx([1.25, 1.5, 1.75])  # quartiles of 2 / 1 and 2 / 2
    assert one.raw_mb_per_second == pytest.approx((3 + 3 + 20 + 20) / 1.5 / 1e6)
    assert one.hidden == (0, 0, 0)
    assert two.hidden == (0.5, 0.5, 0.5)  # (6 - 5) / min(2, 4)
    assert two.bytes["forward"] == Bytes(rows=3, counts=20)
    print_results([single, one, two])
    out = capsys.readouterr().out
    assert "| 2 | rows | 1 | forward | 0.000 | 0.000 | 0.000 | – | 0.02 | 0.00 |" in out
    assert "| 2 | rows | 2000.00 | 1500.00 | 0 | 1.500 (1.250 to 1.750) |" in out
    assert "| 50% | 50 (50 to 50) % |" in out


def test_a_limited_link(tmp_path, monkeypatch):
    """Checks only the command, because limiting a link needs root."""
    commands = []

    def note(command, env):
        commands.append((command, env))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(distributed.subprocess, "run", note)
    monkeypatch.setattr(distributed.dist, "is_torchelastic_launched", lambda: False)
    assert distributed.main(["--bandwidth", "200", "--processes", "1", "3"]) == 3
    ((command, env),) = commands
    assert command[:4] == ["unshare", "--net", "sh", "-c"]
    assert "tbf rate 1600mbit" in command[4]
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[-5:] == ["--bandwidth", "200", "--processes", "1", "3"]
    assert env["OMP_NUM_THREADS"] == "1" and env["PATH"] == os.environ["PATH"]
