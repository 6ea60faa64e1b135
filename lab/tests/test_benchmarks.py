"""The table of benchmarks: command lines, tables and JSON files of the smaller cases."""

import json
import mmap
import time

import pytest
import torch
from moe_lab.benchmarks import cases, data, roofline
from moe_lab.benchmarks.harness import Quartiles, Row, environment, table
from moe_lab.cli import exit_status, module_of
from moe_lab.errors import ConfigError
from moe_lab.files import from_json
from tiny import CONFIG, ROOT, TINY

SHAPES = ["e33", "1,2,3,4", "0,2,3,4,5", "1,2,3,4,x", "1,2,1,4,5,often"]  # not for the layer
TABLES = {  # the published pages with the rows of a benchmark
    "cpp": "cpp", "data": "data", "hierarchical": "hierarchical", "ops": "operators",
    "optim": "optimizers", "recompute": "recompute", "recurrent": "recurrent",
    "softmax": "softmax", "translation": "translation_speed",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


def run(case, arguments, json_file):
    """Runs a case; returns its rows, which the JSON file has too, with the environment."""
    rows = cases.run(case, [*arguments.split(), "--json", str(json_file)])
    written = json.loads(json_file.read_text())
    assert written["environment"] == environment()
    assert written["rows"] == json.loads(json.dumps([vars(row) for row in rows]))
    return rows


def test_optim_compares_steps_and_states(tmp_path, capsys):
    sizes = "--experts 3 --d-model 8 --hidden 16 --rounds 2 --threads 1"
    factored, *peers = run("optim", sizes, tmp_path / "rows.json")
    assert factored.step == "FactoredAdam" and factored.ratio == (1, 1, 1)
    assert 4 * (8 + 16) / (8 * 16) < factored.state_bytes < 4 * (8 + 16) / (8 * 16) + 0.1
    assert all(row.ms > 0 and [*row.ratio] == sorted(row.ratio) for row in peers)
    adam = [row.state_bytes for row in peers if "Adam(" in row.step]
    assert len(adam) == 2 and min(adam) >= 8
    assert capsys.readouterr().out.count("| 1 |") == 5


def test_step(tmp_path, capsys):
    path = tmp_path / "step.json"
    changes = ["optimizer.accumulate=2", "optimizer.embedding=factored_adam"]
    record = cases.run("step", [str(CONFIG), *TINY, *changes, "--steps=2", f"--json={path}"])
    assert json.loads(path.read_text())["steps"] == record["steps"]
    # LSTM 2 · 4 · 8 · 16, gate 2 · 8 · 4, experts 2 · 2 · 8 · 8, softmax 8 · 60 multiply-adds
    assert record["flops_of_token"] == 6 * (1024 + 64 + 256 + 480)
    assert record["cost"]["ops_per_timestep"] == 1024 + 64 + 256
    # LSTM biases 2 · 2 · 32, experts 4 · 2 · 8 · 8, embedding and softmax 60 · (8 + 8 + 1)
    assert record["weight_bytes"] == 4 * (1024 + 128 + 64 + 512 + 1020)
    # Factored moments: embedding and softmax 60 + 8 each, softmax bias 60. Adam: two moments for
    # each other weight. Each tensor has a step counter.
    tensors = 4 * 2 + 2 + 2 + 3
    assert record["optimizer_bytes"] == 4 * (196 + 2 * (1024 + 128 + 64 + 512) + tensors)
    assert len(record["steps"]) == 2
    for step in record["steps"]:
        assert 200 <= step["tokens"] <= 260 and step["tokens"] % 26 == 0
        flops = step["tokens"] * record["flops_of_token"]
        assert step["gflops"] == pytest.approx(flops / step["seconds"] / 1e9)
    out = capsys.readouterr().out
    assert "step 2  " in out and "memory  weights 0.000 GB" in out
    with pytest.raises(ConfigError, match="optimizer.experts must"):
        cases.run("step", [str(CONFIG), *TINY, "model.dtype=bfloat16"])


def test_recurrent(capsys, tmp_path):
    sizes = "--slots 1 2 4 --steps 12 --width 8 --rounds 2"
    rows = run("recurrent", sizes, tmp_path / "recurrent.json")
    assert [row.slots for row in rows] == [0, 1, 2, 4]
    assert [row.evaluations for row in rows] == [12] + [row.minimum + 1 for row in rows[1:]]
    assert rows[0].mib > 2 * max(row.mib for row in rows[1:])
    assert "| plain | 12 | 12 | 1.00 |" in capsys.readouterr().out


def test_hierarchical(tmp_path, capsys):
    """Layers marked "=" match the multiply-adds of the large layer up to half a hidden unit."""
    sizes = "--groups 8 --experts-per-group 8 --peer-experts 16 --peer-groups 4 --d-model 8"
    rows = run("hierarchical", f"{sizes} --hidden 4 --tokens 50 --rounds 2", tmp_path / "h.json")
    large = rows[0]
    # 2 (8 + 2 · 8) logits of 8 multiply-adds; 4 experts with 8 x 4 and 4 x 8 weights.
    assert (large.gate_ops, large.expert_ops, large.ratio) == (384, 256, (1, 1, 1))
    for row in rows:
        assert row.step_us > 0 and all(value > 0 for value in row.stage_us.values())
        assert not row.layer.endswith("=") or abs(row.gate_ops + row.expert_ops - 640) <= 32
    assert capsys.readouterr().out.count("| hierarchical") == 3


def test_data(monkeypatch, tmp_path):
    """The number of words is the same for any number of workers."""
    monkeypatch.setattr(data, "elsewhere", lambda function, *arguments: function(*arguments))
    sizes = "--workers 0 1 --words 20000 --vocab-size 50 --sentences 100 --batch-words 9000"
    rows = run("data", f"{sizes} --tokens-per-batch 500", tmp_path / "data.json")
    words = {row.words for row in rows[:4]}  # counted and encoded, with the ends of sentences
    assert len(words) == 1 and 20_000 < words.pop() < 22_000
    assert rows[4].words == rows[5].words and 9_000 < rows[4].words < 10_000


def test_data_peak_memory():
    """The peak is memory above that at the start of the block."""
    held = new_pages(64 << 20)
    with data.measured("free", 0) as row:
        held.close()
    assert 0 <= row.peak_mib < 32
    with data.measured("allocate", 0) as row:
        held = new_pages(64 << 20)
        time.sleep(0.2)
    assert 32 < row.peak_mib < 128 and row.seconds >= 0.2
    held.close()


def new_pages(num_bytes):
    """Returns memory from the system: malloc may return what was freed before."""
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        pages[start] = 1
    return pages


@pytest.mark.parametrize(
    ("case", "arguments", "rows"),
    [
        ("ops", "--tokens 16 --experts 16 --k 2 --width 8 --threads 1 2", 14),
        ("recompute", "--tokens 16 --experts 4 --k 2 --width 8 --hidden 8 --threads 1", 2),
        ("softmax", "--classes 50 --sampled 4 --width 8 --tokens 8", 2),
        ("cross-entropy", "--shape 16 8 32 --shape 8 8 16 --dtype bfloat16", 2),
        ("lstm", "--shape 2 3 8 8 4", 1),
        ("few-tokens", "--shape 32 4 2 48 --tokens 1 2", 2),
    ],
)
def test_each_row_of_a_table_has_all_cells(case, arguments, rows, monkeypatch, tmp_path, capsys):
    if case == "few-tokens":
        pytest.importorskip("transformers")
    if case == "cross-entropy" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("needs torch 2.13")
    monkeypatch.setattr(roofline, "PEAK_SIZE", 64)
    monkeypatch.setattr(roofline, "STREAM_SIZE", {"cpu": 1})
    rows_of_table = run(case, f"{arguments} --rounds 2", tmp_path / "rows.json")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows_of_table) == rows == len(lines) - 2
    assert len({line.count("|") for line in lines}) == 1


@pytest.mark.parametrize("case, page", TABLES.items())
def test_published_tables_are_made_of_their_data(case, page):
    """The text around the tables is written by hand."""
    path = ROOT / "docs" / "results" / page
    module = module_of("benchmarks", case)

    def stored(value):
        if isinstance(value, list) and len(value) == 3:
            return Quartiles(*value)
        return value

    rows = from_json(path.with_suffix(".json").read_text())["rows"]
    rows = [Row(**{key: stored(value) for key, value in row.items()}) for row in rows]
    lines = table(module.HEADER, module.CELLS, rows).splitlines()
    assert len(lines) == len(rows) + 2
    assert set(lines) <= set(path.with_suffix(".md").read_text().splitlines())


def test_the_tables_of_the_layer_are_made_of_their_data(capsys):
    path = ROOT / "docs" / "results" / "experts.json"
    assert cases.run("layer", ["--report", str(path)]) == 0
    lines = {line for line in capsys.readouterr().out.splitlines() if line.startswith("|")}
    assert len(lines) > 60 and lines <= set(path.with_suffix(".md").read_text().splitlines())


def test_quartiles_as_text():
    quartiles = Quartiles.from_values([1, 2, 3, 4, 5])
    assert f"{quartiles:.1f}" == "3.0 (2.0-4.0)" and f"{quartiles:.0f|}" == "3 | 2-4"
    assert f"{quartiles.scaled(-1):.0f~}" == "-3 (-2 to -4)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("cpp --program nothing", "program must be a file, got nothing"),
        ("distributed --chunks 2 4", "--chunks must include 1, got [2, 4]"),
        ("distributed --exchanges groups", "--exchanges groups must be used with --group-size"),
        ("distributed --experts 6 --group-size 4", "a multiple of --group-size = 4, got 6"),
        ("layer --device meta", "device must be cpu, cuda or cuda:N, got 'meta'"),
        ("layer --report nothing", "report must be a file, got nothing"),
        ("low-precision --ggml nothing", "ggml must be a file, got nothing"),
        *((f"layer --shapes {text}", f"got '{text}'") for text in SHAPES),
        ("layer --plot speeds", "--plot: must end in .png or .pdf, got 'speeds'"),
        ("lstm --shape 2 3 4 4 4", "--shape: P must be less than U = 4, got 4"),
        ("ops --rounds 1", "--rounds: must be a whole number of at least 2, got '1'"),
        ("step nothing", "there is no configuration file nothing; give a file, or a name"),
        ("transformers-experts --models mistral", "--models: invalid choice: 'mistral'"),
        ("transformers-experts --dtype float16", "--dtype: invalid choice: 'float16'"),
        ("transformers-experts --implementations a", "--implementations: invalid choice: 'a'"),
        ("transformers-experts --memory much", "must be a positive number, got 'much'"),
        (
            "transformers-experts --models mixtral --weights 1",
            "--weights must hold 2 experts of mixtral, which take 1.31 GiB, got 1 GiB",
        ),
        ("translation . nothing", "text must be a file, got nothing"),
        ("translation . .", "there is no checkpoint in ."),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    case, *options = arguments.split()
    try:
        status = exit_status(lambda: cases.run(case, options))
    except SystemExit as ended:
        status = ended.code
    assert status == 2 and message in capsys.readouterr().err
