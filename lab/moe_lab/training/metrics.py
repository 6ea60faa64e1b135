"""Perplexity, and the metrics of training between two log lines."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_lab.data import AnyText, EncodedPairs, EncodedSentences, Wordpieces, batches_of
from moe_lab.models import AnyModel, LossParts, evaluating
from moe_lab.progress import progress

if TYPE_CHECKING:
    from moe_ext.distributed import Ranks


def perplexity(nll: float) -> float:
    """Computes the perplexity exp(nll) from the nats per token; infinity on overflow."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


_COUNTED_AT_A_TIME = 2**22  # ids


def bytes_of(sentences: EncodedSentences, wordpieces: Wordpieces) -> int:
    """Counts the UTF-8 bytes of a text of wordpieces, with one byte for the end of each sentence.

    nll * num_tokens / bytes is the nats per byte. It compares models of different vocabularies.
    """
    return _sum_of(wordpieces.num_bytes, sentences)


def words_of(sentences: EncodedSentences, wordpieces: Wordpieces) -> int:
    """Counts the words of a text of wordpieces, with one for the end of each sentence.

    exp(nll * num_tokens / words) is a perplexity per word, as that of a model of words.
    """
    return _sum_of(wordpieces.begins_word, sentences) + len(sentences)


def _sum_of(sizes: Sequence[int], sentences: EncodedSentences) -> int:
    """Adds the sizes of all wordpieces of a text."""
    size_of = torch.tensor(sizes, dtype=torch.int64)
    blocks = sentences.stream.split(_COUNTED_AT_A_TIME)
    return sum(int(size_of[block.long()].sum()) for block in blocks)


@dataclass(frozen=True)
class Evaluation:
    """The negative log-likelihood of a text under a model."""

    sentence_nll: Tensor  # [N] float64, nats of each sentence or target sentence, in corpus order
    num_tokens: int  # number of predictions, ends of sentences included

    @property
    def nll(self) -> float:
        """The negative log-likelihood in nats per token."""
        return float(self.sentence_nll.sum()) / self.num_tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the nats per token, without balancing losses."""
        return perplexity(self.nll)


def evaluate(
    model: AnyModel,
    text: AnyText,
    *,
    tokens_per_batch: int = 2_560,
    title: str | None = "evaluating",
    ranks: "Ranks | None" = None,
) -> Evaluation:
    """Computes the negative log-likelihood of a text, with the full softmax, without gate noise.

    Dropout is off. The negative log-likelihood of each sentence is summed in float64 over its
    predictions. So tokens_per_batch changes the result by rounding only, unless the experts have a
    capacity or choose their tokens. The ranks share the rows of every batch. The model's training
    mode is restored. Without title, there is no progress bar.
    """
    from moe_ext.distributed import Ranks  # imports FSDP, which takes a second

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
    """Returns the evaluation of each language pair; sentence_nll comes from `evaluate`."""
    return {
        name: Evaluation(sentence_nll[rows], int(pairs.lengths[rows].sum()))
        for index, name in enumerate(pairs.names)
        for rows in [pairs.pair == index]
    }


class Window:
    """Sums of the metrics since the last log line, of this rank if nothing else is said."""

    def __init__(self) -> None:
        self.nll_sum, self.aux_sum, self.num_tokens = 0.0, 0.0, 0
        self.seconds = 0.0
        self.balance: list[list[dict[str, float]]] = []  # by batch and MoE layer
        self.tokens_per_expert: tuple[Tensor, ...] = ()  # by MoE layer, summed over ranks

    def add(self, parts: LossParts, ranks: "Ranks") -> None:
        self.nll_sum += parts.nll_sum.item()
        self.aux_sum += parts.aux_loss.item() * parts.num_tokens
        self.num_tokens += parts.num_tokens
        counts = ranks.sum(*(aux.tokens_per_expert for aux in parts.aux))
        reports = zip(parts.aux, counts, strict=True)
        self.balance.append([aux._replace(tokens_per_expert=n).metrics() for aux, n in reports])
        counts = tuple(n.cpu() for n in counts)  # a checkpoint has them, for any device
        if self.tokens_per_expert:
            counts = tuple(a + b for a, b in zip(self.tokens_per_expert, counts, strict=True))
        self.tokens_per_expert = counts

    def is_finite(self) -> bool:
        return math.isfinite(self.nll_sum + self.aux_sum)

    def summary(self, ranks: "Ranks") -> dict[str, Any]:
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
        layers = list(zip(*self.balance, strict=True))  # for each MoE layer, the metrics of batches
        for key in layers[0][0] if layers else ():
            values[key] = [sum(row[key] for row in rows) / len(rows) for rows in layers]
        if layers:
            counts = [n.double() for n in self.tokens_per_expert]
            values["load"] = [(n / n.mean()).tolist() for n in counts]
        return values
