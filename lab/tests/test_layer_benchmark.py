"""The benchmark of the experts' computation: peers, hardware limits, figures and report."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch
from moe_lab.benchmarks import layer, measurement, peers, tables
from moe_lab.benchmarks.cases import run
from moe_lab.benchmarks.harness import Row, clock_of, host_seconds
from moe_lab.benchmarks.measurement import GEMM, STREAM
from moe_lab.benchmarks.memory import peak_allocated_mib
from moe_lab.benchmarks.peers import FORWARD, PASSES, PEERS, TRAINING, Kind, Peer, Problem
from moe_lab.benchmarks.roofline import Work, experts_work, limit
from moe_lab.benchmarks.shapes import GPU_SHAPES, PEER_NAMES, Shape
from tiny import shrink_probes


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    shrink_probes(monkeypatch)


SHAPE = Shape(48, 5, 2, 16, 32)
RATES = {GEMM: 1e12, STREAM: 1e11}
QUICK = ["--threads", "1", "--rounds", "2", "--seconds", "0"]


def options(**changes):
    given = {"rounds": 3, "seconds": 0.0, "memory": 1.0, "patience": 10.0, "threads": [1]}
    more = {"clock": host_seconds, "long": 0.5, "device": "cpu"}
    return SimpleNamespace(**given | more | changes)


def test_routing_follows_the_popularity_and_repeats_no_expert():
    torch.manual_seed(0)
    for routing, E, k in (("uniform", 6, 3), ("zipf", 6, 3), ("hierarchical", 16, 4)):
        index = peers.random_routing(Shape(500, E, k, 1, 1, routing))
        assert index.shape == (500, k)
        assert all(len(set(row)) == k for row in index.tolist())
    groups = (index // 4).sort(dim=-1).values
    assert torch.equal(groups[:, 0::2], groups[:, 1::2])  # two experts in each of two groups
    # Two experts with weights 1 and 1/2: one gets 2/3 of 20,000 tokens. Six standard
    # deviations are 0.02, so fewer than one seed in 10^8 fails.
    counts = peers.random_routing(Shape(20000, 2, 1, 1, 1, "zipf")).flatten().bincount()
    assert abs(counts.max().item() / 20000 - 2 / 3) < 0.02


def test_work_by_hand():
    # 2 tokens, 3 rows, 2 of 4 experts are used. An expert 5 -> 7 -> 5 has 70 weights and as many
    # multiply-adds per row.
    forward, training = experts_work(2, 3, 2, 4, 5, 7, gated=False, itemsize=4)
    assert forward == (2 * 3 * 70, 4 * (10 + 2 * 70 + 10))
    backward_bytes = 4 * (10 + 10 + 2 * 70 + 3 * 7 + 10 + 4 * 70)
    assert training == (3 * forward.flops, forward.bytes + backward_bytes)
    forward, training = experts_work(2, 3, 2, 4, 5, 7, gated=True, itemsize=2)
    assert forward == (2 * 3 * 105, 2 * (10 + 2 * 105 + 10))
    assert training.bytes == forward.bytes + 2 * (30 + 2 * 105 + 3 * 14 + 4 * 105)
    assert limit(Work(600, 50), 100, 10) == 6 and limit(Work(600, 90), 100, 10) == 9


PACKAGES = {
    **{"HF": "transformers", "Sc": "scattermoe"},
    **{"mi": "mixture_of_experts", "st": "st_moe_pytorch"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PEERS)
def test_peers_have_our_results_and_gradients(name, dtype, device):
    if name[:2] in PACKAGES:
        pytest.importorskip(PACKAGES[name[:2]])
    if name[:2] == "Sc" and device == "cpu":
        pytest.skip("ScatterMoE needs a GPU")
    kind = PEERS[name]
    problem = Problem(SHAPE._replace(routing="zipf"), dtype, kind.activation, device)
    problem.expert_index[problem.expert_index == 3] = 4  # 3 has no tokens, some have 4 twice
    expected, actual = (problem.results(kind, TRAINING) for kind in ("ours", name))
    assert set(actual) == {"y", "dx", "dgates", "dW1", "dW2"} and tuple(PEERS) == PEER_NAMES
    measurement.check(actual, expected)


def wrong_gradient(problem):
    """Builds a peer that doubles the gradient of the last expert's second matrix."""
    right = peers.build_moe_ext(problem)
    twice = lambda results: [results[0], [*results[1][:-1], 2 * results[1][-1]]]  # noqa: E731
    return Peer(right.parameters, right.forward, twice)


def not_a_number(problem):
    right = peers.build_moe_ext(problem)
    return Peer(right.parameters, lambda x, gates: right.forward(x, gates) * torch.nan)


def raises(error):
    def build(problem):
        raise error

    return build


def test_wrong_or_missing_peers_are_not_timed(monkeypatch):
    missing = raises(ImportError("no module named nothing"))
    extra = {
        "wrong": Kind("relu", wrong_gradient),
        "nan": Kind("relu", not_a_number),
        "missing": Kind("relu", missing),
        "large": Kind("relu", missing, lambda problem, backward: peers.Extra(memory=2**31)),
        "slow": Kind("relu", missing, lambda problem, backward: peers.Extra(flops=2e13)),
        "half": Kind(
            "relu", peers.build_moe_ext, lambda p, backward: peers.Extra(bytes=2e12 * backward)
        ),
        "refuses": Kind("relu", raises(RuntimeError("no more than 1024 groups\nat line 7"))),
        "full": Kind("relu", raises(torch.OutOfMemoryError("tried to allocate"))),
    }
    monkeypatch.setattr(peers, "PEERS", extra)
    problem = Problem(SHAPE, torch.float32)
    functions, seconds, remarks, peak_mib = measurement.candidates(
        problem, list(extra), RATES, options()
    )
    assert peak_mib == {}  # only measured on a GPU
    timed = {(name, which) for name in ("ours", "experts", "dense", "half") for which in PASSES}
    assert set(seconds) == set(functions) == timed - {("half", TRAINING)}
    for name, text in {
        "wrong": "WRONG: dW2 differs from moe_ext by",
        "nan": "WRONG: y differs from moe_ext by nan",
        "missing": "not installed: no module named nothing",
        "large": "would need 2.0 GiB",
        "slow": "would take 20 s more",
        "refuses": "fails: no more than 1024 groups",
        "full": "out of memory",
    }.items():
        assert all(remarks[name, which].startswith(text) for which in PASSES)
    assert remarks["half", TRAINING] == "would take 20 s more" and ("half", FORWARD) not in remarks


def test_figures_from_given_seconds():
    """The peaks are 100 FLOP/s and 10 bytes/s; in the second round half of these."""
    work = {FORWARD: Work(200, 10), TRAINING: Work(200, 60)}  # limits 2 and 6 s; then 4 and 12 s
    work |= {"gemm": Work(1000, 0), "stream": Work(0, 100)}
    rounds = torch.tensor([1.0, 2.0, 1.0])
    seconds = {GEMM: 10 * rounds, STREAM: 10 * rounds}
    seconds |= {("ours", FORWARD): 4 * rounds, ("ours", TRAINING): 12 * rounds}
    seconds |= {("peer", FORWARD): 6 * rounds, ("peer", TRAINING): 18 * rounds}
    seconds |= {("seldom", FORWARD): torch.tensor([40.0])}
    seconds = {key: samples.tolist() for key, samples in seconds.items()}
    limits, figures = measurement.figures_of(seconds, work)
    assert limits == {FORWARD: 2000, TRAINING: 6000} and set(figures) == {"ours", "peer", "seldom"}
    for which in PASSES:
        base, peer = figures["ours"][which], figures["peer"][which]
        assert base["share_of_limit"] == (0.5, 0.5, 0.5) and base["ratio_to_ours"] == (1, 1, 1)
        assert peer["ratio_to_ours"] == (1.5, 1.5, 1.5) and peer["rounds"] == 3
    assert figures["ours"][FORWARD]["ms"] == (4000, 4000, 6000)
    assert figures["ours"][FORWARD]["gflops"] == pytest.approx(200 / 4 / 1e9)
    seldom = figures["seldom"][FORWARD]
    assert (seldom["rounds"], seldom["ratio_to_ours"]) == (1, (10, 10, 10))
    assert seldom["share_of_limit"] == (0.05, 0.05, 0.05)


def test_rounds_fit_into_the_time_without_slow_peers(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def takes(name, seconds):
        calls.append(name)
        now[0] += seconds

    first = {"ours": 1.0, "close": 2.0, "far": 2.75}
    functions = {(n, FORWARD): functools.partial(takes, n, seconds) for n, seconds in first.items()}
    machine = {GEMM: functools.partial(takes, "gemm", 0.25)}

    def rounds(seconds, most=21):
        samples = {GEMM: [0.5]} | {(name, FORWARD): [s] for name, s in first.items()}
        measurement.add_rounds(samples, machine, functions, options(seconds=seconds, rounds=most))
        return list(samples.values())

    # A round takes 4 · 0.25 + 2 · 3 = 7 s.
    assert rounds(30.0) == [[0.5] + [0.25] * 4, [1.0] * 5, [2.0] * 5, [2.75]]
    assert calls == (["gemm"] * 4 + ["ours"] * 2 + ["close"] * 2) * 4
    assert (len(rounds(0.0)[0]), len(rounds(1e9, most=7)[0])) == (2, 7)


NAMES = ["mask loop", "sort + slices", "sort + grouped_mm"]


def test_a_run_reports_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(measurement, "LONG_ON_CPU", 60.0)  # no peer counts as slow
    path, threads = tmp_path / "layer.json", torch.get_num_threads()
    arguments = ["--shapes", "48,5,2,16,32", "16,4,2,8,16,zipf", *QUICK, "--threads", "1", "2"]
    files = ["--plot", str(tmp_path / "layer.png"), "--profile", str(tmp_path / "layer.txt")]
    assert run("layer", [*arguments, "--peers", *NAMES, "--json", str(path), *files]) == 0
    assert (tmp_path / "layer.txt").read_text().count("moe_ext::experts") >= 4
    assert (tmp_path / "layer.png").stat().st_size > 10_000
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    for part in ("BLAS", "GEMM peak", "float32, threads: 2", "best peer", "speed-up over threads"):
        assert part in out
    record = json.loads(path.read_text())
    assert record["arguments"]["rounds"] == "2" and str(tmp_path) not in path.read_text()
    assert [(r["shape"][:2], r["threads"]) for r in record["results"]] == [
        (shape, n) for shape in ([48, 5], [16, 4]) for n in (1, 2)
    ]
    for result in record["results"]:
        assert set(result["figures"]) == {"ours", "experts", "dense", *NAMES}
        assert not result["remarks"]
        for figures in (
            by_pass[which] for by_pass in result["figures"].values() for which in PASSES
        ):
            low, middle, high = figures["ms"]
            assert 0 < low <= middle <= high and figures["rounds"] == 2
        assert result["gemm_gflops"] > 0 and result["limit_ms"][TRAINING] > 0
    # The report of the JSON file has the tables of the run.
    assert run("layer", ["--report", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_reports_of_several_occasions_are_medians(capsys, tmp_path):
    def figures(ms):
        more = {"share_of_limit": [0, 0.5 / ms, 1], "ratio_to_ours": [0, ms / 10, 9]}
        return {"rounds": 1, "ms": [ms - 1, ms, ms + 1], "gflops": 8 / ms} | more

    paths = []
    for number, (base, peer) in enumerate([(10, 12), (14, None), (11, 22)]):
        entries = {"ours": {which: figures(base) for which in PASSES}}
        entries |= {"mask loop": {TRAINING: figures(peer)}} if peer else {}
        result = {
            "name": "e4", "shape": [8, 4, 1, 2, 2, "uniform"], "activation": "relu", "hidden": 2,
            "used_experts": 4, "dtype": "float32", "threads": 1, "gemm_gflops": 100 + number,
            "stream_gbytes": 10 - number, "figures": entries, "remarks": {}, "peak_mib": {},
            "limit_ms": dict.fromkeys(PASSES, number),
        }  # fmt: skip
        record = {"environment": f"machine {number // 2}", "versions": "", "arguments": {}}
        record |= {"results": [result], "memory": [], "routing": []}
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(record | {"left_out": [f"problem {number}"]}))
    path = tmp_path / "all.json"
    assert run("layer", ["--report", *map(str, paths), "--json", str(path)]) == 0
    out = capsys.readouterr().out
    for part in (
        "machine 0; machine 1",
        "up to 3 runs",
        "- problem 2",
        "11 (10-14)",
        "(1.70) | 1.70",
    ):
        assert part in out
    (result,) = json.loads(path.read_text())["results"]
    assert (result["gemm_gflops"], result["stream_gbytes"]) == (101, 9)
    assert result["limit_ms"] == dict.fromkeys(PASSES, 1) and result["occasions"] == 3
    spread = {"share_of_limit": [0.5 / 14, 0.5 / 11, 0.05], "ratio_to_ours": [1, 1.1, 1.4]}
    medians = {"rounds": 3, "ms": [10, 11, 14], "gflops": 8 / 11} | spread
    assert result["figures"]["ours"][TRAINING] == medians
    assert result["figures"]["mask loop"][TRAINING]["ms"] == [12, 17, 22]
    # The merged file gives the same report as its parts.
    assert run("layer", ["--report", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_a_problem_that_does_not_fit_is_left_out(monkeypatch, capsys, tmp_path):
    def problem(shape, *arguments):
        if shape.tokens == 48:
            raise torch.OutOfMemoryError("tried to allocate")
        return Problem(shape, *arguments)

    monkeypatch.setattr(layer, "Problem", problem)
    path = tmp_path / "layer.json"
    arguments = ["--shapes", "48,5,2,16,32", "16,4,2,8,16", *QUICK]
    arguments += ["--peers", "HF eager", "--json", str(path)]
    assert run("layer", arguments) == 0
    out = capsys.readouterr().out
    assert "Left out:\n- 48,5,2,16,32, swiglu, float32: out of memory" in out
    (result,) = json.loads(path.read_text())["results"]
    assert result["name"] == "16,4,2,8,16" and "dense" in result["figures"]
    assert run("layer", [*arguments, "--minutes", "0"]) == 0
    assert "16,4,2,8,16, swiglu, float32: the time limit was reached" in capsys.readouterr().out


def test_tables_of_a_gpu(monkeypatch, capsys):
    """Runs the code for a GPU on the CPU."""
    assert {shape.tokens for shape in GPU_SHAPES.values()} == {16384, 32768, 65536}
    assert Problem(Shape(4, 2, 1, 8, 1536), torch.float32, "swiglu").hidden == 1024
    problem = Problem(SHAPE, torch.float32)
    problem.has_peak = True
    (row,) = measurement.measure("small", problem, ["sort + split"], options(threads=[None]))
    result = Row(**row)
    assert result.threads is None and set(result.figures) == set(result.peak_mib)
    assert 0 < result.peak_mib["ours"][FORWARD] <= result.peak_mib["ours"][TRAINING]
    tables.print_results([result])
    out = capsys.readouterr().out
    assert "float32, GPU, GEMM peak" in out and "TF/s" in out and "Peak memory" in out

    routing = layer.routing_times((64, 8, 2), options())
    assert routing["limit_ms"]["training"] > routing["limit_ms"]["evaluation"] > 0
    for low, middle, high in routing["ms"].values():
        assert 0 < low <= middle <= high
    tables.print_routing([routing])
    assert "| 64, 8, 2 |" in capsys.readouterr().out


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_time_and_memory_of_a_gpu(capsys):
    """The clock measures the kernels that the call enqueues, and no earlier kernels."""
    clock = clock_of("cuda")
    waits = functools.partial(torch.cuda._sleep, 100 * clock.CYCLES)
    assert min(clock(waits) for _ in range(3)) > min(clock(lambda: None) for _ in range(3))
    x = torch.ones(1 << 24, device="cuda")
    torch.cuda.empty_cache()  # cached blocks can be larger than requested
    assert peak_allocated_mib(lambda: x + 1, "cuda") == 64
    arguments = ["--device", "cuda", "--shapes", "256,5,2,64,96", *QUICK]
    assert run("layer", [*arguments, "--peers", "sort + split", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name() in out and "Routing" in out and "Not timed" not in out


def test_ours_saves_x_and_the_hidden_layer_for_backward(capsys, tmp_path):
    path = tmp_path / "memory.json"
    arguments = ["--shapes", "512,4,2,64,128", "--peers", "sort + slices", "--check-memory"]
    assert run("layer", [*arguments, "--json", str(path)]) == 0
    assert "by x + hidden" in capsys.readouterr().out
    (memory,) = json.loads(path.read_text())["memory"]
    assert memory["x"] == 512 * 64 * 4 and memory["hidden"] == 512 * 2 * 128 * 4
    saved = memory["kept"]["ours"] - memory["x"] - memory["hidden"]
    assert 0 <= saved < 512 * 2 * 32  # for gates and indices
    assert memory["kept"]["sort + slices"] > 1.5 * memory["kept"]["ours"]


def test_a_run_fails_where_a_peer_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(PEERS, "sort + slices", Kind("relu", wrong_gradient))
    assert run("layer", ["--shapes", "48,5,2,16,32", *QUICK, "--peers", "sort + slices"]) == 1
    captured = capsys.readouterr()
    assert "sort + slices, forward: WRONG: dW2 differs from moe_ext" in captured.out
    assert captured.err.startswith("error: 48,5,2,16,32, float32: sort + slices: WRONG: dW2")
