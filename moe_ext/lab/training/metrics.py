"""What is measured: perplexity, and how evenly the experts are used."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ext.distributed import Ranks
from moe_ext.lab.data import AnyText, EncodedPairs, batches_of
from moe_ext.lab.models import AnyModel, evaluating
from moe_ext.lab.progress import progress


def perplexity(nll: float) -> float:
    """exp(nll), of nats per token; infinite where that is beyond a float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts a text.

    Attributes:
        sentence_nll: [N] float64, nats of each sentence (as a translation, of pairs) in the order
            of the corpus.
        num_tokens: all predictions, ends of sentences included.
    """

    sentence_nll: Tensor
    num_tokens: int

    @property
    def nll(self) -> float:
        """Nats per token."""
        return float(self.sentence_nll.sum()) / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(all nats / all tokens): token-weighted, without the balancing losses."""
        return perplexity(self.nll)


def evaluate(
    model: AnyModel,
    text: AnyText,
    *,
    tokens_per_batch: int = 2_560,
    title: str | None = "evaluating",
    ranks: Ranks | None = None,
) -> Evaluation:
    """Perplexity of whole sentences under the full softmax; no dropout, no noise in the gates.

    Sums are kept in float64 by sentence, so that the result does not depend on tokens_per_batch.

    Args:
        model: on any device; its mode is left as it was.
        text: sentences, or for a translation model pairs of them, in the ids of its vocabulary.
        tokens_per_batch: in a batch, roughly: predictions, and of pairs source tokens too.
        title: of the progress bar; None is no bar.
        ranks: which share the work, each with some rows of every batch; None is this one.
    """
    ranks = ranks or Ranks()
    device = model.embedding.weight.device
    batches = batches_of(text, tokens_per_batch=tokens_per_batch, shuffle=False)
    sentence_nll = torch.zeros(len(text), dtype=torch.float64, device=device)
    epoch: Iterable[Any] = progress(batches.epoch(0), title, "batches", batches.num_batches)
    with evaluating(model), torch.inference_mode():
        for batch in epoch:
            batch = batch.part(ranks.rank, ranks.size).to(device)
            sentence = batch.sentence_index[:, None].expand_as(batch.mask)[batch.mask]
            sentence_nll.index_add_(0, sentence, model.token_nll(batch).double())
    (sentence_nll,) = ranks.sum(sentence_nll)
    return Evaluation(sentence_nll.cpu(), batches.num_tokens)


def by_language_pair(sentence_nll: Tensor, pairs: EncodedPairs) -> dict[str, Evaluation]:
    """What `evaluate` has measured of pairs, of each language pair by itself."""
    return {
        name: Evaluation(sentence_nll[rows], int(pairs.lengths[rows].sum()))
        for index, name in enumerate(pairs.names)
        for rows in [pairs.pair == index]
    }


def mean_of(rows: Iterable[dict[str, float]]) -> dict[str, float]:
    """Each key's mean over several dicts of the same keys; {} of none."""
    rows = list(rows)
    return {key: sum(row[key] for row in rows) / len(rows) for key in (rows[0] if rows else {})}
