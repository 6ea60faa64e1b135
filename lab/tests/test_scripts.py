"""The scripts as a user runs them: output, files, errors and exit status."""

import json
import math
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from moe_lab.cli import exit_status
from moe_lab.commands import compare, evaluate, inspect_experts, quickstart, train
from moe_lab.errors import ConfigError
from moe_lab.studies import balanced, efficiency, kneser_ney, specialisation
from moe_lab.training.checkpoint import checkpoints_of
from moe_lab.training.config import read_config

from moe_ext import BalancedGate, MoE, batchwise_masks
from moe_ext.distributed import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "small" / "moe-32.toml"
TINY = [
    "data.vocab_size=60", "data.tokens_per_batch=100", "model.d_model=8", "model.moe.num_experts=4",
    "model.moe.k=2", "model.moe.hidden_sizes=[8]", "num_threads=1", "log.tensorboard=false",
    "log.log_every=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for part, count in (("train", 200), ("dev", 20), ("test", 20)):
        lines = [
            " ".join(f"w{(number * 7 + i * i) % 50}" for i in range(2 + number % 9))
            for number in range(count)
        ]
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Trains a run and returns its folder."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = [*TINY, f"data.corpus={corpus}", f"output={folder}", "steps=8", "log.progress=false"]
    assert exit_status(lambda: train.main([str(CONFIG), *options])) == 0
    return folder


def status_and_error(capsys, command, *arguments):
    capsys.readouterr()
    status = exit_status(lambda: command.main([str(a) for a in arguments]))
    error = capsys.readouterr().err
    return status, error


def rebuilds(main, name, folder, *options):
    """Returns whether --report writes the same page and plot, without runs and corpus."""
    files = [folder / f"{name}.{suffix}" for suffix in ("md", "png", "json")]
    before = [file.read_bytes() for file in files]
    for file in files[:2]:
        file.unlink()
    main(["--report", *options, f"--output={folder}"])
    return [file.read_bytes() for file in files] == before


def test_train_reports_model_text_and_result(run, corpus, capsys):
    options = [*TINY, f"data.corpus={corpus}", f"output={run}", "steps=8", "resume=true"]
    train.main([str(CONFIG), *options, "log.progress=false"])
    out = capsys.readouterr().out
    for part in (
        "ops/timestep",
        "52 entries in the vocabulary",
        "from step 8 of 8",
        "dev perplexity",
    ):
        assert part in out
    assert read_config(run / "config.toml").steps == 8


def test_resuming_a_finished_run_without_dev_metrics(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if '"dev"' not in line))
    train.main([str(folder / "config.toml"), f"output={folder}", "resume=true"])
    assert "done    8 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["model.droput=0.1"], "did you mean model.dropout?"),
        (["model.moe.k=9"], "model.moe.k must"),
        (["data.corpus=/nowhere/text"], "there is no corpus at /nowhere/text"),
        (["output={run}"], "is not empty; continue the run in it with resume=true"),
        (["output={run}", "resume=true", "model.d_model=16"], "model.d_model must"),
        (["output={run}", "resume=true", "data.vocab_size=20"], "data.vocab_size must"),
    ],
)
def test_train_rejects_options_with_status_2(run, corpus, capsys, tmp_path, options, part):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    options = [option.format(run=run) for option in options]
    status, error = status_and_error(
        capsys, train, CONFIG, *TINY, f"data.corpus={corpus}", f"output={tmp_path / 'x'}", *options
    )
    assert status == 2 and part in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert not (tmp_path / "x").exists()


def test_other_scripts_reject_options_with_status_2(capsys, tmp_path, run):
    for command in (evaluate, inspect_experts):
        status, error = status_and_error(capsys, command, tmp_path / "none")
        assert status == 2 and "there is no checkpoint in" in error and error.count("\n") == 1
    status, error = status_and_error(capsys, evaluate, run, "--corpus", tmp_path / "none")
    assert status == 2 and "there is no corpus at" in error
    status, error = status_and_error(capsys, evaluate, run, "--bleu")
    assert status == 2 and error.startswith("error: --bleu must")
    status, error = status_and_error(capsys, inspect_experts, run, "--layer", 3)
    assert status == 2 and "layer must" in error
    for command in (evaluate, inspect_experts):
        status, error = status_and_error(capsys, command, run, "--device", "meta")
        assert status == 2 and "device must" in error
    status, error = status_and_error(capsys, compare, tmp_path / "none.toml")
    assert status == 2 and "there is no configuration file" in error
    (tmp_path / "file").touch()
    output = tmp_path / "file" / "experts"
    status, error = status_and_error(capsys, inspect_experts, run, "--output", output)
    assert status == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert str(tmp_path / "file") in error


def assert_names_option(capsys, option):
    """Asserts that the last line of stderr names an option (--name=value) and its value."""
    name, value = option.split("=")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {name}: must" in last and f"got {value!r}" in last


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (evaluate, "--threads=-1"),
        (evaluate, "--tokens-per-batch=0"),
        (inspect_experts, "--threads=-1"),
        (inspect_experts, "--positions=none"),
        (inspect_experts, "--contexts=0"),
        (inspect_experts, "--sentences=-1"),
        (kneser_ney, "--order=0"),
        (compare, "--seeds=-1"),
        (kneser_ney, "--shares=1.5"),
    ],
)
def test_options_out_of_range_are_refused_with_status_2(run, capsys, command, option):
    with pytest.raises(SystemExit) as stopped:
        command.main([str(run), option])
    assert stopped.value.code == 2
    assert_names_option(capsys, option)


def test_exit_status_and_message(capsys):
    def ends_with(error):
        def main():
            raise error

        return exit_status(main), capsys.readouterr().err

    assert exit_status(lambda: None) == exit_status(lambda: [3]) == 0
    assert exit_status(lambda: 3) == 3
    assert ends_with(ConfigError("a must b")) == (2, "error: a must b\n")
    assert ends_with(NotADirectoryError(20, "Not a directory", "file/x")) == (
        2,
        "error: file/x: Not a directory\n",
    )
    assert ends_with(OSError("disk full")) == (2, "error: disk full\n")
    assert ends_with(CheckpointError("saving step 5")) == (2, "error: saving step 5\n")
    assert ends_with(FloatingPointError("diverged")) == (1, "error: diverged\n")
    assert ends_with(KeyboardInterrupt()) == (130, "interrupted\n")


def test_a_closed_pipe_ends_a_script_without_message(tmp_path):
    code = (
        "import sys; from moe_lab.cli import exit_status; "
        "sys.exit(exit_status(lambda: [print(i) for i in range(10**5)]))"
    )
    with (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=errors
        )
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        assert process.wait(60) == 141
    assert (tmp_path / "stderr").read_bytes() == b""


def test_ctrl_c_saves_and_the_run_continues(corpus, tmp_path):
    folder = tmp_path / "run"
    command = [
        sys.executable, "-m", "moe_lab", "train", CONFIG, *TINY,
        f"data.corpus={corpus}", f"output={folder}",
    ]  # fmt: skip
    process = subprocess.Popen(
        [*command, "steps=1000000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    assert f"continue with moe-lab train {folder / 'config.toml'} resume=true" in output
    last = checkpoints_of(folder).steps()[-1]
    assert last >= 1
    options = [*TINY, f"data.corpus={corpus}", f"output={folder}", "log.progress=false"]
    train.main([str(CONFIG), *options, f"steps={last + 2}", "resume=true"])
    assert checkpoints_of(folder).steps()[-1] == last + 2
    assert len(checkpoints_of(folder).steps()) == 2


def test_evaluate_measures_all_of_another_text(run, tmp_path, capsys):
    text = tmp_path / "text.txt"  # too short to split into parts
    text.write_text("w1 w2 w3\nw4 nowhere\n")
    result = evaluate.main([str(run), "--corpus", str(text)])
    assert capsys.readouterr().out.startswith("all perplexity ") and result.num_tokens == 7
    evaluate.main([str(run), "--tokens-per-batch", "60"])
    out = capsys.readouterr().out
    assert out.startswith("test perplexity ") and "20 sentences; step 8" in out
    status, error = status_and_error(capsys, evaluate, run, "--corpus", text, "--part", "test")
    assert status == 2 and "the test part of" in error
    assert evaluate.main([str(run), "--part", "all"]).sentence_nll.shape == (240,)


def test_inspect_experts_writes_text_and_one_page(run, tmp_path, capsys):
    tmp_path = tmp_path / "a" / "new"
    inspect_experts.main([str(run), "--output", str(tmp_path / "experts"), "--sentences", "3"])
    out = capsys.readouterr().out
    text = (tmp_path / "experts.txt").read_text()
    page = (tmp_path / "experts.html").read_text()
    assert text in out and text.count("expert ") == 4
    (data,) = re.findall('id="data">(.*)</script>', page)
    data = json.loads(data)
    (layer,) = data["layers"]
    assert layer["name"] == "layer 0"
    assert len(layer["experts"]) == 4 and len(layer["sentences"]) == 3
    assert "</s>" in data["words"] and "</s>" not in page
    assert data["title"] == "run, step 8, layer 0: what each expert sees"


def test_compare_reports_pairs(corpus, tmp_path, capsys):
    report = compare.main(
        [
            str(CONFIG),
            *TINY,
            f"data.corpus={corpus}",
            "steps=3",
            "log.progress=false",
            "--seeds",
            "1",
            "2",
            "--output",
            str(tmp_path),
        ]  # fmt: skip
    )
    page = (tmp_path / "comparison.md").read_text()
    assert page in capsys.readouterr().out
    assert "(two seeds, not decided). As a change of the perplexity: " in page and "| MoE |" in page
    assert json.loads((tmp_path / "comparison.json").read_text()) == report


def test_compare_with_other_options(corpus, tmp_path, capsys):
    arguments = [CONFIG, *TINY, f"data.corpus={corpus}", "steps=3", "log.progress=false"]
    arguments += ["optimizer.experts=factored_adam", "--seeds", "1", "--output", tmp_path]
    against = ["--against", "optimizer.experts=adam", "optimizer.beta2=0.9"]
    report = compare.main([str(a) for a in (*arguments, *against)])
    page = (tmp_path / "comparison.md").read_text()
    assert page in capsys.readouterr().out
    assert "| beta2=0.98, experts=factored_adam |" in page and "(one seed, not decided)" in page
    assert report["models"]["against"] == "beta2=0.9, experts=adam"
    for arm in ("config", "against"):
        optimizer = read_config(tmp_path / f"{arm}-seed1" / "config.toml").optimizer
        assert (optimizer.experts, optimizer.beta2) == (
            ("factored_adam", 0.98) if arm == "config" else ("adam", 0.9)
        )
    (row,) = report["pairs"]
    assert row["config_perplexity"] != row["against_perplexity"]
    status, error = status_and_error(capsys, compare, *arguments, "--against", "log.log_every=2")
    assert status == 2 and "must differ" in error
    status, error = status_and_error(capsys, compare, *arguments, "--against", "seed=5")
    assert status == 2 and "seed must" in error
    status, error = status_and_error(capsys, compare, *arguments, "--against", "data.vocab_size=20")
    assert status == 2 and "the same seed and data, got different data.vocab_size" in error


def test_balanced_gating_is_checked_and_reported(corpus, tmp_path, capsys):
    """A second call trains nothing, so it checks no batches; all other results are the same."""
    arguments = [
        *TINY, f"data.corpus={corpus}", f"output={tmp_path / 'run'}", "steps=6",
        "log.eval_every=3", "log.progress=false", "--output", str(tmp_path / "results"),
    ]  # fmt: skip
    report = balanced.main(arguments)
    assert report["checked_batches"] == 6 and [r["step"] for r in report["dev"]] == [3, 6]
    last = report["dev"][-1]
    assert report["final"] == {
        "difference": last["perplexity"] / last["perplexity_batchwise"] - 1,
        **{key: value for key, value in report["train"][-1].items() if key != "step"},
    }
    page = (tmp_path / "results" / "balanced.md").read_text()
    assert page in capsys.readouterr().out and "in all of the 6 training batches" in page
    assert json.loads((tmp_path / "results" / "balanced.json").read_text()) == report
    assert (tmp_path / "results" / "balanced.png").read_bytes().startswith(b"\x89PNG")
    assert rebuilds(balanced.main, "balanced", tmp_path / "results")
    again = balanced.main(arguments)
    assert again == {**report, "checked_batches": 0}
    assert "training batches since" not in (tmp_path / "results" / "balanced.md").read_text()
    with pytest.raises(ConfigError, match=r"model.layers must .*got \[.lstm.\]"):
        balanced.main([*arguments, 'model.layers=["lstm"]'])


def test_an_unequal_load_stops_the_run():
    check = balanced.EqualLoads(k=1, num_experts=3)
    layer = MoE(4, 3, 1, gate=BalancedGate(4, 3, 1))
    layer.register_forward_hook(check)
    layer(torch.randn(6, 4))
    with batchwise_masks(layer):
        layer.eval()(torch.randn(6, 4))
    assert check.num_batches == 1
    _, aux = layer(torch.randn(6, 4))
    layer.train()
    uneven = aux._replace(tokens_per_expert=torch.tensor([2, 1, 3]))
    with pytest.raises(RuntimeError, match=r"every expert must .*got \[2, 1, 3\]"):
        check(layer, (), (None, uneven))


def test_efficiency_compares_equal_operations(tmp_path):
    options = ["--width=8", "--tokens", "64", "--rounds=2", f"--output={tmp_path}"]
    rows = efficiency.main(options)
    steps = {row.name: row for row in rows if row.part == "training step"}
    expected = {*efficiency.DENSE, *efficiency.MIXTURES}
    assert steps.keys() == {*expected, efficiency.PEAK}
    assert steps["moe-256-h"].rows_per_expert == 1 and steps["moe-4"].rows_per_expert == 64
    assert all(row.gflops > 0 and row.low <= row.median <= row.high for row in rows)
    layer = [row.rows_per_expert for row in rows if row.part == "layer"]
    assert layer == [0, 2048, 512, 128, 32, 8]
    by_itself, at_once = (row for row in rows if row.part == "time steps")
    assert (by_itself.rows_per_expert, at_once.rows_per_expert) == (16, 320)
    page = (tmp_path / "efficiency.md").read_text()
    assert (
        "Claim: with at least 64 rows" in page
        and "The slowest mixture is moe-4 with 64 words" in page
    )


def test_quickstart_runs_again_without_training(corpus, tmp_path, capsys):
    arguments = [
        "--quick", "--output", str(tmp_path / "q"), f"data.corpus={corpus}", "data.vocab_size=50",
        "num_threads=1", "log.progress=false",
    ]  # fmt: skip
    results = quickstart.main(arguments)
    out = capsys.readouterr().out
    for part in (
        "MoE, 2 of 8 experts",
        "dense, one wide expert",
        "CV(Importance)",
        "CV(Load)",
        "max/mean load",
        "three most specialised experts",
    ):
        assert part in out
    assert out.count("highest gates:") == 3
    assert (tmp_path / "q" / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    again = quickstart.main(arguments)
    assert again["moe"].test_nll == results["moe"].test_nll


def test_kneser_ney_on_shares_of_the_text(corpus, tmp_path, capsys):
    options = [CONFIG, *TINY, f"data.corpus={corpus}", "--output", tmp_path]
    shares = [*options, "--order", 3, "--shares", 0.25, 1]
    report = kneser_ney.main([str(option) for option in shares])
    part, whole = report["models"]
    assert (part["train_sentences"], whole["train_sentences"]) == (50, 200)
    for model in (part, whole):
        assert 1 < model["test_perplexity"] < report["vocabulary"]
        assert len(model["num_ngrams"]) == len(model["discounts"]) == 3
        nll = sum(model["test_sentence_nll"]) / report["test_tokens"]
        assert math.exp(nll) == pytest.approx(model["test_perplexity"])
    assert sum(report["test_sentence_tokens"]) == report["test_tokens"]
    assert json.loads((tmp_path / "kneser_ney.json").read_text()) == report
    table = (tmp_path / "kneser_ney.md").read_text()
    assert "3-gram models (modified, three discounts" in table and table in capsys.readouterr().out
    one_discount = [*options, "--discounts", 1, "--arpa"]
    report = kneser_ney.main([str(option) for option in one_discount])
    (model,) = report["models"]
    assert report["order"] == 5 and all(len(set(d)) == 1 for d in model["discounts"])
    arpa = (tmp_path / "kneser_ney.arpa").read_text()
    assert f"ngram 1={report['vocabulary'] + 1}\n" in arpa


def test_specialisation_of_two_runs(run, corpus, tmp_path, capsys, monkeypatch):
    options = [*TINY, f"data.corpus={corpus}", f"output={tmp_path / 'second'}", "steps=8"]
    train.main([str(CONFIG), *options, "seed=2", "log.progress=false"])
    other = tmp_path / "other.txt"
    other.write_text("".join(f"w{i} w{i + 1} w1 nowhere\n" for i in range(40)))
    arguments = [
        run, tmp_path / "second", "--part", "all", "--positions", 600, "--permutations", 20,
        "--output", tmp_path / "results", "--domains", f"given={corpus}", f"other={other}",
    ]  # fmt: skip
    arguments = [str(argument) for argument in arguments]
    report = specialisation.main(arguments)
    page = (tmp_path / "results" / "specialisation.md").read_text()
    assert page in capsys.readouterr().out
    assert (tmp_path / "results" / "specialisation.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results" / "specialisation.json").read_text()) == report
    assert len(report["claims"]) == 4 * 4 and page.count("| experts specialise |") == 8
    for found in report["runs"]:
        assert [e["how"] for e in found["table"]] == [*["most specialised"] * 3, "drawn at random"]
        assert len({e["expert"] for e in found["table"]}) == 4
        for gate in ("trained", "untrained"):
            assert list(found[gate]) == ["current word", "previous word", "word class", "domain"]
        assert found["trained"] != found["untrained"]
    # The difference in a claim is the mean of the differences of the runs.
    gaps = [r["trained"]["domain"]["purity"] - r["untrained"]["domain"]["purity"]
            for r in report["runs"]]  # fmt: skip
    (claim,) = [c for c in report["claims"] if "purity of the domain, against a random" in
                c["compared"]]  # fmt: skip
    assert claim["difference"]["mean"] == pytest.approx(sum(gaps) / 2)

    assert rebuilds(specialisation.main, "specialisation", tmp_path / "results")
    # A second call reads the stored measurements. Other permutations or texts are measured.
    monkeypatch.setattr(specialisation, "measure", None)
    assert specialisation.main(arguments) == report
    with pytest.raises(TypeError):
        specialisation.main([*arguments, "--permutations", "21"])
    other.write_text("other words\n" * 40)
    with pytest.raises(TypeError):
        specialisation.main(arguments)


def test_specialisation_rejects_arguments(run, corpus, tmp_path, capsys):
    other = tmp_path / "other"
    options = [*TINY, f"data.corpus={corpus}", f"output={other}", "steps=1", "model.moe.k=1"]
    train.main([str(CONFIG), *options, "log.progress=false"])
    for arguments, message in (
        ([run, other], "must differ from the first run only in its seed, but ['steps', 'model."),
        ([run, run], "distinct seeds, got [1, 1]"),
        ([run, "--layer", "1"], "layer must"),
        ([run, "--domains", f"a={corpus}"], "two or more distinct NAME=CORPUS"),
        ([run, "--domains", f"a={corpus}", "b"], "two or more distinct NAME=CORPUS"),
        ([run, "--domains", f"a={corpus}", f"b={tmp_path / 'nowhere'}"], "there is no corpus at"),
    ):
        found = status_and_error(capsys, specialisation, *arguments)
        assert found[0] == 2 and message in found[1] and found[1].count("\n") == 1
    for arguments in ([], [run, "--report"]):
        with pytest.raises(SystemExit):
            specialisation.main([str(argument) for argument in arguments])
        assert "runs must be given, or --report instead" in capsys.readouterr().err


def test_words_in_their_place_as_markdown():
    in_place = specialisation.in_place
    assert in_place(["", "</s>", "a|b", "*", "x_y"]) == r"&lt;/s&gt; **a\|b** \* x\_y"


def test_the_gpu_suite_selects_tests_that_exist():
    script = (ROOT / "scripts" / "gpu_suite.sh").read_text()
    selected = re.findall(r"-k ([a-z]\w*).*?(tests/\S+\.py)", script, re.S)
    assert len(selected) == 2
    for word, file in selected:
        assert re.search(rf"^def test_\w*{word}", (ROOT / file).read_text(), re.M), (word, file)
    for place in re.findall(r"\b(?:lab/)?tests/[\w/.]+", script):
        assert (ROOT / place).exists(), place
