"""Configuration, training, checkpoints, measurement."""

import io
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
from dataclasses import replace

import pytest
import torch
from assertions import assert_exact
from moe_lab.analysis.costs import cost
from moe_lab.data import Vocabulary
from moe_lab.errors import ConfigError
from moe_lab.experiments.comparison import dense_counterpart
from moe_lab.experiments.single_run import Result, train_and_test
from moe_lab.files import read_json, write_json
from moe_lab.models import LanguageModel
from moe_lab.training import device as device_module
from moe_lab.training import folder as folder_module
from moe_lab.training.checkpoint import checkpoints_of, load_run
from moe_lab.training.config import Config, DataConfig, LogConfig, read_config, to_toml
from moe_lab.training.device import set_up_torch
from moe_lab.training.logging import RunLog, read_metrics
from moe_lab.training.loop import Trainer, make_trainer
from moe_lab.training.metrics import Evaluation, Window, evaluate, perplexity
from moe_lab.training.model import make_model
from moe_lab.training.optimizers import make_optimizers
from moe_lab.training.text import load_part, load_text
from moe_lab.training.threads import ThreadChoice
from trained import QUIET, assert_same_run, assert_same_state, merged, state_of, train

from moe_ext import MoE, balanced_gates, batchwise_masks
from moe_ext.distributed import Ranks
from moe_ext.optim import FactoredAdam

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


@pytest.fixture
def table(corpus, tmp_path):
    """A configuration as nested dicts: a small MoE model with dropout and two batches per step."""
    return {
        "output": str(tmp_path / "run"),
        "steps": 12,
        "num_threads": 1,
        "data": {"corpus": str(corpus), "vocab_size": 60, "tokens_per_batch": 215},
        "model": {
            "d_model": 16,
            "dropout": 0.2,
            "moe": {"num_experts": 4, "k": 2, "hidden_sizes": [16]},
        },
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 4, "accumulate": 2},
        "log": {"log_every": 2, "eval_every": 4, "save_every": 5} | QUIET,
    }


# Configuration


def write(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_overrides_are_toml_or_else_strings(tmp_path):
    path = write(tmp_path, "steps = 5\n[model.moe]\nk = 2\n")
    overrides = ["model.moe.k=3", "model.layers=['lstm']", "data.corpus=some/path", "resume=true"]
    config = read_config(path, [*overrides, "optimizer.eps=1"])
    assert (config.steps, config.model.moe.k, config.model.layers) == (5, 3, ["lstm"])
    assert config.data.corpus == "some/path" and config.resume is True
    assert config.optimizer.eps == 1.0 and isinstance(config.optimizer.eps, float)
    assert config.output == "runs/config"


ERRORS = [
    "model.moe.k=two", "model.moe.k=true", "model.moe.k=99", "model.moe.hidden_sizes=[1.5]",
    "model.moe.w_load=nan", "model.dropout=1.5", "model.layers=lstm", "model=3", "steps=0",
    "seed=-1", f"seed={2**62}", "autocast=float16", "num_threads=5000", "timeout=1e300",
    "optimizer.clip_norm=inf", "optimizer.experts=factored", f"optimizer.eps={10**400}",
    "steps=500\nseed=2", 'output="a\\u0000b"',
]  # fmt: skip


@pytest.mark.parametrize("override", ERRORS)
def test_configuration_errors_say_option_rule_and_value(tmp_path, override):
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^option {key} must .*got"):
        read_config(write(tmp_path, "steps = 5\n"), [override])


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.droput=0.1", ["option model.droput", "mean model.dropout?"]),
        ("learning_rate=1", ["option learning_rate", "mean optimizer.learning_rate?"]),
        ("modle.moe.k=1", ["option modle", "mean model?"]),
        ("k=1", ["option k", "mean model.moe.k?"]),
        ("steps", ["override", "'steps'"]),
        ("steps.more=1", ["override 'steps.more=1'", "steps must"]),
    ],
)
def test_overrides_of_no_option_say_which_one_is_near(tmp_path, override, parts):
    with pytest.raises(ConfigError) as error:
        read_config(write(tmp_path, "steps = 5\n"), [override])
    assert all(part in str(error.value) for part in parts)


def test_configurations_survive_toml(tmp_path):
    config = Config(output='a "quoted" näme \x7f', steps=7, autocast="bfloat16")
    config.model.layers = ["lstm", "ffn"]
    config.optimizer.eps = 1e-9
    assert read_config(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: path.stem)
def test_every_configuration_file_is_valid_and_says_what_to_expect(path):
    config = read_config(path)
    with torch.device("meta"):
        make_model(config.model, config.data.vocab_size)
    first, second = path.read_text().splitlines()[:2]
    assert first.startswith("# ") and second.startswith("# ")


# Training


def test_training_learns_and_logs(table):
    trainer = train(merged(table, steps=60, log={"tensorboard": True}))
    folder = trainer.folder
    records = read_metrics(folder, "train")
    assert [record["step"] for record in records] == list(range(2, 61, 2))
    assert records[-1]["nll"] < records[0]["nll"] - 1
    last = records[-1]
    assert last["aux_loss"] > 0 and last["words_per_second"] > 0
    for key in ("cv_importance", "cv_load", "max_over_mean_load"):
        assert len(last[key]) == 1
    (load,) = last["load"]
    assert len(load) == 4 and sum(load) == pytest.approx(4, rel=1e-5)
    dev = read_metrics(folder, "dev")
    assert [record["step"] for record in dev] == list(range(4, 61, 4))
    assert dev[-1]["perplexity"] == pytest.approx(
        evaluate(trainer.model, trainer.text.dev).perplexity, rel=1e-6
    )
    assert read_config(folder / "config.toml") == trainer.config
    assert any((folder / "tensorboard").iterdir())
    # save_every is 5; the two newest checkpoints are kept.
    assert checkpoints_of(folder).steps() == [55, 60]


def test_balanced_gates_are_measured_under_both_masks(table):
    """In training, all experts have equally many tokens. A resumed run has the saved thresholds."""
    moe = {"gate": "balanced", "num_experts": 4, "k": 2, "hidden_sizes": [16], "w_load": 0.0}
    config = merged(table, steps=20, model={"moe": moe})
    trainer = train(config)
    for record in read_metrics(trainer.folder, "train"):
        assert record["max_over_mean_load"] == [1.0] and record["load"] == [[1.0] * 4]
        assert 0 <= record["mask_disagreement"][0] <= 1
        assert 0 <= record["share_without_expert"][0] < 1
    last = read_metrics(trainer.folder, "dev")[-1]
    text, size = trainer.text.dev, config.data.tokens_per_batch
    by_threshold = evaluate(trainer.model, text, tokens_per_batch=size, title=None).perplexity
    with batchwise_masks(trainer.model):
        by_batch = evaluate(trainer.model, text, tokens_per_batch=size, title=None).perplexity
    assert last["perplexity"] == pytest.approx(by_threshold, rel=1e-6)
    assert last["perplexity_batchwise"] == pytest.approx(by_batch, rel=1e-6)
    assert by_batch != by_threshold
    (gate,) = balanced_gates(trainer.model)
    (resumed,) = balanced_gates(make_trainer(replace(config, resume=True), trainer.text).model)
    assert resumed.initialized and torch.equal(resumed.threshold, gate.threshold)


@pytest.mark.parametrize(
    ("experts", "num_sampled", "dtype"),
    [("adam", 0, "float32"), ("factored_adam", 9, "float32"), ("factored_adam", 9, "bfloat16")],
)
def test_resumed_equals_uninterrupted_to_the_last_bit(table, tmp_path, experts, num_sampled, dtype):
    # 24 batches, 11 per epoch: the second epoch begins before the stop, the third after it.
    table["optimizer"] |= {"experts": experts, "embedding": experts}
    table["model"] |= {"num_sampled": num_sampled, "dtype": dtype}
    options = {"log": {"save_every": 6, "eval_every": 6}}
    whole = train(merged(table, **options))
    assert whole.batches.num_batches == 11
    part = merged(table, output=str(tmp_path / "part"), steps=6, **options)
    train(part)
    torch.randn(7)  # the RNG state of the process is irrelevant
    resumed = train(merged(table, output=part.output, resume=True, **options))
    assert_same_run(whole.folder, resumed.folder)


def test_records_after_a_crash_cover_the_steps_before_it(table, tmp_path, monkeypatch):
    """The checkpoint of step 6 has the sums of the steps 5 and 6 for the record of step 8."""
    options = {"log": {"log_every": 4, "save_every": 3, "eval_every": 6}}
    whole = train(merged(table, **options))
    part = merged(table, output=str(tmp_path / "part"), **options)
    step = Trainer.train_step

    def crash(trainer, *arguments):
        if trainer.step == 7:
            raise RuntimeError("a crash")
        step(trainer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", crash)
        with pytest.raises(RuntimeError, match="a crash"):
            train(part)
    resumed = train(merged(table, output=part.output, resume=True, **options))
    assert_same_run(whole.folder, resumed.folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_weights_in_the_factored_optimizer(table, dtype):
    """A model of dense layers has no other parameters."""
    table["optimizer"] |= {"experts": "factored_adam", "embedding": "factored_adam"}
    table["model"] |= {"layers": ["ffn"], "dtype": dtype}
    (optimizer,) = train(merged(table)).optimizers
    assert isinstance(optimizer, FactoredAdam)


def test_mapped_text_and_workers_change_nothing(table, tmp_path, children):
    """Results are the same with a stop in the first epoch (step 3) and in the second (step 8)."""
    whole = train(merged(table, data={"max_length": 4}))
    assert whole.batches.num_batches == 11
    data = {"max_length": 4, "encoded": str(tmp_path / "ids")}
    for steps, num_workers in ((3, 2), (8, 1), (12, 0)):
        options = {"output": str(tmp_path / "parts"), "resume": steps > 3, "steps": steps}
        train(merged(table, **options, data={**data, "num_workers": num_workers}))
        assert not children()
    # Each stop adds only an evaluation and a log line.
    parts = pathlib.Path(options["output"])
    assert_same_state(*map(state_of, (whole.folder, parts)))


@pytest.mark.parametrize(("number", "num_workers"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_a_signal_saves_and_stops(table, tmp_path, monkeypatch, number, num_workers, children):
    """With log_every=6, the first train record of the interrupted run is that of step 4."""
    log_every = 4 if num_workers else 6
    whole = train(merged(table, log={"log_every": log_every}))
    options = {"log": {"log_every": log_every}, "data": {"num_workers": num_workers}}
    stopped = make_trainer(merged(table, output=str(tmp_path / "stopped"), **options))
    step = Trainer.train_step

    def with_signal(self, *arguments):
        if self.step == 3:
            workers = children()
            assert len(workers) == num_workers
            for process in (*(worker.pid for worker in workers), os.getpid()):
                os.kill(process, number)
        step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", with_signal)
    before = signal.getsignal(number)
    assert stopped.run() is False
    assert signal.getsignal(number) is before
    monkeypatch.setattr(Trainer, "train_step", step)
    assert checkpoints_of(stopped.folder).steps()[-1] == 4
    resumed = make_trainer(replace(stopped.config, resume=True))
    assert resumed.run() is True
    records = [record["step"] for record in read_metrics(resumed.folder, "train")]
    if num_workers:
        assert_same_run(whole.folder, resumed.folder)
    else:
        assert_same_state(*map(state_of, (whole.folder, resumed.folder)))
        assert records == [4, 6, 12]


def test_a_signal_in_the_last_evaluation_is_not_lost(table, monkeypatch):
    """The run is finished; its result is measured by the next call."""
    config = merged(table, num_threads=0)
    text = load_text(config.data)
    evaluated = Trainer._evaluate

    def with_signal(self):
        if self.step == config.steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluated(self)

    monkeypatch.setattr(Trainer, "_evaluate", with_signal)
    with pytest.raises(KeyboardInterrupt):
        train_and_test(config, text)
    assert checkpoints_of(pathlib.Path(config.output)).steps()[-1] == config.steps
    monkeypatch.setattr(Trainer, "_evaluate", evaluated)
    assert math.isfinite(train_and_test(config, text).test_nll)


def test_accumulated_step_is_the_mean_over_all_tokens(table):
    config = merged(table, model={"dropout": 0.0}, optimizer={"accumulate": 2})
    trainer = make_trainer(config)
    twin = make_trainer(config)
    batches = list(trainer.batches.epoch(0))
    batches = [min(batches, key=lambda b: b.num_tokens), max(batches, key=lambda b: b.num_tokens)]
    assert batches[0].num_tokens < batches[1].num_tokens
    parts = [twin.model.loss(batch) for batch in batches]
    total = sum(part.num_tokens for part in parts)
    nll = sum(part.nll_sum for part in parts) / total
    aux = sum(part.num_tokens * part.aux_loss for part in parts) / total
    (nll + aux).backward()

    trainer.optimizers[0].zero_grad = lambda: None  # keep the gradients
    window = Window()
    trainer.train_step(batches, window)
    window.seconds = 1.0
    for (name, a), b in zip(trainer.model.named_parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)
    summary = window.summary(Ranks())
    # The nats do not include the balancing loss.
    assert summary["nll"] == pytest.approx(nll.item(), rel=1e-6)
    assert summary["aux_loss"] == pytest.approx(aux.item(), rel=1e-5)
    assert summary["words_per_second"] == trainer.tokens == total
    cv_load = [part.aux[0].metrics()["cv_load"] for part in parts]
    assert summary["cv_load"] == [pytest.approx(sum(cv_load) / 2, rel=1e-5)]


@pytest.mark.parametrize("first, rate_of_2, chosen", [(1, 119, 1), (10**6, 121, 2)])
def test_several_threads_must_be_faster(threads, first, rate_of_2, chosen):
    """The first step does not count."""
    threads(2)
    choice = ThreadChoice()
    said = []
    while choice.chosen is None:
        choice.begin_step()
        rate = 100 if torch.get_num_threads() == 1 else rate_of_2
        said.append(choice.end_step(rate if said else first))
    assert choice.chosen == torch.get_num_threads() == chosen
    assert said[:-1] == [""] * 6
    assert said[-1] == f"threads {chosen} of 2 (words/s: 100 with 1, {rate_of_2} with 2)"
    threads(1)
    alone = ThreadChoice()
    alone.begin_step()
    assert alone.chosen == 1 and alone.end_step(100) == ""


def test_a_run_says_its_choice_of_threads(table, threads, capsys):
    """The trial takes real steps: the run has the same number of steps and records."""
    threads(2)
    trainer = make_trainer(merged(table, num_threads=0, log={"progress": True}))
    assert trainer.run() and trainer.step == 12
    assert torch.get_num_threads() == 2  # as before the run
    (said,) = [line for line in capsys.readouterr().err.splitlines() if " threads " in line]
    assert re.search(r"run: threads [12] of 2 \(words/s: .* with 1, .* with 2\)", said)


def test_a_run_warns_when_it_slows_down(table, monkeypatch, capsys):
    rates = iter([300.0, 900.0, 301.0, 299.0, 950.0, 950.0])
    summary = Window.summary
    monkeypatch.setattr(
        Window, "summary", lambda *args: summary(*args) | {"words_per_second": next(rates)}
    )
    make_trainer(merged(table, log={"progress": True})).run()
    said = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(said) == 1
    assert "warning: 299 words/s after 900 words/s earlier" in said[0]


def test_gradients_are_clipped(table, monkeypatch):
    trainer = make_trainer(merged(table, optimizer={"clip_norm": 1e-3}))
    trainer.optimizers[0].zero_grad = lambda: None
    trainer.run()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-4)


def test_every_parameter_has_its_optimizer(table):
    """FactoredAdam gets the selected weights. Experts and thresholds have their own rates."""
    options = {"experts": "factored_adam", "threshold_learning_rate": 0.5}
    options |= {"beta1": 0.8, "beta2": 0.9, "eps": 1e-7}
    moe = {"gate": "balanced", "num_experts": 4, "k": 2, "hidden_sizes": [16], "w_load": 0.0}
    trainer = make_trainer(merged(table, optimizer=options, model={"moe": moe}))
    model = trainer.model
    (layer,) = [module for module in model.modules() if isinstance(module, MoE)]
    adam, factored = trainer.optimizers
    assert isinstance(adam, torch.optim.Adam) and isinstance(factored, FactoredAdam)
    (rest, thresholds), (experts,) = adam.param_groups, factored.param_groups
    assert all(a is b for a, b in zip(experts["params"], layer.experts.weights, strict=True))
    assert thresholds["params"][0] is layer.gate.threshold
    rates = [group["initial_lr"] for group in (rest, experts, thresholds)]
    assert rates == [0.01, 0.01, 0.5]
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-7 for group in adam.param_groups)
    assert experts["beta2"] == 0.9 and experts["eps"] == 1e-7
    assert len(rest["params"]) + 1 + len(layer.experts.weights) == len(list(model.parameters()))
    (adam,) = make_optimizers(model, merged(table).optimizer)
    (all_params,) = adam.param_groups
    assert list(map(id, all_params["params"])) == list(map(id, model.parameters()))
    slower = merged(table, optimizer={"expert_learning_rate": 0.005}).optimizer
    (adam,) = make_optimizers(model, slower)
    usual, experts = adam.param_groups
    assert list(map(id, experts["params"])) == list(map(id, layer.experts.weights))
    assert (usual["lr"], experts["lr"]) == (0.01, 0.005)
    adam, factored = make_optimizers(
        model, replace(trainer.config.optimizer, embedding="factored_adam")
    )
    large = [model.embedding.weight, *model.softmax.parameters(), *layer.experts.weights]
    assert list(map(id, factored.param_groups[0]["params"])) == list(map(id, large))


def test_autocast_trains(table):
    exact = train(merged(table, output=table["output"] + "-float32", steps=2))
    trainer = train(merged(table, autocast="bfloat16", steps=2))
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    nll, expected = (read_metrics(run.folder, "train")[-1]["nll"] for run in (trainer, exact))
    assert nll != expected and nll == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("what", "clip_norm"),
    [("loss of step 1", 1.0), ("gradient of step 3", 1.0), ("weights after step 3", 0.0)],
)
def test_divergence_is_said_and_not_saved(table, children, what, clip_norm):
    """Clipping would make the weights NaN; without clipping, the weights are checked."""
    options = {"optimizer": {"clip_norm": clip_norm}, "data": {"num_workers": 1}}
    trainer = make_trainer(merged(table, steps=4, log={"save_every": 1}, **options))
    softmax = trainer.model.softmax
    if what[0] == "l":
        softmax.bias.data[0] = float("nan")
    softmax.weight.register_hook(lambda grad: grad / 0 if trainer.step == 2 else grad)
    with pytest.raises(FloatingPointError, match=f"the {what} (is|are) not finite; lower"):
        trainer.run()
    assert not children()
    if what[0] == "g":
        assert softmax.weight.isfinite().all()
        assert softmax.weight.grad is None  # the caller may go on
    assert checkpoints_of(trainer.folder).steps() == ([] if what[0] == "l" else [1, 2])


def test_runs_of_one_seed_see_the_same_batches_and_dropout(table):
    """The initialisation of the models does not affect batches and dropout."""
    moe = merged(table)
    ends = []
    for config in (moe, dense_counterpart(moe), merged(table, model={"lstm_units": 16})):
        trainer = make_trainer(config)
        batches = list(trainer.batches.epoch(0))[:2]
        trainer.train_step(batches)
        ends.append((torch.get_rng_state(), [batch.inputs for batch in batches]))
    for state, inputs in ends[1:]:
        assert torch.equal(state, ends[0][0])
        assert all(torch.equal(a, b) for a, b in zip(inputs, ends[0][1], strict=True))


# Run folders and checkpoints


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_is_never_overwritten(table):
    folder = train(merged(table, steps=2)).folder
    before = snapshot(folder)
    resumed = {"resume": True}
    for options, message in (
        ({"steps": 2}, "is not empty; continue the run in it with resume=true"),
        (resumed | {"model": {"dropout": 0.3}}, "model.dropout must"),
        (resumed | {"output": str(folder / "nowhere")}, "there is no run in .* omit resume=true"),
        (resumed | {"steps": 1}, "steps must .*got 1"),
        ({"output": str(folder / "config.toml")}, "output must"),
        ({"output": str(folder / "config.toml/a/b")}, "output must"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_trainer(merged(table, **options))
    assert snapshot(folder) == before


def test_resuming_with_another_vocabulary_is_refused(table, tmp_path, corpus):
    text_folder = shutil.copytree(corpus, tmp_path / "text")
    config = merged(table, steps=2, data={"corpus": str(text_folder)})
    folder = train(config).folder
    before = snapshot(folder)
    with (text_folder / "train.txt").open("a") as file:
        file.write("entirely new words\n")
    with pytest.raises(ConfigError, match="must be the vocabulary of the run .* new run"):
        make_trainer(replace(config, resume=True, steps=4))
    (folder / "vocabulary.txt").write_text("<unk>\n</s>\nother\n")
    with pytest.raises(ConfigError, match="must be the vocabulary of the run"):
        load_run(folder)
    (folder / "vocabulary.txt").unlink()
    with pytest.raises(ConfigError, match="restore vocabulary.txt in the run's folder"):
        load_run(folder)
    before.pop(folder / "vocabulary.txt")
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("name", "cuda_version", "gpus", "message"),
    [
        ("warp", "13.0", 1, "device must"),
        ("meta", "13.0", 1, "device must"),
        ("cuda", None, 1, "cpu because moe_ext is built without CUDA, got 'cuda'; install"),
        ("cuda:0", "13.0", 0, "cpu because torch finds no GPU, got 'cuda:0'"),
        ("cuda:2", "13.0", 2, "one of the 2 available GPUs, got 'cuda:2'"),
        ("cuda:1", "13.0", 2, None),
        ("cpu", None, 0, None),
    ],
)
def test_a_device_is_one_the_operators_run_on(monkeypatch, name, cuda_version, gpus, message):
    monkeypatch.setattr(device_module, "cuda_version", lambda: cuda_version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if message is None:
        return set_up_torch(name, 0)
    with pytest.raises(ConfigError, match=message):
        set_up_torch(name, 0)


def test_a_run_continues_from_the_checkpoint_before_a_corrupted_one(table, tmp_path):
    whole = train(merged(table))
    options = {"output": str(tmp_path / "corrupted"), "log": {"save_every": 4}}
    part = train(merged(table, steps=8, **options)).folder
    (part / "checkpoints" / "step-00000008" / "state.pt").write_bytes(b"")
    message = "state.pt is corrupted.*; loading .*step-00000004 instead"
    with pytest.warns(UserWarning, match=message):
        resumed = make_trainer(merged(table, resume=True, **options))
    assert resumed.step == 4
    assert resumed.run()
    assert_same_run(whole.folder, part)


@pytest.mark.parametrize("name", ["write_text", "RunLog"])
def test_a_start_cut_short_is_started_or_resumed(table, monkeypatch, name):
    """After a failure at any point, the folder can be resumed or allows a new start."""
    config = merged(table, steps=4)
    expected = train(replace(config, output=config.output + "-whole"))

    def fail(path, *arguments, **options):
        if name == "RunLog":
            (path / "metrics.jsonl").touch()
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, name, fail)
        with pytest.raises(OSError, match="disk full"):
            train(config)
    folder = pathlib.Path(config.output)
    (folder / ".config.toml.x3k").write_text("the temporary file of a process that was killed")
    again = train(replace(config, resume=(folder / "config.toml").exists()))
    assert_same_run(expected.folder, again.folder)
    assert load_run(folder).step == 4


@pytest.mark.parametrize(("terminal", "progress"), [(False, True), (True, True), (True, False)])
def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_file(
    tmp_path, monkeypatch, terminal, progress
):
    shown = io.StringIO()
    shown.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", shown)
    options = LogConfig(tensorboard=False, progress=progress)
    log = RunLog(tmp_path, options, start_step=0, steps=500, title="run")
    for step in range(1, 401):
        log.step_done()
        if step % 200 == 0:
            log.write("train", step, {"nll": 5.5, "words_per_second": 1234.5, "load": [[1.0]]})
    log.write("dev", 400, {"nll": 5.0, "perplexity": 148.4})
    log.close()
    text = shown.getvalue()
    dev = "run: step 400/500, dev nll 5, ppl 148.4\n"
    if not progress:
        assert text == ""
    elif terminal:
        assert dev in text and "nll 5.5, words/s 1,234" in text and "400/500" in text
    else:
        assert text == (
            "run: step 200/500, train nll 5.5, words/s 1,234\n"
            "run: step 400/500, train nll 5.5, words/s 1,234\n" + dev
        )


def test_two_processes_do_not_train_in_one_folder(table, monkeypatch):
    """Neither at the same time nor in sequence, if both were created while the folder was empty."""
    first, second, third = (make_trainer(merged(table)) for _ in range(3))
    step = Trainer.train_step

    def with_another(self, *arguments):
        with pytest.raises(ConfigError, match="^another run is training in .*; wait until"):
            second.run()
        step(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", with_another)
    assert first.run()
    monkeypatch.setattr(Trainer, "train_step", step)
    metrics = (first.folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="^another run has trained in .* in the meantime"):
        third.run()
    longer = replace(first.config, steps=14, resume=True)
    ahead, behind = make_trainer(longer), make_trainer(longer)
    assert ahead.run()
    with pytest.raises(ConfigError, match="^another run has trained in .* in the meantime"):
        behind.run()
    assert (first.folder / "metrics.jsonl").read_bytes().startswith(metrics)


def test_a_run_goes_on_with_the_text_it_began_with(table, corpus, tmp_path):
    """The folder of the text may move; the same words in another order are another text."""
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    config = train(merged(table, steps=2)).config
    (pathlib.Path(config.output) / "vocabulary.txt").unlink()
    data = {**table["data"], "corpus": str(moved)}
    assert train(merged(table, steps=4, data=data, resume=True)).step == 4
    assert load_run(config.output).step == 4  # the vocabulary is written again
    lines = (moved / "train.txt").read_text().splitlines(keepends=True)
    (moved / "train.txt").write_text("".join(reversed(lines)))
    with pytest.raises(ConfigError, match="^the training text of .*moved must be the text of"):
        make_trainer(merged(table, steps=6, data=data, resume=True))


def test_options_that_do_not_fit_the_vocabulary(table):
    with pytest.raises(ConfigError, match="^model: .*num_sampled must .*got 1024$"):
        make_trainer(merged(table, model={"num_sampled": 1024}))
    with pytest.raises(ConfigError, match="^option model.num_sampled must be 0 if data.kind"):
        merged(table, model={"num_sampled": 4}, data={"kind": "bpe"})


def test_a_log_cut_short_by_a_crash_is_continued(table):
    config = merged(table, steps=6)
    folder = train(config).folder
    path = folder / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "train", "step": 8, "nll": 1.0}\n{"kind": "tra')
    resumed = make_trainer(replace(config, resume=True))
    resumed.run()
    assert path.read_text() == whole


def test_metrics_are_strict_json_also_if_they_are_not_finite(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    values = {"nll": 800.0, "perplexity": math.inf, "load": [[1.0, math.nan], [-math.inf, 2]]}
    for start_step in (0, 1):  # a resumed run writes the earlier records again
        options = LogConfig(tensorboard=False, progress=False)
        log = RunLog(tmp_path, options, start_step=start_step, steps=2, title="run")
        log.write("dev", start_step + 1, values)
        log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [row["perplexity"] for row in written] == ["Infinity"] * 2
    assert [row["load"] for row in written] == [[[1.0, "NaN"], ["-Infinity", 2]]] * 2
    for number, record in enumerate(read_metrics(tmp_path), start=1):
        assert repr(record) == repr({"kind": "dev", "step": number, **values})
    write_json(tmp_path / "study.json", values)
    json.loads((tmp_path / "study.json").read_text(), parse_constant=refuse)
    assert repr(read_json(tmp_path / "study.json")) == repr(values)


# Measurement


def test_perplexity_by_hand(table):
    """All words and ends of sentences count."""
    trainer = train(merged(table, steps=4))
    trainer.model.double()
    test = trainer.text.test
    result = evaluate(trainer.model, test)
    assert result.num_tokens == test.num_tokens
    words = test[3]
    ids = torch.tensor([[test.eos_id, *words]])
    with torch.no_grad():
        h, _ = trainer.model.eval()(ids)
        logp = trainer.model.softmax(h).log_softmax(-1)[0]
    by_hand = -sum(logp[i, word] for i, word in enumerate([*words, test.eos_id]))
    assert_exact(result.sentence_nll[3], by_hand)
    assert trainer.model.training is False


def test_perplexity_of_a_diverged_model_is_infinite():
    assert perplexity(1.5) == math.exp(1.5) and perplexity(709.7) < math.inf
    assert perplexity(710.0) == math.inf and math.isnan(perplexity(math.nan))
    nll = torch.tensor([2000.0], dtype=torch.float64)
    assert Evaluation(nll, 2).perplexity == math.inf
    unused = dict(run=None, seed=1, cost=None, words_per_second=1.0, balance={}, sentence_nll=nll)
    unused["earlier_nll"] = {}
    assert Result(test_nll=1000.0, **unused).perplexity == math.inf


def test_a_part_is_read_alone(tmp_path):
    """A short text can be evaluated without a split; other parts are not even decoded."""
    vocabulary = Vocabulary(["a", "b", "</s>", "<unk>"])
    (tmp_path / "short.txt").write_text("a b\nb c\n")
    part = load_part(DataConfig(corpus=str(tmp_path / "short.txt")), vocabulary, "all")
    assert list(part) == [[0, 1], [1, 3]]
    with pytest.raises(ConfigError, match="data.corpus: the dev part of .* at least one sentence"):
        load_text(DataConfig(corpus=str(tmp_path / "short.txt")))
    for name, line in (("train", b"caf\xe9\n"), ("dev", b"a\n"), ("test", b"b\nb a\n")):
        (tmp_path / f"{name}.txt").write_bytes(line)
    config = DataConfig(corpus=str(tmp_path))
    assert list(load_part(config, vocabulary, "test")) == [[1], [1, 0]]
    with pytest.raises(ConfigError, match="train.txt, line 1 must"):
        load_part(config, vocabulary, "all")


def test_a_given_vocabulary_and_counts_by_workers(tmp_path, corpus):
    counted = load_text(DataConfig(corpus=str(corpus), vocab_size=20))
    by_workers = load_text(DataConfig(corpus=str(corpus), vocab_size=20, num_workers=2))
    assert by_workers.vocabulary.words == counted.vocabulary.words
    path = tmp_path / "words.txt"
    path.write_text("</S>\n<S>\n<UNK>\nw3\nw1\n")
    options = {"corpus": str(corpus), "vocabulary": str(path), "vocab_size": 3}
    given = load_text(DataConfig(**options))
    assert given.vocabulary.words == ("</s>", "<S>", "<unk>", "w3", "w1")
    mapped = load_text(DataConfig(**options, encoded=str(tmp_path / "ids"), num_workers=1))
    for part in ("train", "dev", "test"):
        assert list(getattr(mapped, part)) == list(getattr(given, part))
    assert not (given.train.stream == 1).any()  # <S> never occurs
    with pytest.raises(ConfigError, match="^data.vocabulary: Vocabulary.load: path must .*nowhere"):
        load_text(DataConfig(corpus=str(corpus), vocabulary="nowhere"))
    path.write_text("w1\n")
    with pytest.raises(ConfigError, match="^data.vocabulary: .* must"):
        load_text(DataConfig(corpus=str(corpus), vocabulary=str(path)))


@pytest.mark.parametrize(
    ("moe", "hidden", "gate"),
    [
        ({}, 2 * 16, 2 * 16 * 4),
        ({"num_experts": 9, "num_groups": 3}, 2 * 2 * 16, 2 * 16 * (3 + 2 * 3)),
        ({"shared_sizes": [24]}, 2 * 16 + 24, 2 * 16 * 4),
    ],
)
def test_dense_counterpart_has_the_same_operations(table, moe, hidden, gate):
    config = merged(table, model={"moe": {**table["model"]["moe"], **moe}})
    dense = dense_counterpart(config)
    assert dense.model.layers == ["lstm", "ffn", "lstm"]
    assert dense.model.ffn.hidden_sizes == [hidden]
    moe_cost, dense_cost = (cost(LanguageModel(c.model, 60)) for c in (config, dense))
    assert moe_cost.ops_per_timestep == dense_cost.ops_per_timestep + gate
    with pytest.raises(ConfigError, match="model must"):
        dense_counterpart(dense)
    for option, value in (("num_identity_experts", 2), ("shared_sizes", [8, 8])):
        config = merged(table, model={"moe": {**table["model"]["moe"], option: value}})
        with pytest.raises(ConfigError, match=f"equal operations, got one with {option}$"):
            dense_counterpart(config)
