"""The training loop of the language models."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from moe_ext.balanced import balanced_gates, batchwise_masks
from moe_ext.data import Batch, EncodedSentences, SentenceBatches
from moe_ext.data.files import atomic_file
from moe_ext.models import LanguageModel, LossParts
from moe_ext.optim import FactoredAdam, language_model_schedule, split_parameters
from moe_ext.training.checkpoint import (
    check_vocabulary,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from moe_ext.training.config import (
    Config,
    ConfigError,
    OptimizerConfig,
    config_differences,
    read_config,
    to_toml,
)
from moe_ext.training.device import set_up_torch
from moe_ext.training.logging import RunLog, summary_writer
from moe_ext.training.metrics import evaluate, mean_of
from moe_ext.training.text import Text, load_text


class _Window:
    """What the steps since the last log line add up to."""

    def __init__(self) -> None:
        self.nll_sum, self.aux_sum, self.num_tokens = 0.0, 0.0, 0
        self.seconds = 0.0
        self.balance: list[list[dict[str, float]]] = []  # by batch and MoE layer
        self.tokens_per_expert: list[Tensor] = []  # by MoE layer

    def add(self, parts: LossParts) -> None:
        self.nll_sum += parts.nll_sum.item()
        self.aux_sum += parts.aux_loss.item() * parts.num_tokens
        self.num_tokens += parts.num_tokens
        self.balance.append([aux.metrics() for aux in parts.aux])
        counts = [aux.tokens_per_expert for aux in parts.aux]
        if self.tokens_per_expert:
            counts = [a + b for a, b in zip(self.tokens_per_expert, counts, strict=True)]
        self.tokens_per_expert = counts

    def check_finite(self, step: int) -> None:
        if not math.isfinite(self.nll_sum + self.aux_sum):
            raise FloatingPointError(
                f"the loss of step {step} is not finite; lower optimizer.learning_rate or set "
                "optimizer.clip_norm=1, and start again or resume from the last checkpoint"
            )

    def summary(self) -> dict[str, Any]:
        """The numbers of the window.

        nll, aux_loss: means by token, the latter not part of the former. words_per_second counts
        predictions. cv_importance, cv_load, max_over_mean_load: means over the batches, as in Table
        6, one value for each MoE layer; so is what else the gates report. load: the tokens each
        expert got, relative to an even share, for each MoE layer.
        """
        values: dict[str, Any] = {
            "nll": self.nll_sum / self.num_tokens,
            "aux_loss": self.aux_sum / self.num_tokens,
            "words_per_second": self.num_tokens / self.seconds,
        }
        layers = [mean_of(rows) for rows in zip(*self.balance, strict=True)]
        for key in layers[0] if layers else ():
            values[key] = [layer[key] for layer in layers]
        if layers:
            values["load"] = [(n / n.float().mean()).tolist() for n in self.tokens_per_expert]
        return values


def make_optimizers(model: nn.Module, options: OptimizerConfig) -> list[Optimizer]:
    """Adam, and beside it FactoredAdam for the experts' matrices where the options ask for it."""
    split = split_parameters(model)
    factored = split.experts if options.experts == "factored_adam" else []
    apart = {*factored, *split.thresholds}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p not in apart]}]
    if split.thresholds:
        rate = options.threshold_learning_rate or options.learning_rate
        groups.append({"params": split.thresholds, "lr": rate})
    optimizers: list[Optimizer] = [
        Adam(
            groups,
            lr=options.learning_rate,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            fused=True,
        )
    ]
    if factored:
        optimizers.append(
            FactoredAdam(factored, lr=options.learning_rate, beta2=options.beta2, eps=options.eps)
        )
    return optimizers


class Trainer:
    """Trains the model of a configuration in the configuration's output folder.

    Nothing is written before everything the run needs has been read and checked. On one thread a
    resumed run ends in the same bits as an uninterrupted one: a checkpoint holds the model,
    optimizers, schedules, place in the data and the states of the random generators.

    Dropout draws from torch's default generator, the gates' noise from one of their own: runs of
    different models with the same seed see the same data order and dropout masks.

    Args:
        config: the run.
        text: the corpus of `config.data`, where the caller has it already.

    Raises:
        ConfigError: the folder, the device or the corpus cannot be used.

    Example:
        >>> trainer = Trainer(config)
        >>> finished = trainer.run()  # False if Ctrl-C or SIGTERM stopped it; all is saved then
    """

    def __init__(self, config: Config, text: Text | None = None) -> None:
        self.config = config
        self.folder = Path(config.output)
        set_up_torch(config.device, config.num_threads, config.autocast)
        if config.log.tensorboard:
            summary_writer()
        state = self._earlier_state()
        self.text = text or load_text(config.data)
        if state is not None:
            check_vocabulary(self.text.vocabulary, state, config.data.corpus)
        self.device = torch.device(config.device)

        torch.manual_seed(3 * config.seed)
        self.noise_generator = torch.Generator(self.device).manual_seed(3 * config.seed + 1)
        self.model = LanguageModel(
            config.model, len(self.text.vocabulary), noise_generator=self.noise_generator
        ).to(self.device)
        self.optimizers = make_optimizers(self.model, config.optimizer)
        self.schedules = [
            language_model_schedule(optimizer, config.optimizer.warmup_steps)
            for optimizer in self.optimizers
        ]
        torch.manual_seed(3 * config.seed + 2)  # the same dropout masks whatever the layers drew

        self.batches = SentenceBatches(
            self.text.train,
            eos_id=self.text.vocabulary.eos_id,
            tokens_per_batch=config.data.tokens_per_batch,
            max_length=config.data.max_length or None,
            shuffle=True,
            seed=config.seed,
        )
        self.dev = self.text.dev
        if config.log.eval_sentences:
            self.dev = EncodedSentences(
                islice(iter(self.dev), config.log.eval_sentences), self.dev.eos_id
            )
        self.step = 0
        self.tokens = 0  # predicted so far
        self.epoch, self.batch = 0, 0  # the next batch of the data
        if state is not None:
            self._restore(state)

    def run(self) -> bool:
        """Train up to `config.steps`.

        Returns:
            True if that was reached, False if a signal stopped it.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint stays as it is.
        """
        config, steps = self.config, self.config.steps
        self._write_folder()
        log = RunLog(
            self.folder, config.log, start_step=self.step, steps=steps, title=self.folder.name
        )
        batches = self._batch_stream()
        window = _Window()
        try:
            with _stop_signal() as stopped:
                while self.step < steps and not stopped():
                    started = time.perf_counter()
                    self._train_step(list(islice(batches, config.optimizer.accumulate)), window)
                    window.seconds += time.perf_counter() - started
                    log.step_done()
                    end = self.step == steps
                    if end or _due(self.step, config.log.log_every):
                        rate = self.optimizers[0].param_groups[0]["lr"]
                        progress = {"tokens": self.tokens, "learning_rate": rate}
                        log.write("train", self.step, window.summary() | progress)
                        window = _Window()
                    if end or _due(self.step, config.log.eval_every):
                        values = self._evaluate()
                        log.write("dev", self.step, values | {"tokens": self.tokens})
                    if end or _due(self.step, config.log.save_every):
                        self._save()
                if self.step < steps:
                    self._save()
        finally:
            log.close()
        return self.step >= steps

    def _train_step(self, batches: list[Batch], window: _Window) -> None:
        """One optimizer step on the mean loss over all tokens of the batches."""
        self.model.train()
        num_tokens = sum(batch.num_tokens for batch in batches)
        for batch in batches:
            with self._autocast():
                parts = self.model.loss(batch.to(self.device))
                share = parts.num_tokens / num_tokens
                loss = parts.nll_sum / num_tokens + share * parts.aux_loss
            loss.backward()
            window.add(parts)
        if self.config.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        window.check_finite(self.step + 1)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.step += 1
        self.tokens += num_tokens

    def _evaluate(self) -> dict[str, float]:
        """Perplexity of the dev part; with strictly balanced gates perplexity_batchwise as well,
        by the mask that training uses (App. F)."""
        values: dict[str, float] = {}
        masks: dict[str, AbstractContextManager[None]] = {"": nullcontext()}
        if balanced_gates(self.model):
            masks["_batchwise"] = batchwise_masks(self.model)
        for suffix, mask in masks.items():
            with mask:
                dev = evaluate(
                    self.model,
                    self.dev,
                    tokens_per_batch=self.config.data.tokens_per_batch,
                    title="dev" if self.config.log.progress else "",
                )
            values |= {f"nll{suffix}": dev.nll, f"perplexity{suffix}": dev.perplexity}
        return values

    def _autocast(self):
        if self.config.autocast:
            return torch.autocast(self.device.type, getattr(torch, self.config.autocast))
        return nullcontext()

    def _batch_stream(self) -> Iterator[Batch]:
        """Epoch after epoch from where the run is; self.epoch and self.batch follow."""
        while True:
            for batch in self.batches.epoch(self.epoch, self.batch):
                self.batch += 1
                yield batch
            self.epoch, self.batch = self.epoch + 1, 0

    def _write_folder(self) -> None:
        """The configuration first: whatever ends the process after that, the run can be resumed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / "config.toml") as file:
            file.write(to_toml(replace(self.config, resume=False)).encode())
        if self.step == 0:
            self.text.vocabulary.save(self.folder / "vocabulary.txt")

    def _earlier_state(self) -> dict[str, Any] | None:
        """The newest checkpoint of the run to continue; None to start.

        Raises:
            ConfigError: the folder holds something else.
        """
        config, folder = self.config, self.folder
        if not config.output:
            raise ConfigError(
                "output must name the folder of the run, got ''; give output=runs/NAME"
            )
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"output must be a folder, {there} is a file; give another one")
        written = folder / "config.toml"
        if not config.resume:
            # A start that was killed leaves at most the hidden temporary file of config.toml.
            if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):
                raise ConfigError(
                    f"{folder} is not empty; continue the run in it with resume=true, "
                    "or give another folder with output=..."
                )
            return None
        if not written.is_file():
            raise ConfigError(
                f"there is no run in {folder} to resume; leave out resume=true to start it"
            )
        changed = [
            key for key in config_differences(read_config(written), config) if key != "steps"
        ]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} must stay as in {written} when a run is resumed; "
                "set it back, or start a new run in another folder"
            )
        return load_checkpoint(folder) if checkpoints(folder) else None

    def _save(self) -> None:
        save_checkpoint(self.folder, self._state(), self.config.log.keep_checkpoints)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "batch": self.batch,
            "config": asdict(self.config),
            "vocabulary": self.text.vocabulary.fingerprint(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self.device) if self._on_cuda() else None,
            "noise_rng": self.noise_generator.get_state(),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = state["step"], state["tokens"]
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        for schedule, values in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(values)
        torch.set_rng_state(state["rng"])
        # The state of a generator only fits the kind of device it was saved on.
        if (state["device_rng"] is not None) == self._on_cuda():
            self.noise_generator.set_state(state["noise_rng"])
            if self._on_cuda():
                torch.cuda.set_rng_state(state["device_rng"], self.device)

    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a flag; a second one acts as usual.

    Yields a function that says whether one came. Outside the main thread signals are left alone.
    """
    came = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(signum, frame) -> None:
        nonlocal came
        came = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        restore()
