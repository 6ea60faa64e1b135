"""The benchmark of the experts' computation: peers, hardware limits, figures and report."""

import dataclasses
import functools
import json

import pytest
import reference as ref
import torch
from moe_lab.benchmarks import layer, measurement, peers, roofline
from moe_lab.benchmarks._layer_report import print_results, print_routing
from moe_lab.benchmarks.harness import clock_of
from moe_lab.benchmarks.memory import peak_allocated_mib
from moe_lab.benchmarks.peers import PEERS, Kind, Peer, Problem, Shape, random_routing
from moe_lab.benchmarks.roofline import Work, experts_work, limit


@pytest.fixture(autouse=True)
def small_probes(monkeypatch):
    for name, size in (("GEMM_SIZE", 64), ("STREAM_SIZE", 1)):
        monkeypatch.setattr(roofline, name, dict.fromkeys(("cpu", "cuda"), size))


SHAPE = Shape(48, 5, 2, 16, 32)
OPTIONS = measurement.Options([1], 3, 0.0, 1.0, 10.0, list(PEERS), 0.5)
RATES = {measurement.GEMM: 1e12, measurement.STREAM: 1e11}


def test_routing_follows_the_popularity_and_repeats_no_expert():
    torch.manual_seed(0)
    for routing, E, k in (("uniform", 6, 3), ("zipf", 6, 3), ("hierarchical", 16, 4)):
        index = random_routing(Shape(500, E, k, 1, 1, routing))
        assert index.shape == (500, k)
        assert all(len(set(row)) == k for row in index.tolist())
    groups = (index // 4).sort(dim=-1).values
    assert torch.equal(groups[:, 0::2], groups[:, 1::2])  # two experts in each of two groups
    # Two experts with weights 1 and 1/2: one gets 2/3 of 20,000 tokens. Six standard
    # deviations are 0.02, so fewer than one seed in 10^8 fails.
    counts = random_routing(Shape(20000, 2, 1, 1, 1, "zipf")).flatten().bincount()
    assert abs(counts.max().item() / 20000 - 2 / 3) < 0.02


def test_work_by_hand():
    # 2 tokens, 3 rows, 2 of 4 experts are used. An expert 5 -> 7 -> 5 has 70 weights and as many
    # multiply-adds per row.
    forward, both = experts_work(2, 3, 2, 4, 5, 7, gated=False, itemsize=4)
    assert forward == (2 * 3 * 70, 4 * (10 + 2 * 70 + 10))
    backward_bytes = 4 * (10 + 10 + 2 * 70 + 3 * 7 + 10 + 4 * 70)
    assert both == (3 * forward.flops, forward.bytes + backward_bytes)
    forward, both = experts_work(2, 3, 2, 4, 5, 7, gated=True, itemsize=2)
    assert forward == (2 * 3 * 105, 2 * (10 + 2 * 105 + 10))
    assert both.bytes == forward.bytes + 2 * (30 + 2 * 105 + 3 * 14 + 4 * 105)
    assert limit(Work(600, 50), 100, 10) == 6 and limit(Work(600, 90), 100, 10) == 9


def test_plain_peers_compute_equation_1():
    problem = Problem(SHAPE, torch.float64)
    first, second = problem.weights
    expected = []
    for x, gates, chosen in zip(problem.x, problem.gates, problem.expert_index, strict=True):
        outputs = [ref.E_i(x, (first[e], second[e])) for e in chosen.tolist()]
        expected.append(sum(g * y for g, y in zip(gates, outputs, strict=True)))
    for build in (peers.ours, peers.mask_loop, peers.sort_and_slices, peers.sort_and_split):
        y = build(problem).forward(problem.x, problem.gates)
        torch.testing.assert_close(y, torch.stack(expected), rtol=1e-12, atol=1e-12)


PACKAGES = {
    "HF": "transformers",
    "Sc": "scattermoe",
    "mi": "mixture_of_experts",
    "st": "st_moe_pytorch",
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
    expected = layer.results(peers.ours(problem), problem, layer.BOTH)
    found = layer.results(kind.build(problem), problem, layer.BOTH)
    assert set(found) == {"y", "dx", "dgates", "dW1", "dW2"}
    measurement.check(found, expected)


def wrong_gradient(problem):
    """Builds a peer that doubles the gradient of the last expert's second matrix."""
    right = peers.ours(problem)

    def by_expert(found):
        first, second = found
        return [first, [*second[:-1], 2 * second[-1]]]

    return Peer(right.parameters, right.forward, by_expert)


def not_a_number(problem):
    right = peers.ours(problem)
    return Peer(right.parameters, lambda x, gates: right.forward(x, gates) * torch.nan)


def refuses(problem):
    raise RuntimeError("no more than 1024 groups\nat line 7")


def out_of_memory(problem):
    raise torch.OutOfMemoryError("tried to allocate")


def missing(problem):
    raise ImportError("no module named nothing")


def test_wrong_or_missing_peers_are_not_timed(monkeypatch, capsys, tmp_path):
    extra = {
        "wrong": Kind("relu", wrong_gradient),
        "nan": Kind("relu", not_a_number),
        "missing": Kind("relu", missing),
        "large": Kind("relu", missing, lambda problem, backward: peers.Extra(memory=2**31)),
        "slow": Kind("relu", missing, lambda problem, backward: peers.Extra(flops=2e13)),
        "half": Kind("relu", peers.ours, lambda p, backward: peers.Extra(bytes=2e12 * backward)),
        "refuses": Kind("relu", refuses),
        "full": Kind("relu", out_of_memory),
    }
    monkeypatch.setattr(layer, "PEERS", extra)
    problem = Problem(SHAPE, torch.float32)
    options = dataclasses.replace(OPTIONS, peers=list(extra))
    functions, seconds, remarks, peak_mib = layer.candidates(problem, RATES, options)
    assert peak_mib == {}  # only measured on a GPU
    assert (
        set(seconds)
        == set(functions)
        == {
            (name, which) for name in ("ours", "experts", "dense", "half") for which in layer.PASSES
        }
        - {("half", layer.BOTH)}
    )
    assert remarks["wrong", layer.BOTH].startswith("WRONG: dW2 differs from moe_ext by")
    assert remarks["nan", layer.FORWARD].startswith("WRONG: y differs from moe_ext by nan")
    assert remarks["missing", layer.FORWARD] == "not installed: no module named nothing"
    assert remarks["large", layer.FORWARD] == "would need 2.0 GiB"
    assert remarks["slow", layer.BOTH] == remarks["slow", layer.FORWARD] == ("would take 20 s more")
    assert remarks["half", layer.BOTH] == "would take 20 s more"
    assert remarks["refuses", layer.BOTH] == "fails: no more than 1024 groups"
    assert remarks["full", layer.FORWARD] == "out of memory"


def test_figures_from_given_seconds():
    """The peaks are 100 FLOP/s and 10 bytes/s; in the second round half of these."""
    work = {
        layer.FORWARD: Work(200, 10),  # limit 2 s; 4 s in the second round
        layer.BOTH: Work(200, 60),  # limit 6 s; 12 s in the second round
        "gemm": Work(1000, 0),
        "stream": Work(0, 100),
    }
    seconds = {measurement.GEMM: [10.0, 20.0, 10.0], measurement.STREAM: [10.0, 20.0, 10.0]}
    for which, factor in ((layer.FORWARD, 1), (layer.BOTH, 3)):
        seconds["ours", which] = [4.0 * factor, 8.0 * factor, 4.0 * factor]
        seconds["peer", which] = [6.0 * factor, 12.0 * factor, 6.0 * factor]
    seconds["seldom", layer.FORWARD] = [40.0]
    limits, figures = measurement.figures_of(seconds, work)
    assert limits == {layer.FORWARD: 2000, layer.BOTH: 6000}
    ours, peer = figures["ours"], figures["peer"]
    for which in layer.PASSES:
        assert ours[which].share_of_limit == (0.5, 0.5, 0.5)
        assert ours[which].ratio_to_ours == (1, 1, 1)
        assert peer[which].ratio_to_ours == (1.5, 1.5, 1.5)
        assert peer[which].rounds == 3
    assert ours[layer.FORWARD].ms == (4000, 4000, 6000)
    assert ours[layer.FORWARD].gflops == pytest.approx(200 / 4 / 1e9)
    seldom = figures["seldom"][layer.FORWARD]
    assert (seldom.rounds, seldom.ratio_to_ours) == (1, (10, 10, 10))
    assert seldom.share_of_limit == (0.05, 0.05, 0.05)
    assert set(figures) == {"ours", "peer", "seldom"}


@pytest.fixture
def clock(monkeypatch):
    """Replaces time.perf_counter; returns a function that advances it by some seconds."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def takes(seconds):
        now[0] += seconds

    return takes


def test_rounds_fit_into_the_time_without_slow_peers(clock):
    calls = []

    def takes(name, seconds):
        def function():
            calls.append(name)
            clock(seconds)

        return function

    machine = {measurement.GEMM: takes("gemm", 0.25)}
    first = {"ours": 1.0, "close": 2.0, "far": 2.75}
    functions = {(name, layer.FORWARD): takes(name, each) for name, each in first.items()}

    def rounds(seconds, most=21):
        found = {measurement.GEMM: [0.5]} | {
            (name, layer.FORWARD): [x] for name, x in first.items()
        }
        options = dataclasses.replace(OPTIONS, seconds=seconds, rounds=most)
        measurement.add_rounds(found, machine, functions, options)
        return found

    # A round takes 4 · 0.25 + 2 · 3 = 7 s.
    assert rounds(30.0) == {
        measurement.GEMM: [0.5] + [0.25] * 4,
        ("ours", layer.FORWARD): [1.0] * 5,
        ("close", layer.FORWARD): [2.0] * 5,
        ("far", layer.FORWARD): [2.75],
    }
    assert calls == (["gemm"] * 4 + ["ours"] * 2 + ["close"] * 2) * 4
    assert len(rounds(0.0)[measurement.GEMM]) == 2
    assert len(rounds(1e9, most=7)[measurement.GEMM]) == 7


def test_main_reports_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(layer, "LONG_ON_CPU", 60.0)  # no peer counts as slow
    names = ["mask loop", "sort + slices", "sort + grouped_mm"]
    path = tmp_path / "layer.json"
    arguments = ["--shapes", "48,5,2,16,32", "16,4,2,8,16,zipf", "--threads", "1", "2"]
    arguments += ["--rounds", "2", "--seconds", "0", "--peers", *names, "--json", str(path)]
    threads = torch.get_num_threads()
    files = ["--plot", str(tmp_path / "layer.png"), "--profile", str(tmp_path / "layer.txt")]
    assert layer.main([*arguments, *files]) == 0
    assert (tmp_path / "layer.txt").read_text().count("moe_ext::experts") >= 4
    assert torch.get_num_threads() == threads
    out = capsys.readouterr().out
    for part in (
        "BLAS",
        "GEMM peak",
        "float32, threads: 2",
        "best peer",
        "Ours: speed-up over threads",
    ):
        assert part in out
    assert (tmp_path / "layer.png").stat().st_size > 10_000
    record = json.loads(path.read_text())
    assert record["arguments"]["rounds"] == "2"
    assert str(tmp_path) not in path.read_text()
    results = record["results"]
    assert [(r["name"], r["threads"]) for r in results] == [
        (name, n) for name in ("48,5,2,16,32", "16,4,2,8,16,zipf") for n in (1, 2)
    ]
    for result in results:
        assert set(result["figures"]) == {"ours", "experts", "dense", *names}
        assert not result["remarks"]
        for figures in result["figures"].values():
            for which in layer.PASSES:
                low, middle, high = figures[which]["ms"]
                assert 0 < low <= middle <= high and figures[which]["rounds"] == 2
        assert result["gemm_gflops"] > 0 and result["limit_ms"][layer.BOTH] > 0
        assert result["shape"][:2] in ([48, 5], [16, 4])
    # The report of the JSON file has the tables of the run.
    assert layer.main(["--report", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_reports_of_several_occasions_are_medians(capsys, tmp_path):
    def figures(ms):
        return {"rounds": 1, "ms": [ms - 1, ms, ms + 1], "gflops": 8 / ms} | {
            "share_of_limit": [0, 0.5 / ms, 1],
            "ratio_to_ours": [0, ms / 10, 9],
        }

    paths = []
    for number, (ours, peer) in enumerate([(10, 12), (14, None), (11, 22)]):
        found = {"ours": {which: figures(ours) for which in layer.PASSES}}
        if peer:
            found["mask loop"] = {layer.BOTH: figures(peer)}
        result = {"name": "e4", "shape": [8, 4, 1, 2, 2, "uniform"], "activation": "relu"} | {
            "hidden": 2, "used_experts": 4, "dtype": "float32", "threads": 1,
            "gemm_gflops": 100 + number, "stream_gbytes": 10 - number, "figures": found,
            "limit_ms": dict.fromkeys(layer.PASSES, number), "remarks": {}, "peak_mib": {},
        }  # fmt: skip
        record = {"environment": f"machine {number // 2}", "versions": "", "arguments": {}}
        record |= {"results": [result], "memory": [], "routing": []}
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_text(json.dumps(record | {"left_out": [f"problem {number}"]}))
    path = tmp_path / "all.json"
    assert layer.main(["--report", *map(str, paths), "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "machine 0; machine 1" in out and "up to 3 runs" in out and "- problem 2" in out
    assert "11 (10-14)" in out and "(1.70) | 1.70" in out
    record = json.loads(path.read_text())
    (result,) = record["results"]
    assert (result["gemm_gflops"], result["stream_gbytes"]) == (101, 9)
    assert result["limit_ms"] == dict.fromkeys(layer.PASSES, 1)
    assert result["figures"]["ours"][layer.BOTH] == {
        "rounds": 3,
        "ms": [10, 11, 14],
        "gflops": 8 / 11,
        "share_of_limit": [0.5 / 14, 0.5 / 11, 0.05],
        "ratio_to_ours": [1, 1.1, 1.4],
    }
    assert result["figures"]["mask loop"][layer.BOTH]["ms"] == [12, 17, 22]
    # The merged file gives the same report as its parts.
    assert layer.main(["--report", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_a_problem_that_does_not_fit_is_left_out(monkeypatch, capsys, tmp_path):
    def problem(shape, *arguments):
        if shape.tokens == 48:
            raise torch.OutOfMemoryError("tried to allocate")
        return Problem(shape, *arguments)

    monkeypatch.setattr(layer, "Problem", problem)
    path = tmp_path / "layer.json"
    arguments = ["--shapes", "48,5,2,16,32", "16,4,2,8,16", "--threads", "1", "--rounds", "2"]
    arguments += ["--seconds", "0", "--peers", "HF eager", "--json", str(path)]
    assert layer.main(arguments) == 0
    out = capsys.readouterr().out
    assert "Left out:\n- 48,5,2,16,32, swiglu, float32: out of memory" in out
    (result,) = json.loads(path.read_text())["results"]
    assert result["name"] == "16,4,2,8,16" and "dense" in result["figures"]
    assert layer.main([*arguments, "--minutes", "0"]) == 0
    assert "16,4,2,8,16, swiglu, float32: the time limit was reached" in capsys.readouterr().out


def test_tables_of_a_gpu(monkeypatch, capsys):
    """Runs the code for a GPU on the CPU."""
    assert {shape.tokens for shape in layer.GPU_SHAPES.values()} == {16384, 32768, 65536}
    assert Problem(Shape(4, 2, 1, 8, 1536), torch.float32, "swiglu").hidden == 1024
    monkeypatch.setattr(
        layer, "peak_allocated_mib", lambda call, device: peak_allocated_mib(call, "cpu")
    )
    problem = Problem(SHAPE, torch.float32)
    problem.device = torch.device("cpu")  # not equal to "cpu": takes the GPU's branch
    options = dataclasses.replace(OPTIONS, threads=[None], peers=["sort + split"])
    (result,) = layer.benchmark("small", problem, options)
    assert result.threads is None and set(result.figures) == set(result.peak_mib)
    assert 0 < result.peak_mib["ours"][layer.FORWARD] <= result.peak_mib["ours"][layer.BOTH]
    print_results([result])
    out = capsys.readouterr().out
    assert "float32, GPU, GEMM peak" in out and "TF/s" in out and "Peak memory" in out

    routing = layer.routing_times((64, 8, 2), "cpu", OPTIONS)
    assert routing["limit_ms"]["training"] > routing["limit_ms"]["evaluation"] > 0
    for low, middle, high in routing["ms"].values():
        assert 0 < low <= middle <= high
    print_routing([routing])
    assert "| 64, 8, 2 |" in capsys.readouterr().out


def test_a_missing_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        layer.main(["--device", "meta"])
    assert "device must" in capsys.readouterr().err


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
    arguments = ["--device", "cuda", "--shapes", "256,5,2,64,96", "--rounds", "2", "--seconds", "0"]
    assert layer.main([*arguments, "--peers", "sort + split", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert torch.cuda.get_device_name() in out and "Routing" in out and "Not timed" not in out


def test_ours_saves_x_and_the_hidden_layer_for_backward(capsys, tmp_path):
    path = tmp_path / "memory.json"
    arguments = ["--shapes", "512,4,2,64,128", "--peers", "sort + slices", "--check-memory"]
    assert layer.main([*arguments, "--json", str(path)]) == 0
    assert "by x + hidden" in capsys.readouterr().out
    (found,) = json.loads(path.read_text())["memory"]
    assert found["x"] == 512 * 64 * 4 and found["hidden"] == 512 * 2 * 128 * 4
    ours = found["kept"]["ours"] - found["x"] - found["hidden"]
    assert 0 <= ours < 512 * 2 * 32  # for gates and indices
    assert found["kept"]["sort + slices"] > 1.5 * found["kept"]["ours"]


def test_main_fails_where_a_peer_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(PEERS, "sort + slices", Kind("relu", wrong_gradient))
    arguments = ["--shapes", "48,5,2,16,32", "--threads", "1", "--rounds", "2", "--seconds", "0"]
    assert layer.main([*arguments, "--peers", "sort + slices"]) == 1
    captured = capsys.readouterr()
    assert "sort + slices, forward: WRONG: dW2 differs from moe_ext" in captured.out
    assert captured.err.startswith("error: 48,5,2,16,32, float32: sort + slices: WRONG: dW2")


@pytest.mark.parametrize("text", ["e33", "1,2,3,4", "0,2,3,4,5", "1,2,3,4,x", "1,2,1,4,5,often"])
def test_invalid_shapes(text, capsys):
    with pytest.raises(SystemExit):
        layer.main(["--shapes", text])
    assert "--shapes" in capsys.readouterr().err
