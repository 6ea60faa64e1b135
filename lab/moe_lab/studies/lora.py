"""Fine-tunes adapters (LoRA) of packed experts and of float32 experts on another corpus.

    moe-lab study lora
    moe-lab study lora --target CORPUS data.corpus=CORPUS
    moe-lab study lora --report

Trains configs/small/moe-32.toml with wordpieces on a corpus for each seed. Then adapters of the
experts are trained on the sentences of another corpus that the first one lacks, by default Python
and C++ code, around the experts in float32, int4 and MXFP4. All other parameters are frozen. A run
takes 5 minutes on one processor.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any

import torch
from torch.optim import AdamW

from moe_ext import FeedForwardExperts, MoE, QuantizedExperts, add_lora
from moe_ext.distributed import clip_grad_norm_
from moe_ext.formats import FormatName
from moe_lab.data import EncodedSentences, SentenceBatches, encode_sentences, load_corpus
from moe_lab.experiments.arms import Arm
from moe_lab.experiments.claims import Claim, as_change, claims_of
from moe_lab.experiments.page import Page, Plot, new_axes
from moe_lab.experiments.runs import number_of
from moe_lab.experiments.single_run import Result
from moe_lab.experiments.store import Stored
from moe_lab.markdown import markdown_table
from moe_lab.models import AnyModel
from moe_lab.studies.entries import usual_options
from moe_lab.studies.routing import RoutingStudy
from moe_lab.training.checkpoint import load_run
from moe_lab.training.config import AnyConfig
from moe_lab.training.metrics import evaluate, perplexity
from moe_lab.training.text import SentenceText

MODEL, FLOAT = "moe-32", "float32"
FORMATS: dict[str, FormatName | None] = {FLOAT: None, "int4": "int4", "mxfp4": "mxfp4"}
# Set before the runs of the page, after a first run with other seeds.
MARGIN = math.log(1.01)  # of the loss of quality, in ln ppl
CLAIM = "adapters around packed experts reach the perplexity of those around float32"
RANK, ALPHA, RATE = 16, 32, 4e-3
TEST_SENTENCES = 2_000
_SETTINGS = (
    "num_threads=1",
    "steps=600",
    "data.kind=unigram",
    "data.vocab_size=4000",
    "log.eval_every=0",
    "log.tensorboard=false",
)


class LoRA(RoutingStudy):
    name = "lora"
    models = usual = (MODEL,)
    given = ()
    own = usual_options("lora", "lora_steps")
    common = _SETTINGS

    def settings_of(self, config: AnyConfig) -> dict[str, Any]:
        assert isinstance(self.text, SentenceText)
        self.target = target_text(self.text, config.data.corpus, self.options.target)
        return super().settings_of(config) | {
            "target_train": self.target["train"].fingerprint(),
            "target_test": self.target["test"].fingerprint(),
            **self.own_settings(),
        }

    target: Mapping[str, EncodedSentences]

    def measured(self, arm: Arm, result: Result) -> dict[str, Any]:
        trained = load_run(result.run).model
        results: dict[str, Any] = {"before": self._test(trained), "tuned": {}, "trained": 0}
        for name, format in FORMATS.items():
            model = copy.deepcopy(trained)
            if format is not None:
                pack_experts(model, format)
            torch.manual_seed(result.seed)  # equal adapters, dropout and noise for all formats
            report = add_lora(model, RANK, ALPHA)
            tune(model, self.target["train"], self.options.lora_steps, result.seed)
            results["tuned"][name] = self._test(model)
            results["trained"] = sum(report.trained.values())
        return results

    def _test(self, model: AnyModel) -> float:
        return evaluate(model, self.target["test"], tokens_per_batch=10_000).nll

    def page(self, stored: Stored) -> Page | None:
        runs = stored.by_arm()[Arm(MODEL)]
        tuned = {name: number_of("tuned", name) for name in FORMATS}
        before = number_of("before")
        rows = [["before", f"{runs.perplexity(before):.2f}", ""]]
        claims = []
        for name, nll in tuned.items():
            gap = runs.gap(nll, tuned[FLOAT])
            change = "" if name == FLOAT else as_change(gap)
            rows.append([f"adapters around {name}", f"{runs.perplexity(nll):.2f}", change])
            if name != FLOAT:
                claims.append(Claim(CLAIM, f"{name} against {FLOAT}, at most 1% above", gap))
        return self.filled(
            stored,
            rank=RANK,
            alpha=ALPHA,
            trained=next(iter(runs.values()))["trained"],
            plot=plot({name: [perplexity(nll(run)) for run in runs.values()]
                       for name, nll in {"before": before, **tuned}.items()}),
            models=markdown_table(["experts", "test ppl", f"change from {FLOAT}, 95%"], rows),
            claims=claims_of(claims, high=MARGIN),
        )  # fmt: skip


def target_text(text: SentenceText, corpus: str, target: str) -> dict[str, EncodedSentences]:
    """Encodes the sentences of a corpus that another one lacks, in the wordpieces of the latter."""
    known = {" ".join(sentence) for sentence in load_corpus(corpus).all}
    loaded = load_corpus(target)

    def new(part: str) -> Iterator[list[str]]:
        return (words for words in getattr(loaded, part) if " ".join(words) not in known)

    return {
        "train": encode_sentences(new("train"), text.vocabulary),
        "test": encode_sentences(islice(new("test"), TEST_SENTENCES), text.vocabulary),
    }


def pack_experts(model: AnyModel, format: FormatName) -> None:
    for layer in model.modules():
        if isinstance(layer, MoE):
            assert isinstance(layer.experts, FeedForwardExperts)
            layer.experts = QuantizedExperts.from_experts(layer.experts, format)


def tune(model: AnyModel, text: EncodedSentences, steps: int, seed: int) -> None:
    """Trains the parameters of a model that require gradients."""
    batches = SentenceBatches(text, tokens_per_batch=2_560, max_length=128, shuffle=True, seed=seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = AdamW(trained, lr=RATE, weight_decay=0.0)
    model.train()
    for batch in islice(chain.from_iterable(map(batches.epoch, count())), steps):
        parts = model.loss(batch)
        (parts.nll_sum / parts.num_tokens + parts.aux_loss).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def plot(perplexities: Mapping[str, Sequence[float]]) -> Plot:
    """Plots the perplexity of each run, by the experts."""
    figure, axes = new_axes(7, 4.2)
    for index, (name, values) in enumerate(perplexities.items()):
        axes.plot([index] * len(values), values, "o", label=name)
    axes.set_xticks(range(len(perplexities)), perplexities)
    axes.set(ylabel="test perplexity on the new text", yscale="log")
    axes.grid(alpha=0.3, axis="y")
    return Plot("perplexity of each run before and after the training of adapters", figure)


run = LoRA.start
