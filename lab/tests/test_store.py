"""The store of a study: its file, its runs, and the names of its arms."""

import argparse
import json
from dataclasses import replace

import pytest
from filelock import FileLock
from moe_lab.cli import parse
from moe_lab.errors import ConfigError
from moe_lab.experiments.arms import SEEDS_AND_ARMS, Arm, by_settings, parse_arm
from moe_lab.experiments.store import Store, Stored, run_missing, shared_options
from moe_lab.experiments.study import Study
from moe_lab.training.config import Config, TranslationConfig

SETTINGS = {"epochs": 2}
A, B = Arm("a"), Arm("b")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results" / "study.json", ["b", "a"])


def call(store, run, locks, *keys, **options):
    run_missing(store, SETTINGS, [(*key, options) for key in keys], run, locks)


def arms_and_seeds(store):
    return [(r["arm"], r["seed"]) for r in store.read(SETTINGS).runs]


def test_runs_are_stored_one_by_one(store, tmp_path):
    calls = []

    def run(arm, seed):
        calls.append((arm, seed))
        if seed == 3:
            raise KeyboardInterrupt
        return {"value": seed}

    assert store.read(SETTINGS).runs == []
    with pytest.raises(KeyboardInterrupt):
        call(store, run, tmp_path, (A, 2), (B, 2), (A, 1), (A, 3))
    # The file is in the order of the arms; what was finished before the interrupt stays.
    assert arms_and_seeds(store) == [("b", 2), ("a", 1), ("a", 2)]
    with FileLock(tmp_path / ".a-seed5.lock"):  # another process runs it
        call(store, run, tmp_path, (A, 2), (B, 1), (A, 1), (A, 5))
    assert calls == [(A, 2), (B, 2), (A, 1), (A, 3), (B, 1)]
    first, *_ = store.read(SETTINGS).runs
    assert first.pop("seconds") >= 0 and "torch" in first.pop("machine")
    assert first == {"arm": "b", "seed": 1, "options": {}, "value": 1}


def test_a_run_that_diverges_does_not_stop_the_others(store, tmp_path):
    calls = []

    def run(arm, seed):
        calls.append(seed)
        if seed == 1:
            raise FloatingPointError("step 7")
        # Another process with locks of its own stores seed 3.
        call(store, lambda *_: {"value": 0}, tmp_path / "other", (A, 3))
        return {"value": seed}

    with pytest.raises(FloatingPointError, match="a with seed 1: step 7; the same command"):
        call(store, run, tmp_path, *((A, n) for n in (1, 2, 3)))
    stored = store.read(SETTINGS)
    assert [(r["seed"], r["value"]) for r in stored.runs] == [(2, 2), (3, 0)]
    assert [(r["arm"], r["seed"], r["error"]) for r in stored.diverged] == [("a", 1, "step 7")]
    call(store, run, tmp_path, (A, 1), (A, 2))  # it is not repeated
    assert calls == [1, 2]


def test_an_arm_with_other_options_is_refused(store, tmp_path):
    call(store, lambda *_: {}, tmp_path, (A, 1), rate=1)
    call(store, lambda *_: {}, tmp_path, (A, 1), rate=1)
    with pytest.raises(ConfigError, match="runs of a with {'rate': 2}, got {'rate': 1}"):
        call(store, lambda *_: {}, tmp_path, (A, 1), rate=2)


def test_options_that_all_runs_share(store):
    config = TranslationConfig(steps=7)
    shared = shared_options(config)
    assert shared["steps"] == 7 and shared["log.eval_every"] == config.log.eval_every
    assert not {"seed", "output", "data.corpus", "log.progress"} & shared.keys()
    assert shared_options(replace(config, seed=7, output="elsewhere", num_threads=3)) == shared
    assert shared_options(Config()) != shared
    # Options that are newer than the file have their defaults.
    older = {key: value for key, value in shared.items() if key != "model.dropout"}
    store.path.parent.mkdir()
    store.path.write_text(json.dumps({"settings": older, "runs": [{"arm": "a", "seed": 1}]}))
    assert store.read(shared).runs == [{"arm": "a", "seed": 1}]
    with pytest.raises(ConfigError, match="'model.dropout': 0.1"):
        store.read(shared | {"model.dropout": 0.1})
    # The path of the corpus may differ.
    assert store.read(shared | {"corpus": "elsewhere"}).find(A, 1) is not None


NAMES = {
    "moe-4": Arm("moe-4"),
    "moe-4 x4": Arm("moe-4", times=4),
    "moe-16 x0.25": Arm("moe-16", times=0.25),
    "moe-4 rate 0.004": Arm("moe-4", rate=4e-3),
    "4xlstm x4 rate 0.016": Arm("4xlstm", times=4, rate=16e-3),
    "moe-4 rate 0.016 experts 0.008": Arm("moe-4", rate=16e-3, expert_rate=8e-3),
    "moe-4 rate 0.016 experts 0.004": Arm("moe-4", rate=16e-3, expert_rate=4e-3),
    "moe-4 x8 dropout 0.1": Arm("moe-4", times=8, dropout=0.1),
    "single en-de": Arm("single", pair="en-de"),
    "dense attends language": Arm("dense", attends_language=True),
    "dense attends language, rate 0.002": Arm("dense", attends_language=True, rate=2e-3),
    "0.1,0.1": Arm("0.1,0.1"),
}


def test_the_name_of_an_arm_gives_its_settings():
    for name, arm in NAMES.items():
        assert parse_arm(name) == arm and str(arm) == name
        assert (
            str(arm.usual)
            == name.partition(" attends")[0].partition(" rate")[0].partition(" dropout")[0]
        )
    assert NAMES["moe-4 rate 0.016 experts 0.008"].overrides == [
        "optimizer.learning_rate=0.016", "optimizer.expert_learning_rate=0.008",
    ]  # fmt: skip
    assert NAMES["moe-4 x8 dropout 0.1"].overrides == ["model.dropout=0.1"]
    assert NAMES["dense attends language"].overrides == ["model.attend_language=true"]
    assert NAMES["moe-4 x4"].overrides == []
    for wrong in ("", "a b", "a rate", "a rate x", "a rate nan", "a x4 x4", "a dropout 0.1 rate 1"):
        with pytest.raises(ValueError):
            parse_arm(wrong)
    # The store is ordered by options, length and model.
    arms = [parse_arm(name) for name in ("b", "a", "a x4", "b rate 0.1", "a dropout 0.1", "a x0.5")]
    names = [str(arm) for arm in sorted(arms, key=by_settings(["a", "b"]))]
    assert names == ["a", "b", "a x0.5", "a x4", "b rate 0.1", "a dropout 0.1"]


def test_arms_on_the_command_line(capsys):
    assert parse("", SEEDS_AND_ARMS, []).arms is None
    arms = parse("", SEEDS_AND_ARMS, ["--arms", "moe-4 x4", "dense rate 0.1"]).arms
    assert arms == [Arm("moe-4", times=4), Arm("dense", rate=0.1)]
    with pytest.raises(SystemExit):
        parse("", SEEDS_AND_ARMS, ["--arms", "moe-4 x"])
    assert "argument --arms: " in capsys.readouterr().err
    assert Stored({}).by_arm()[A] == {}


class OneModel(Study):
    name, models, usual, arm_settings = "one", ["a", "b"], ["a", "a x2"], ["times"]
    settings = run = page = command = lambda *_: None


def test_a_study_refuses_arms_that_it_does_not_have():
    def arms(*names):
        return OneModel(argparse.Namespace(runs="", arms=list(map(parse_arm, names)))).arms

    assert arms() == [A, Arm("a", times=2)] and arms("b x4") == [Arm("b", times=4)]
    for wrong in ("c", "a rate 0.1", "a dropout 0.1"):
        with pytest.raises(ConfigError, match=f"--arms must be one of a, b, .*got '{wrong}'"):
            arms(wrong)
