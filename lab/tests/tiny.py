"""Tiny runs that the tests train, and the commands as a user runs them."""

import pathlib
import re
from argparse import Namespace
from dataclasses import fields
from functools import partial

import torch
from moe_lab.benchmarks import cases as benchmark_cases
from moe_lab.benchmarks import roofline, shapes
from moe_lab.cli import exit_status
from moe_lab.commands import prepare_data
from moe_lab.experiments.comparison import Comparison
from moe_lab.studies.entries import run as run_study

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "small" / "moe-32.toml"
TINY = [
    "data.vocab_size=60", "data.tokens_per_batch=100", "model.d_model=8", "model.moe.num_experts=4",
    "model.moe.k=2", "model.moe.hidden_sizes=[8]", "num_threads=1", "log.tensorboard=false",
    "log.log_every=1",
]  # fmt: skip


def cases(table):
    """Lists the (name, value) pairs of a table of the values of each name."""
    return [(name, value) for name, values in table.items() for value in values]


def equal(one, second):
    """Returns whether two lists of batches are the same."""
    return len(one) == len(second) and all(
        torch.equal(getattr(a, field.name), getattr(b, field.name))
        for a, b in zip(one, second, strict=True)
        for field in fields(a)
    )


def status_and_error(capsys, command, *arguments):
    """Runs a command, a module, or a study, by its name."""
    main = partial(run_study, command) if isinstance(command, str) else command.main
    capsys.readouterr()
    status = exit_status(lambda: main([str(a) for a in arguments]))
    error = capsys.readouterr().err
    return status, error


def prepare(*arguments):
    """Runs prepare-data; returns its text."""
    return prepare_data.main([str(argument) for argument in arguments])


def options_of(printed):
    """Returns the options of a text that prepare-data prints, without num_workers."""
    values = dict(re.findall(r"data\.(\w+)=(\S+)", printed))
    assert values.pop("num_workers") == "1"
    return values


def assert_names_option(capsys, option):
    """Asserts that the last line of stderr names an option (--name=value) and its value."""
    name, value = option.split("=")
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {name}: must" in last and f"got {value!r}" in last


def comparison(corpus, folder, *overrides, seeds=(1, 2), against=(), at_once=1):
    """Makes a comparison of tiny models."""
    small = [*TINY, f"data.corpus={corpus}", "steps=3", "log.progress=false", *overrides]
    return Comparison(
        Namespace(
            name="comparison", config=str(CONFIG), overrides=small, against=[*against],
            output=folder, seeds=[*seeds], at_once=at_once, report=False,
        )
    )  # fmt: skip


def rebuilds(study, name, folder, *options):
    """Returns whether --report writes the same page and plot, without runs and corpus."""
    files = [folder / f"{name}.{suffix}" for suffix in ("md", "png", "json")]
    before = [file.read_bytes() for file in files]
    for file in files[:2]:
        file.unlink()
    run_study(study, ["--report", *options, f"--output={folder}"])
    return [file.read_bytes() for file in files] == before


def assert_reports(case, path, capsys):
    """Asserts that a benchmark printed its page, and prints it again from its data."""
    page = path.with_suffix(".md").read_text()
    assert page in capsys.readouterr().out
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert benchmark_cases.run(case, ["--report", str(path)]) == 0
    assert capsys.readouterr().out == page
    assert benchmark_cases.run(case, ["--report", str(path), str(path)]) == 0
    assert "medians over up to 2 runs" in capsys.readouterr().out


def shrink_probes(monkeypatch):
    """Makes the probes of the machine small."""
    for name, size in (("GEMM_SIZE", 64), ("STREAM_SIZE", 1)):
        monkeypatch.setattr(roofline, name, dict.fromkeys(("cpu", "cuda"), size))


def shrink_models(monkeypatch, *modules, **sizes):
    """Makes the models of the benchmarks small, also in modules that import their table."""
    small = {
        name: model._replace(num_experts=8, k=2, **sizes) for name, model in shapes.MODELS.items()
    }
    for module in (benchmark_cases, shapes, *modules):
        monkeypatch.setattr(module, "MODELS", small)
    return small
