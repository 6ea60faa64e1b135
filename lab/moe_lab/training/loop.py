"""The training loop of all models."""

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from moe_ext import balanced_gates, batchwise_masks, update_gates
from moe_ext.distributed import Checkpoints, Loaded, Ranks, clip_grad_norm_, parallelize
from moe_ext.gates import adaptive_gates
from moe_ext.optim import warmup_schedule
from moe_lab.data import Batch, EncodedPairs, PairBatches, SentenceBatches
from moe_lab.data.batches import mixed_seed
from moe_lab.errors import ConfigError
from moe_lab.models import AnyModel, LossParts
from moe_lab.training.checkpoint import check_vocabulary, checkpoints_of, load_states
from moe_lab.training.config import AnyConfig
from moe_lab.training.device import set_up_for
from moe_lab.training.folder import RunFolder
from moe_lab.training.metrics import Window, by_language_pair, evaluate
from moe_lab.training.model import make_model
from moe_lab.training.optimizers import make_optimizers
from moe_lab.training.text import Text, load_text, training_batches
from moe_lab.training.threads import ThreadChoice

_SLOWER = (
    "warning: {:,.0f} words/s after {:,.0f} words/s earlier; other programs may be using the "
    "processor"
)


class _Objective(nn.Module):
    """Computes the training loss in `forward`, which the wrapper of `parallelize` needs."""

    def __init__(self, model: AnyModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> LossParts:
        return self.model.loss(batch)


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains a model and writes the run to its folder; `make_trainer` makes all parts.

    A checkpoint holds the model, optimizers, schedules, position in the data and RNG states. With
    one thread, a resumed run is bitwise identical to an uninterrupted run.

    In a process group, the ranks share the experts and the rows of every batch. A step is the same
    as with a single rank, except for dropout and noise, which differ by rank. A run can be resumed
    with another world size. Rank 0 writes logs, configuration and vocabulary.

    Attributes:
        step, tokens: number of optimizer steps and of predictions so far.
        interrupted: whether SIGINT or SIGTERM came in the last `run`, be it in its last step.

    Example:
        >>> trainer = make_trainer(config)
        >>> finished = trainer.run()  # False after Ctrl-C or SIGTERM, with a checkpoint saved
    """

    config: AnyConfig
    run_folder: RunFolder
    checkpoints: Checkpoints
    text: Text
    batches: SentenceBatches | PairBatches
    model: AnyModel
    optimizers: Sequence[Optimizer]
    ranks: Ranks
    noise_generator: torch.Generator  # of the gates' noise
    class_generator: torch.Generator  # a CPU generator of the sampled classes, seeded in every step

    def __post_init__(self) -> None:
        config, model, optimizers, ranks = self.config, self.model, self.optimizers, self.ranks
        self.folder = self.run_folder.path
        self._newest = max(self.checkpoints.steps(), default=None)  # the last checkpoint
        self._train_text = self.text.train.fingerprint()
        limit = config.log.eval_sentences
        self.dev = self.text.dev.first(limit) if limit else self.text.dev
        self.device = model.embedding.weight.device
        self.schedules = [
            warmup_schedule(optimizer, config.optimizer.warmup_steps, config.optimizer.hold_steps)
            for optimizer in optimizers
        ]
        self._objective: nn.Module = _Objective(model)
        if ranks.group is not None:
            self._objective = parallelize(self._objective, ranks.group)
        if adaptive_gates(model):
            optimizers[0].register_step_post_hook(lambda *_: update_gates(model, ranks.group))
        self.interrupted = False
        self.step = self.tokens = 0
        self.epoch, self.batch = 0, 0  # position of the next batch
        self._window = Window()  # the steps since the last log line

    def run(self) -> bool:
        """Trains until step ``config.steps``; returns False if SIGINT or SIGTERM came before.

        Raises:
            FloatingPointError: the loss, the weights, or with clip_norm the gradient is not finite.
                The last checkpoint is not changed.
            ConfigError: another run is training in the folder, or has trained there since this
                Trainer was created.
        """
        config, steps = self.config, self.config.steps
        fastest = 0.0  # words per second
        threads = None
        with ExitStack() as stack:
            if config.num_threads == 0 and not self._on_cuda() and self.ranks.size == 1:
                threads = ThreadChoice()
                stack.callback(torch.set_num_threads, torch.get_num_threads())
            log = None
            if self.ranks.rank == 0:
                stack.enter_context(self.run_folder.locked())
                newest = max(self.checkpoints.steps(), default=None)
                self.run_folder.check_unchanged(self._newest, newest)
                log = stack.enter_context(self.run_folder.begin(self.step, self.text.vocabulary))
            stopped = stack.enter_context(stop_signal())
            batches = stack.enter_context(closing(self._batch_stream()))
            last = self.step >= steps
            while not last:
                if threads:
                    threads.begin_step()
                rate = self.optimizers[0].param_groups[0]["lr"]
                tokens, started = self.tokens, time.perf_counter()
                self.train_step(list(islice(batches, config.optimizer.accumulate)), self._window)
                seconds = time.perf_counter() - started
                self._window.seconds += seconds
                if log:
                    log.step_done()
                if threads and (choice := threads.end_step((self.tokens - tokens) / seconds)):
                    assert log is not None  # a single rank
                    log.say(choice)
                end = self.step == steps
                last = end or self._any(stopped())
                if last or _due(self.step, config.log.log_every):
                    progress = {"tokens": self.tokens, "learning_rate": rate}
                    values = self._window.summary(self.ranks) | progress
                    if log:
                        log.write("train", self.step, values)
                        if (speed := values["words_per_second"]) < fastest / 3:
                            log.say(_SLOWER.format(speed, fastest))
                    fastest = max(fastest, values["words_per_second"])
                    self._window = Window()
                if end or _due(self.step, config.log.eval_every):
                    values = self._evaluate() | {"tokens": self.tokens}
                    if log:
                        log.write("dev", self.step, values)
                if last or _due(self.step, config.log.save_every):
                    self._save()
            self.interrupted = stopped()
        return self.step >= steps

    def _any(self, on_rank: bool) -> bool:
        """Returns on all ranks whether `on_rank` is True on any rank."""
        (number,) = self.ranks.sum(torch.tensor(int(on_rank)))
        return bool(number)

    def train_step(self, batches: Sequence[Batch], window: Window | None = None) -> None:
        """Makes one optimizer step on the mean loss over all tokens of the batches.

        The metrics of the step are added to `window`.

        Raises:
            FloatingPointError: the loss, or with clip_norm the gradient, is not finite. Weights and
                optimizer state are not changed.
        """
        window = Window() if window is None else window
        self.model.train()
        # All ranks sample the same classes, also in a resumed run.
        self.class_generator.manual_seed(mixed_seed(self.config.seed, "classes", self.step))
        ranks = self.ranks
        sizes = [batch.num_tokens for batch in batches]
        num_tokens = sum(sizes)
        in_bfloat16 = self.config.autocast == "bfloat16"
        for batch, size in zip(batches, sizes, strict=True):
            part = batch.part(ranks.rank, ranks.size).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=in_bfloat16):
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
        size, ranks = self.config.data.tokens_per_batch, self.ranks
        title = "dev" if self.config.log.progress and ranks.rank == 0 else None
        masks: dict[str, AbstractContextManager[None]] = {"": nullcontext()}
        if balanced_gates(self.model):
            masks["_batchwise"] = batchwise_masks(self.model)
        for suffix, mask in masks.items():
            with mask:
                dev = evaluate(
                    self.model, self.dev, tokens_per_batch=size, title=title, ranks=ranks
                )
            values |= {f"nll{suffix}": dev.nll, f"perplexity{suffix}": dev.perplexity}
            if isinstance(self.dev, EncodedPairs) and len(self.dev.names) > 1:
                for name, part in by_language_pair(dev.sentence_nll, self.dev).items():
                    values[f"perplexity{suffix}/{name}"] = part.perplexity
        return values

    def _batch_stream(self) -> Generator[Batch, None, None]:
        """Yields batches without end, beginning at self.epoch and self.batch, and advances both."""
        while True:
            num_workers = self.config.data.num_workers
            for batch in self.batches.epoch(self.epoch, self.batch, num_workers):
                self.batch += 1
                yield batch
            self.epoch, self.batch = self.epoch + 1, 0

    def _save(self) -> None:
        if self._any(not all(param.isfinite().all() for param in self.model.parameters())):
            raise self._diverged(f"the weights after step {self.step} are")
        state = {
            "tokens": self.tokens,
            "epoch": self.epoch,
            "batch": self.batch,
            "num_ranks": self.ranks.size,
            "config": asdict(self.config),
            "vocabulary": self.text.vocabulary.fingerprint(),
            "text": self._train_text,
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }
        rank_state = {
            "rng": torch.get_rng_state(),
            "device_rng": torch.cuda.get_rng_state(self.device) if self._on_cuda() else None,
            "noise_rng": self.noise_generator.get_state(),
            "window": vars(self._window),
        }
        self.checkpoints.save(self.step, self.model, self.optimizers, state, rank_state)
        self._newest = self.step

    def restore(self, earlier: Loaded) -> None:
        """Continues after a checkpoint of the run."""
        self.step = earlier.step
        self.checkpoints.load(self.model, self.optimizers, step=earlier.step)
        state, rank_state = earlier.state, earlier.rank_state
        self.tokens, self.epoch, self.batch = state["tokens"], state["epoch"], state["batch"]
        for schedule, values in zip(self.schedules, state["schedules"], strict=True):
            schedule.load_state_dict(values)
        if rank_state is None:  # the checkpoint has fewer ranks
            return
        if state.get("num_ranks") == self.ranks.size:  # the sums of all ranks
            vars(self._window).update(rank_state["window"])
        torch.set_rng_state(rank_state["rng"])
        # The state of a generator fits only the device type it was saved on.
        if (rank_state["device_rng"] is not None) == self._on_cuda():
            self.noise_generator.set_state(rank_state["noise_rng"])
            if self._on_cuda():
                torch.cuda.set_rng_state(rank_state["device_rng"], self.device)

    def _on_cuda(self) -> bool:
        return self.device.type == "cuda"


def make_trainer(
    config: AnyConfig, text: Text | None = None, process_group: ProcessGroup | None = None
) -> Trainer:
    """Makes the trainer of a configuration and resumes its run; writes nothing.

    Dropout uses torch's default generator; the gates' noise has a separate generator. Runs of
    different models with the same seed have the same data order. Models with the same number of
    layers also have the same dropout masks. Without `text`, the corpus of config.data is loaded.
    """
    ranks = Ranks(process_group)
    set_up_for(config)
    folder = RunFolder(config)
    checkpoints = checkpoints_of(folder.path, process_group, config.log.keep_checkpoints)
    earlier = None
    if config.resume and checkpoints.steps():
        earlier = load_states(checkpoints, folder.path, fallback=True)
        folder.check_steps(earlier.step)
    text = text or load_text(config.data)
    if earlier is not None:
        _check_text(text, earlier.state, config.data.corpus)

    def seed_here(purpose: str) -> int:
        """Returns a seed that differs by rank and by the step at which this process starts."""
        return mixed_seed(config.seed, purpose, ranks.rank, 0 if earlier is None else earlier.step)

    device = torch.device(config.device)
    noise_generator = torch.Generator(device).manual_seed(seed_here("noise"))
    class_generator = torch.Generator("cpu")
    torch.manual_seed(mixed_seed(config.seed, "weights"))
    model = make_model(
        config.model,
        len(text.vocabulary),
        process_group=process_group,
        noise_generator=noise_generator,
        class_generator=class_generator,
    ).to(device)
    trainer = Trainer(
        config,
        run_folder=folder,
        checkpoints=checkpoints,
        text=text,
        batches=training_batches(text, config.data, config.seed),
        model=model,
        optimizers=make_optimizers(model, config.optimizer),
        ranks=ranks,
        noise_generator=noise_generator,
        class_generator=class_generator,
    )
    # Seeded after initialisation, so that dropout masks do not depend on the layers.
    torch.manual_seed(seed_here("dropout"))
    if earlier is not None:
        trainer.restore(earlier)
    return trainer


def _check_text(text: Text, state: dict[str, Any], corpus: str) -> None:
    """Raises ConfigError unless a checkpoint is of this text and of its vocabulary."""
    check_vocabulary(text.vocabulary, state, corpus)
    if state["text"] != text.train.fingerprint():
        raise ConfigError(
            f"the training text of {corpus} must be the text of the run, got another text; "
            "give the original text, or start a new run in another folder"
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
