"""The examples run and print the output that their docstrings or first comments show."""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import launch
from locks import locked

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


@pytest.fixture
def output_of(monkeypatch, capsys, tmp_path):
    """Returns a function that runs a script in an empty folder and returns its output.

    The docstring of the script must show the same text with any numbers.
    """
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        output = capsys.readouterr().out
        assert_shown(name, output)
        return output

    return run


def assert_shown(name, output):
    docstring = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    shown = re.findall(r"^    (?!python |torchrun )(.*)$", docstring, re.M)
    assert without_numbers(shown) == without_numbers(output.splitlines())


def without_numbers(lines):
    return [re.sub(r"\s+", " ", re.sub(_NUMBER, "#", line)) for line in lines]


def numbers(pattern, text):
    """Returns the group of each match as a number."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def test_transformer_block(output_of):
    output = output_of("transformer_block")
    losses = numbers(r"step +\d+: loss ([\d.]+)", output)
    assert len(losses) == 7 and losses[0] > 5 and losses[-1] < 2.8
    (held_out,) = numbers(r"held-out topics: loss ([\d.]+)", output)
    assert held_out < 2.8
    assert max(numbers(r"max_over_mean_load ([\d.]+)", output)) < 2
    counts = numbers(r"(\d+)[,\]]", output.splitlines()[-1])
    assert len(counts) == 8 and min(counts) > 0.1 * sum(counts) / 8


def test_custom_gate(output_of):
    output = output_of("custom_gate")
    losses = numbers(r"loss ([\d.]+)", output)
    assert losses[-1] < 0.3 * losses[0]
    temperatures = numbers(r"temperature ([\d.]+)", output)
    assert temperatures[0] == 0.2 != temperatures[-1]
    shares = numbers(r"(\d+)%", output)
    assert len(shares) == 8 and min(shares) > 60  # even routing: 2 / 16 = 12.5%


@pytest.mark.long
def test_hierarchical_4096(output_of):
    output = output_of("hierarchical_4096")
    assert "4,096 experts, 17,309,696 parameters; a token uses 40,960 of them" in output
    assert "dense layer, 40,960 parameters" in output
    mixture, dense = numbers(r"relative error ([\d.]+)", output)
    assert mixture < 0.3 and dense > 0.7
    assert numbers(r"to (\d+), on average 4", output)[0] < 40


def test_two_ranks_need_torchrun(output_of):
    with pytest.raises(SystemExit, match="^start this with: torchrun --nproc"):
        output_of("two_ranks")


def test_two_ranks(tmp_path):
    done = launch(EXAMPLES / "two_ranks.py", folder=tmp_path, ranks=2, max_restarts=1)
    assert done.status == 0, done.stderr
    output = done.stdout
    assert_shown("two_ranks", output)
    assert output.startswith("rank 1: dies after step 13\nboth ranks continue after step 10\n")
    rows = re.findall(r"step (\d+): loss ([\d.]+), without the death ([\d.]+)", output)
    assert [int(step) for step, _, _ in rows] == list(range(11, 17))
    assert all(loss == undisturbed for _, loss, undisturbed in rows)
    assert float(rows[-1][1]) < float(rows[0][1])
    assert output.endswith("identical: True\n")
    assert not (tmp_path / "runs" / "example-two-ranks").exists()


@pytest.mark.long
def test_fine_tuning(output_of):
    output = output_of("fine_tuning")
    before, after = numbers(r"loss ([\d.]+) on code", output)
    assert after < before - 0.4
    adam, factored, rest = numbers(r"Adam (?:of the rest )?([\d,]+) bytes", output)
    assert factored < 0.01 * adam and factored + rest < 0.1 * adam
    saved, saved_with_recompute = numbers(r"saved for backward: ([\d,]+)", output)
    assert saved_with_recompute < 0.6 * saved


def test_transformers_finetune(output_of):
    output = output_of("transformers_finetune")
    losses = numbers(r"step +\d+: loss ([\d.]+)", output)
    assert len(losses) == 6 and losses[0] > 5 and losses[-1] < 3
    logit, difference = numbers(r"largest \w+ ([\d.]+)", output)
    assert difference < 2e-4 < logit


@pytest.mark.parametrize(
    "name",
    ["finetune_gpt_oss_20b", pytest.param("finetune_qwen3_30b", marks=pytest.mark.long)],
)
def test_packed_fine_tuning(name, output_of, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    small = ["--layers", "2", "--width", "128", "--tokens", "32", "--lr", "3e-3"]
    output = output_of(name, *small, "--output", "adapters")
    written, largest = numbers(r"([\d.]+) GB,", output)[0], numbers(r"largest ([\d.]+)", output)[0]
    (loaded,) = numbers(r"loaded ([\d.]+)", output)
    assert 0 < largest <= written and abs(loaded - written) < 0.02
    losses = numbers(r"step +\d+: loss ([\d.]+)", output)
    assert len(losses) == 4 and losses[0] > 11 and losses[-1] < losses[0] - 0.3
    assert min(numbers(r"([\d.]+) tokens/s", output)) > 0
    assert [*tmp_path.iterdir()] == [tmp_path / "adapters"]  # the random weights are gone
    assert (tmp_path / "adapters" / "adapter_model.safetensors").is_file()


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_ops_in_cpp():
    """Runs the commands of the first comment of ops.cpp."""
    comment = (EXAMPLES / "cpp" / "ops.cpp").read_text().partition("#include")[0]
    commands, shown = re.findall(r"(?:^//     .*\n)+", comment, re.M)
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(EXAMPLES.parent),
    }
    command = ["bash", "-ec", re.sub(r"^//     ", "", commands, flags=re.M)]
    with locked(EXAMPLES.parent / "build" / "examples"):
        done = subprocess.run(
            command,
            cwd=EXAMPLES.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()[-1]
    assert without_numbers([f"//     {printed}"]) == without_numbers(shown.splitlines())
    assert 125 <= numbers(r"expert: (\d+)", printed)[0] < 250  # the mean is 2 * 1000 / 16


def test_the_readme_lists_all_examples():
    text = (EXAMPLES / "README.md").read_text()
    listed = re.findall(r"^\| \[([\w/]+\.\w+)\]\(\1\)", text, re.M)
    programs = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".cpp")]
    assert sorted(listed) == sorted(str(path.relative_to(EXAMPLES)) for path in programs)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_use_the_layer_alone(path):
    source = path.read_text()
    assert "moe_lab" not in source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("moe_ext"):
            names = __import__(node.module, fromlist=["__all__"]).__all__
            assert {alias.name for alias in node.names} <= set(names)
