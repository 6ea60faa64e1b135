"""The file of a study: its runs, its settings, and what the page needs of them."""

import json
from dataclasses import replace

import pytest
from moe_lab.errors import ConfigError
from moe_lab.experiments.stored import (
    changed_options,
    commands_of,
    mean_curve,
    read_stored,
    run_missing,
    shared_options,
    stored_runs,
)
from moe_lab.training.config import Config, TranslationConfig

SETTINGS = {"epochs": 2}


def test_runs_are_stored_one_by_one(tmp_path):
    path, locks = tmp_path / "results" / "study.json", tmp_path / "runs"
    calls = []

    def run(arm, seed):
        calls.append((arm, seed))
        if seed == 3:
            raise KeyboardInterrupt
        return {"value": seed}

    def all_runs(*keys):
        run_missing(keys, run, path, SETTINGS, ["b", "a"], locks)

    assert stored_runs(path, SETTINGS) == []
    with pytest.raises(KeyboardInterrupt):
        all_runs(("a", 2), ("b", 2), ("a", 1), ("a", 3))
    # The file is in the order of the arms; what was finished before the interrupt stays.
    expected = [("b", 2), ("a", 1), ("a", 2)]
    assert [(r["arm"], r["seed"]) for r in stored_runs(path, SETTINGS)] == expected
    all_runs(("a", 2), ("b", 1), ("a", 1))
    assert calls == [("a", 2), ("b", 2), ("a", 1), ("a", 3), ("b", 1)]
    first, *_ = stored_runs(path, SETTINGS)
    assert first.pop("seconds") >= 0 and first == {"arm": "b", "seed": 1, "value": 1}


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path):
    path = tmp_path / "study.json"

    def run(arm, seed):
        if seed == 1:
            raise FloatingPointError("step 7")
        run_missing([("a", 3)], lambda *_: {"value": 0}, path, SETTINGS, ["a"], tmp_path / "other")
        return {"value": seed}

    with pytest.raises(FloatingPointError, match="a with seed 1: step 7; --report writes"):
        run_missing([("a", n) for n in (1, 2, 3)], run, path, SETTINGS, ["a"], tmp_path / "locks")
    # Another process with locks of its own stored seed 3.
    assert [(r["seed"], r["value"]) for r in stored_runs(path, SETTINGS)] == [(2, 2), (3, 0)]


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "must be JSON"),
        ("[]", "must be a table with settings and runs, got 'list'"),
        ('{"runs": []}', "must be a table with settings and runs, got 'dict'"),
        ('{"settings": {"epochs": 2}, "runs": [{"arm": "a"}]}', "must each have an arm and a seed"),
        ('{"settings": {"epochs": 9}, "runs": []}', "must hold runs with {'epochs': 2}, got"),
    ],
)
def test_files_of_other_studies_are_refused(tmp_path, content, message):
    path = tmp_path / "study.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        stored_runs(path, SETTINGS)
    assert str(path) in str(error.value) and "give another --output" in str(error.value)


def test_options_that_are_newer_than_the_file_have_their_defaults(tmp_path):
    path, config = tmp_path / "study.json", TranslationConfig(steps=7)
    settings = shared_options(config)
    older = {key: value for key, value in settings.items() if key != "model.dropout"}
    path.write_text(json.dumps({"settings": older, "runs": [{"arm": "a", "seed": 1}]}))
    assert stored_runs(path, settings) == [{"arm": "a", "seed": 1}]
    assert changed_options(read_stored(path).settings, TranslationConfig()) == ["steps=7"]
    with pytest.raises(ConfigError, match="'model.dropout': 0.1"):
        stored_runs(path, settings | {"model.dropout": 0.1})


def test_options_that_all_runs_share():
    config = Config()
    shared = shared_options(config)
    assert shared["steps"] == config.steps and shared["log.eval_every"] == config.log.eval_every
    assert not {"seed", "output", "data.corpus", "log.progress"} & shared.keys()
    same = replace(config, seed=7, output="elsewhere", num_threads=3)
    assert shared_options(same) == shared and changed_options(shared, same) == []
    other = replace(config, steps=9, optimizer=replace(config.optimizer, learning_rate=0.5))
    assert changed_options(shared_options(other), config) == [
        "steps=9", "optimizer.learning_rate=0.5",
    ]  # fmt: skip


def test_the_mean_curve_averages_the_log_perplexity():
    runs = [{"dev": [[100, 0.0], [200, 1.0]]}, {"dev": [[101, 2.0], [201, 1.0]]}]
    runs = [{"arm": "a", **run} for run in runs] + [{"arm": "b", "dev": [[300, 9.0]]}]
    (first, ppl), (second, last) = mean_curve(runs, "a")
    assert (first, second) == (100, 200)
    assert (ppl, last) == pytest.approx((2.718281828, 2.718281828))
    assert mean_curve(runs, "c") == []


def test_commands_of_further_seeds_and_other_arms():
    runs = [{"arm": "a", "seed": seed} for seed in (1, 2, 3)]
    assert commands_of(["run"], runs, ["a"]) == "run"
    runs += [{"arm": "a", "seed": 4}, {"arm": "a x2", "seed": 1}]
    runs += [{"arm": arm, "seed": seed} for arm in ("b", "c") for seed in (2, 3)]
    assert commands_of(["run"], runs, ["a"]).splitlines() == [
        "run",
        "run --seeds 4 --arms a",
        "run --seeds 1 --arms 'a x2'",
        "run --seeds 2 3 --arms b c",
    ]
