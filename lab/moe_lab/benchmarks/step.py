"""Measures a few training steps of a model on random words: time, operations, memory.

    moe-lab benchmark step lm1b/moe-256-h data.tokens_per_batch=2560
    moe-lab benchmark step lm1b/moe-1024-h data.tokens_per_batch=2560 \\
        optimizer.experts=factored_adam optimizer.embedding=factored_adam
    moe-lab benchmark step lm1b/moe-4096-h data.tokens_per_batch=2560 \\
        model.dtype=bfloat16 optimizer.experts=factored_adam optimizer.embedding=factored_adam

The Trainer of moe-lab train trains on sentences of 25 random words with the distribution of the
sampled softmax. No corpus is needed; only --json writes a file. If a batch does not fit in memory,
accumulate smaller batches: data.tokens_per_batch=30000 optimizer.accumulate=10.

    memory   size of the weights, of their gradients and of the optimizers' state
    step     seconds; words/s; operations/s, counted as in the paper
             (lab/moe_lab/analysis/costs.py); peak memory of the process so far
"""

import resource
import tempfile
import time
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch

from moe_lab.analysis.costs import cost, training_flops
from moe_lab.data import EncodedSentences, Vocabulary
from moe_lab.files import write_json
from moe_lab.models import LanguageModel
from moe_lab.training.config import Config, read_config
from moe_lab.training.loop import make_trainer
from moe_lab.training.text import SentenceText

SENTENCE = 25  # words in a sentence of random_text


def random_text(vocab_size: int, num_tokens: int, seed: int) -> SentenceText:
    """Makes random sentences with at least num_tokens predictions.

    Word frequencies are log-uniform. All three parts are the same text.
    """
    special = [Vocabulary.UNK, Vocabulary.EOS]
    vocabulary = Vocabulary([*special, *(f"w{i}" for i in range(len(special), vocab_size))])
    generator = torch.Generator().manual_seed(seed)
    number = -(-num_tokens // (SENTENCE + 1))
    u = torch.rand(number, SENTENCE, generator=generator, dtype=torch.float64)
    ids = (vocab_size**u).long().clamp_(len(special), vocab_size - 1)
    sentences = EncodedSentences(ids.tolist(), vocabulary.eos_id)
    return SentenceText(vocabulary, train=sentences, dev=sentences, test=sentences)


def _resident_bytes() -> int:
    """Returns the peak memory of the process in bytes (on Linux, ru_maxrss is in KiB)."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(args: Any) -> dict[str, Any]:
    config = read_config(args.config, args.overrides, Config)
    config.log = replace(config.log, tensorboard=False, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        config.output = folder  # an empty folder; nothing is written to it
        record = _measure(config, args.steps)
    if args.json:
        record["config"] = asdict(config) | {"output": ""}
        record["torch"], record["threads"] = torch.__version__, torch.get_num_threads()
        write_json(args.json, record)
    return record


def _measure(config: Config, steps: int) -> dict[str, Any]:
    with torch.device("meta"):
        counted = LanguageModel(config.model, config.data.vocab_size)
    flops = training_flops(counted).total
    started = time.perf_counter()
    per_step = config.data.tokens_per_batch * config.optimizer.accumulate
    trainer = make_trainer(
        config, random_text(config.data.vocab_size, steps * per_step, config.seed)
    )
    weight_bytes = sum(p.nbytes for p in trainer.model.parameters())
    record: dict[str, Any] = {
        "cost": asdict(cost(trainer.model)),
        "flops_of_token": flops,
        "build_seconds": time.perf_counter() - started,
        "build_peak_bytes": _resident_bytes(),
        "weight_bytes": weight_bytes,
        "gradient_bytes": weight_bytes,
        "steps": [],
    }
    seconds, peak = record["build_seconds"], record["build_peak_bytes"] / 1e9
    print(f"model   {cost(trainer.model)}\nbuild   {seconds:.1f} s, peak memory {peak:.2f} GB")
    batches = trainer.batches.epoch(0)
    for number in range(1, steps + 1):
        batch = list(islice(batches, config.optimizer.accumulate))
        before, started = trainer.tokens, time.perf_counter()
        trainer.train_step(batch)
        seconds, tokens = time.perf_counter() - started, trainer.tokens - before
        step = {"tokens": tokens, "seconds": seconds, "words_per_second": tokens / seconds}
        step |= {"gflops": tokens * flops / seconds / 1e9, "peak_bytes": _resident_bytes()}
        record["steps"].append(step)
        print(
            f"step {number}  {seconds:.2f} s for {tokens:,} words, "
            f"{step['words_per_second']:,.0f} words/s, {step['gflops']:.1f} GFLOP/s, "
            f"peak memory {step['peak_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    record["optimizer_bytes"] = sum(x.nbytes for state in states for x in state.values())
    weights, optimizer = weight_bytes / 1e9, record["optimizer_bytes"] / 1e9
    print(f"memory  weights {weights:.3f} GB, gradients {weights:.3f}, optimizer {optimizer:.3f}")
    return record
