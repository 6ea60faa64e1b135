"""The training loop of all models."""

import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Adam, Optimizer

from moe_ext import balanced_gates, batchwise_masks, update_gates
from moe_ext.distributed import Loaded, Ranks, clip_grad_norm_, parallelize
from moe_ext.gates import adaptive_gates
from moe_ext.optim import FactoredAdam, split_parameters, warmup_schedule
from moe_lab.data import Batch, EncodedPairs
from moe_lab.data.batches import mixed_seed
from moe_lab.errors import ConfigError
from moe_lab.files import Locked, file_lock, write_text
from moe_lab.models import AnyModel, LossParts
from moe_lab.training.checkpoint import (
    check_vocabulary,
    checkpoints_of,
    load_states,
    vocabulary_file,
)
from moe_lab.training.config import (
    AnyConfig,
    OptimizerConfig,
    config_differences,
    read_config,
    to_toml,
)
from moe_lab.training.device import set_up_for
from moe_lab.training.logging import RunLog, read_metrics, summary_writer
from moe_lab.training.metrics import by_language_pair, evaluate, mean_of
from moe_lab.training.model import make_model
from moe_lab.training.text import Text, load_text, training_batches
from moe_lab.training.threads import ThreadChoice


class _Objective(nn.Module):
    """Computes the training loss in `forward`, which the wrapper of `parallelize` needs."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> LossParts:
        return self.model.loss(batch)


class Window:
    """Sums of the metrics since the last log line.

    Nats and tokens are sums of this rank; tokens_per_expert is a sum over all ranks.
    """

    def __init__(self) -> None:
        self.nll_sum, self.aux_sum, self.num_tokens = 0.0, 0.0, 0
        self.seconds = 0.0
        self.balance: list[list[dict[str, float]]] = []  # by batch and MoE layer
        self.tokens_per_expert: tuple[Tensor, ...] = ()  # by MoE layer, summed over ranks

    def add(self, parts: LossParts, ranks: Ranks) -> None:
        self.nll_sum += parts.nll_sum.item()
        self.aux_sum += parts.aux_loss.item() * parts.num_tokens
        self.num_tokens += parts.num_tokens
        counts = ranks.sum(*(aux.tokens_per_expert for aux in parts.aux))
        reports = zip(parts.aux, counts, strict=True)
        self.balance.append([aux._replace(tokens_per_expert=n).metrics() for aux, n in reports])
        if self.tokens_per_expert:
            counts = tuple(a + b for a, b in zip(self.tokens_per_expert, counts, strict=True))
        self.tokens_per_expert = counts

    def is_finite(self) -> bool:
        return math.isfinite(self.nll_sum + self.aux_sum)

    def summary(self, ranks: Ranks) -> dict[str, Any]:
        """Computes the metrics since the last log line over all ranks.

        - nll, aux_loss: means over tokens; nll does not include aux_loss.
        - words_per_second: predictions per second.
        - cv_importance, cv_load, max_over_mean_load and other metrics of the gates: means over
          batches, as in Table 6, with one value for each MoE layer.
        - load: tokens of each expert, divided by the mean over experts, for each MoE layer.
        """
        sums = torch.tensor([self.nll_sum, self.aux_sum, self.num_tokens], dtype=torch.float64)
        (totals,) = ranks.sum(sums)
        nll_sum, aux_sum, num_tokens = totals.tolist()
        values: dict[str, Any] = {
            "nll": nll_sum / num_tokens,
            "aux_loss": aux_sum / num_tokens,
            "words_per_second": num_tokens / self.seconds,
        }
        layers = [mean_of(rows) for rows in zip(*self.balance, strict=True)]
        for key in layers[0] if layers else ():
            values[key] = [layer[key] for layer in layers]
        if layers:
            counts = [n.double() for n in self.tokens_per_expert]
            values["load"] = [(n / n.mean()).tolist() for n in counts]
        return values


def make_optimizers(model: AnyModel, options: OptimizerConfig) -> list[Optimizer]:
    """Creates Adam, and FactoredAdam for the weights that the options select."""
    split = split_parameters(model)
    usual = options.learning_rate
    rates = dict.fromkeys(model.parameters(), usual)
    rates |= dict.fromkeys(split.experts, options.expert_learning_rate or usual)
    rates |= dict.fromkeys(split.thresholds, options.threshold_learning_rate or usual)
    factored: set[nn.Parameter] = set()
    if options.experts == "factored_adam":
        factored.update(split.experts)
    if options.embedding == "factored_adam":
        embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        factored.update(nn.ModuleList([*embeddings, model.softmax]).parameters())

    def groups(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
        by_rate: dict[float, list[nn.Parameter]] = {usual: []}  # the usual rate comes first
        for param in params:
            by_rate.setdefault(rates[param], []).append(param)
        return [{"params": same, "lr": rate} for rate, same in by_rate.items() if same]

    betas, eps = (options.beta1, options.beta2), options.eps
    optimizers: list[Optimizer] = [
        Adam(groups(p for p in rates if p not in factored), betas=betas, eps=eps, fused=True)
    ]
    if factored:
        in_order = (param for param in rates if param in factored)
        optimizers.append(FactoredAdam(groups(in_order), beta2=options.beta2, eps=eps))
    return optimizers


class Trainer:
    """Trains the model of a configuration and writes the run to the folder ``config.output``.

    The constructor reads and checks the inputs of the run. The constructor writes nothing to the
    output folder. A checkpoint holds the model, optimizers, schedules, position in the data and RNG
    states. With one thread, a resumed run is bitwise identical to an uninterrupted run.

    Dropout uses torch's default generator; the gates' noise has a separate generator. Runs of
    different models with the same seed have the same data order. Models with the same number of
    layers also have the same dropout masks.

    In a process group, the ranks share the experts and the rows of every batch. A step is the same
    as with a single rank, except for dropout and noise, which differ by rank. A run can be resumed
    with another world size. Rank 0 writes logs, configuration and vocabulary.

    Args:
        config: the configuration of the run.
        text: the encoded corpus of config.data; None loads the corpus.
        process_group: the process group; every rank creates a Trainer. None is a single rank.

    Attributes:
        interrupted: whether SIGINT or SIGTERM came in the last `run`, be it in its last step.

    Raises:
        ConfigError: the output folder, the device or the corpus cannot be used.

    Example:
        >>> trainer = Trainer(config)
        >>> finished = trainer.run()  # False after Ctrl-C or SIGTERM, with a checkpoint saved
    """

    def __init__(
        self,
        config: AnyConfig,
        text: Text | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self.config = config
        self.folder = Path(config.output)
        self.ranks = Ranks(process_group)
        self._checkpoints = checkpoints_of(self.folder, process_group, config.log.keep_checkpoints)
        set_up_for(config)
        if config.log.tensorboard:
            summary_writer()
        earlier = self._earlier()
        self.text = text or load_text(config.data)
        self._train_text = self.text.train.fingerprint()
        if earlier is not None:
            check_vocabulary(self.text.vocabulary, earlier.state, config.data.corpus)
            if earlier.state["text"] != self._train_text:
                raise ConfigError(
                    f"the training text of {config.data.corpus} must be the text of the run, got "
                    "another text; give the original text, or start a new run in another folder"
                )
        self.device = torch.device(config.device)

        self._newest = max(self._checkpoints.steps(), default=None)  # the last checkpoint
        self.step = 0 if earlier is None else earlier.step
        torch.manual_seed(self._seed("weights"))
        self.noise_generator = torch.Generator(self.device).manual_seed(self._seed_here("noise"))
        self.class_generator = torch.Generator("cpu")
        self.model = make_model(
            config.model,
            len(self.text.vocabulary),
            process_group=process_group,
            noise_generator=self.noise_generator,
            class_generator=self.class_generator,
        ).to(self.device)
        self._objective: nn.Module = _Objective(self.model)
        if process_group is not None:
            self._objective = parallelize(self._objective, process_group)
        self.optimizers = make_optimizers(self.model, config.optimizer)
        self.schedules = [
            warmup_schedule(optimizer, config.optimizer.warmup_steps, config.optimizer.hold_steps)
            for optimizer in self.optimizers
        ]
        if adaptive_gates(self.model):
            self.optimizers[0].register_step_post_hook(
                lambda *_: update_gates(self.model, process_group)
            )
        # Seeded after initialisation, so that dropout masks do not depend on the layers.
        torch.manual_seed(self._seed_here("dropout"))

        self.batches = training_batches(self.text, config.data, config.seed)
        self.dev = self.text.dev
        if config.log.eval_sentences:
            self.dev = self.dev.first(config.log.eval_sentences)
        self.interrupted = False
        self.tokens = 0  # number of predictions so far
        self.epoch, self.batch = 0, 0  # position of the next batch
        if earlier is not None:
            self._restore(earlier)

    def run(self) -> bool:
        """Trains until step ``config.steps``.

        Returns:
            True if the training has reached ``config.steps``, False if SIGINT or SIGTERM stopped
            it.

        Raises:
            FloatingPointError: the loss, the weights, or with clip_norm the gradient is not finite.
                The last checkpoint is not changed.
            ConfigError: another run is training in the folder, or has trained there since this
                Trainer was created.
        """
        config, steps = self.config, self.config.steps
        window = Window()
        fastest = 0.0  # words per second
        threads = None
        with ExitStack() as stack:
            if config.num_threads == 0 and not self._on_cuda() and self.ranks.size == 1:
                threads = ThreadChoice()
                stack.callback(torch.set_num_threads, torch.get_num_threads())
            log = None
            if self.ranks.rank == 0:
                stack.enter_context(self._no_other_run())
                self._write_folder()
                log = RunLog(
                    self.folder,
                    config.log,
                    start_step=self.step,
                    steps=steps,
                    title=self.folder.name,
                )
                stack.callback(log.close)
            stopped = stack.enter_context(stop_signal())
            batches = stack.enter_context(closing(self._batch_stream()))
            last = self.step >= steps
            while not last:
                if threads:
                    threads.begin_step()
                rate = self.optimizers[0].param_groups[0]["lr"]
                tokens, started = self.tokens, time.perf_counter()
                self.train_step(list(islice(batches, config.optimizer.accumulate)), window)
                seconds = time.perf_counter() - started
                window.seconds += seconds
                if log:
                    log.step_done()
                if threads and (choice := threads.end_step((self.tokens - tokens) / seconds)):
                    assert log is not None  # a single rank
                    log.say(choice)
                end = self.step == steps
                last = end or self._any(stopped())
                if last or _due(self.step, config.log.log_every):
                    progress = {"tokens": self.tokens, "learning_rate": rate}
                    values = window.summary(self.ranks) | progress
                    if log:
                        log.write("train", self.step, values)
                        if values["words_per_second"] < fastest / 3:
                            log.say(_slower(values["words_per_second"], fastest))
                    fastest = max(fastest, values["words_per_second"])
                    window = Window()
                if end or _due(self.step, config.log.eval_every):
                    values = self._evaluate() | {"tokens": self.tokens}
                    if log:
                        log.write("dev", self.step, values)
                if last or _due(self.step, config.log.save_every):
                    self._save()
            self.interrupted = stopped()
        return self.step >= steps

    def _any(self, here: bool) -> bool:
        """Returns on all ranks whether `here` is True on any rank."""
        (number,) = self.ranks.sum(torch.tensor(int(here)))
        return bool(number)

    def train_step(self, batches: Sequence[Batch], window: Window | None = None) -> None:
        """Makes one optimizer step on the mean loss over all tokens of the batches.

        Args:
            batches: the batches of the step; their gradients are accumulated.
            window: the sums to which the metrics of the step are added; None drops the metrics.

        Raises:
            FloatingPointError: the loss, or with clip_norm the gradient, is not finite. Weights and
                optimizer state are not changed.
        """
        window = Window() if window is None else window
        self.model.train()
        # All ranks sample the same classes, also in a resumed run.
        self.class_generator.manual_seed(self._seed("classes", self.step))
        ranks = self.ranks
        sizes = [batch.num_tokens for batch in batches]
        num_tokens = sum(sizes)
        for batch, size in zip(batches, sizes, strict=True):
            part = batch.part(ranks.rank, ranks.size).to(self.device)
            with self._autocast():
                parts = self._objective(part)
                # Gradients are averaged over ranks, but nll_sum has to be summed over ranks.
                nll = ranks.size * parts.nll_sum / num_tokens
                loss = nll + size / num_tokens * parts.aux_loss
            loss.backward()
            window.add(parts, ranks)
        gradient_is_finite = True
        if self.config.optimizer.clip_norm:
            norm = clip_grad_norm_(self.model, self.config.optimizer.clip_norm)
            gradient_is_finite = bool(norm.isfinite())
        loss_is_finite = not self._any(not window.is_finite())
        if not (loss_is_finite and gradient_is_finite):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            what = "gradient" if loss_is_finite else "loss"
            raise self._diverged(f"the {what} of step {self.step + 1} is")
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.step += 1
        self.tokens += num_tokens

    def _diverged(self, what: str) -> FloatingPointError:
        clip = "" if self.config.optimizer.clip_norm else " or set optimizer.clip_norm=1"
        return FloatingPointError(
            f"{what} not finite; lower optimizer.learning_rate{clip}, "
            "and start a new run in another folder with output=..."
        )

    def _evaluate(self) -> dict[str, float]:
        """Computes nll and perplexity of the dev part, and the perplexity of each language pair.

        With strictly balanced gates, perplexity_batchwise uses the batchwise mask of training
        (App. F).
        """
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
                    title="dev" if self.config.log.progress and self.ranks.rank == 0 else None,
                    ranks=self.ranks,
                )
            values |= {f"nll{suffix}": dev.nll, f"perplexity{suffix}": dev.perplexity}
            if isinstance(self.dev, EncodedPairs) and len(self.dev.names) > 1:
                for name, part in by_language_pair(dev.sentence_nll, self.dev).items():
                    values[f"perplexity{suffix}/{name}"] = part.perplexity
        return values

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.autocast:
            return torch.autocast(self.device.type, getattr(torch, self.config.autocast))
        return nullcontext()

    def _batch_stream(self) -> Generator[Batch, None, None]:
        """Yields batches without end, beginning at self.epoch and self.batch, and advances both."""
        while True:
            num_workers = self.config.data.num_workers
            for batch in self.batches.epoch(self.epoch, self.batch, num_workers):
                self.batch += 1
                yield batch
            self.epoch, self.batch = self.epoch + 1, 0

    @contextmanager
    def _no_other_run(self) -> Iterator[None]:
        """Locks the output folder for this run.

        Raises:
            ConfigError: another run is training in the folder, or has trained there since this
                Trainer was created.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with file_lock(self.folder / ".training.lock", wait=False):
                new = self._newest is None and not self.config.resume
                begun = new and (self.folder / "config.toml").exists()
                if begun or max(self._checkpoints.steps(), default=None) != self._newest:
                    raise ConfigError(
                        f"another run has trained in {self.folder} in the meantime; resume the run "
                        "with resume=true, or give another folder with output=..."
                    )
                yield
        except Locked:
            raise ConfigError(
                f"another run is training in {self.folder}; wait until it ends, or give "
                "another folder with output=..."
            ) from None

    def _write_folder(self) -> None:
        """Writes the configuration, which makes a killed run resumable, then the vocabulary."""
        write_text(self.folder / "config.toml", to_toml(replace(self.config, resume=False)))
        vocabulary = self.folder / vocabulary_file(self.config.data)
        if self.step == 0 or not vocabulary.is_file():
            self.text.vocabulary.save(vocabulary)

    def _earlier(self) -> Loaded | None:
        """Loads the state of the newest checkpoint to resume from; None starts a new run.

        Raises:
            ConfigError: the output folder cannot be used for this run.
        """
        config, folder = self.config, self.folder
        if not config.output:
            raise ConfigError("output must be the folder of the run, got ''; give output=runs/NAME")
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not there.is_dir():
            raise ConfigError(f"output must be a folder, got the file {there}; give another folder")
        written = folder / "config.toml"
        if not config.resume:
            # A run that is killed at its start leaves at most a hidden temporary file.
            if folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):
                raise ConfigError(
                    f"{folder} is not empty; continue the run in it with resume=true, "
                    "or give another folder with output=..."
                )
            return None
        if not written.is_file():
            raise ConfigError(
                f"there is no run in {folder} to resume; omit resume=true to start a new run"
            )
        # The path of the corpus may differ; the contents of the corpus are compared.
        changed = [
            key
            for key in config_differences(read_config(written), config)
            if key not in ("steps", "data.corpus")
        ]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)} must be as in {written} to resume the run; restore the "
                "value, or start a new run in another folder"
            )
        read_metrics(folder)  # a corrupted file stops the run here, before it writes
        if not self._checkpoints.steps():
            return None
        earlier = load_states(self._checkpoints, folder, fallback=True)
        if earlier.step > config.steps:
            raise ConfigError(
                f"steps must be at least {earlier.step}, the steps of the run in {folder}, "
                f"got {config.steps}; give another folder with output=... for a shorter run"
            )
        return earlier

    def _save(self) -> None:
        if self._any(not all(param.isfinite().all() for param in self.model.parameters())):
            raise self._diverged(f"the weights after step {self.step} are")
        state = {
            "tokens": self.tokens,
            "epoch": self.epoch,
            "batch": self.batch,
            "config": asdict(self.config),
            "vocabulary": self.text.vocabulary.fingerprint(),
            "text": self._train_text,
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }
        generators = {
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self.device) if self._on_cuda() else None,
            "noise_rng": self.noise_generator.get_state(),
        }
        self._checkpoints.save(self.step, self.model, self.optimizers, state, generators)
        self._newest = self.step

    def _restore(self, earlier: Loaded) -> None:
        self._checkpoints.load(self.model, self.optimizers, step=earlier.step)
        state, generators = earlier.state, earlier.rank_state
        self.tokens, self.epoch, self.batch = state["tokens"], state["epoch"], state["batch"]
        for schedule, values in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(values)
        if generators is None:  # the checkpoint has fewer ranks
            return
        torch.set_rng_state(generators["rng"])
        # The state of a generator fits only the device type it was saved on.
        if (generators["device_rng"] is not None) == self._on_cuda():
            self.noise_generator.set_state(generators["noise_rng"])
            if self._on_cuda():
                torch.cuda.set_rng_state(generators["device_rng"], self.device)

    def _seed(self, *purpose: object) -> int:
        return mixed_seed(self.config.seed, *purpose)

    def _seed_here(self, purpose: str) -> int:
        """Returns a seed that differs by rank and by the step at which this process started."""
        return self._seed(purpose, self.ranks.rank, self.step)

    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"


def _slower(words_per_second: float, fastest: float) -> str:
    return (
        f"warning: {words_per_second:,.0f} words/s after {fastest:,.0f} words/s earlier; other "
        "programs may be using the processor"
    )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def stop_signal() -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a flag; a second signal has its usual effect.

    Yields a function that returns True after the first signal. Outside the main thread, signals are
    not handled.
    """
    came = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(signum: int, frame: FrameType | None) -> None:
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
