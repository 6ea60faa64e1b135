"""Beam search with length and coverage penalties (Wu et al. 2016, "GNMT", Sec. 7)."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from moe_ext.checks import require, require_sizes
from moe_lab.models.translation import DecoderState, TranslationModel


@dataclass(frozen=True)
class Hypothesis:
    """A translation Y of a source X."""

    tokens: list[int]  # token ids; the last id is the end of sentence
    log_prob: float  # log P(Y|X), nats
    score: float  # s(Y, X), see `BeamSearch`
    attention: Tensor  # [|Y|, |X|], on the CPU; row j has the attention weights p_ij of token j


class _Live(NamedTuple):
    """N unfinished hypotheses of j - 1 tokens, ordered by source."""

    source: Tensor  # [N]
    place: Tensor  # [N], index within the source
    token: Tensor  # [N], last token
    log_prob: Tensor  # [N]
    coverage: Tensor  # [N, S], sum of the attention weights p_ij over j
    greedy: Tensor  # [N] bool, the greedy hypothesis


class _Candidates(NamedTuple):
    """C continuations of the hypotheses of each source, best first."""

    exists: Tensor  # [B, C] bool
    row: Tensor  # [B, C], index of the live hypothesis
    token: Tensor  # [B, C]
    log_prob: Tensor  # [B, C]
    greedy: Tensor  # [B, C] bool


class _Finished(NamedTuple):
    """The n best finished hypotheses of each source so far; missing hypotheses have score -inf."""

    score: Tensor  # [B, n]
    log_prob: Tensor  # [B, n]
    length: Tensor  # [B, n]
    row: Tensor  # [B, n], index in the live hypotheses of its last step


class _Step(NamedTuple):
    """Record of a step, to trace hypotheses back."""

    token: Tensor  # [N], input of the model
    parent: Tensor  # [N], index of the hypothesis in the previous step
    attention: Tensor  # [N, S]


@dataclass(frozen=True)
class BeamSearch:
    """Searches for the translation Y of a source X with the highest score s(Y, X).

    The score is (GNMT, Eq. 14)::

        s(Y, X) = log P(Y|X) / lp(Y) + cp(X, Y)
        lp(Y) = (5 + |Y|)^a / (5 + 1)^a
        cp(X, Y) = b sum_i log(min(sum_j p_ij, 1))

    ``|Y|`` counts the end of sentence. p_ij is the attention weight of source position i in the
    step of token j.

    In each step, every source keeps the `beam` most probable continuations. A continuation that
    ends the sentence becomes a finished hypothesis and frees its place in the beam. Two rules prune
    the search:

    1. A token is skipped if its log-probability is more than `window` below that of the best token
       after the same hypothesis.
    2. A finished hypothesis is dropped if its score is more than `window` below the best score. An
       unfinished hypothesis is dropped if its upper bound log P / lp(longest Y) is more than
       `window` below the best score. No continuation exceeds this bound, because cp <= 0.

    The search for a source ends when no unfinished hypothesis can enter the `num_best` results, by
    the same bound. If the model's outputs for a source do not depend on the other sources of a
    batch, the translations do not either. The best hypothesis does not depend on `num_best`.

    The greedy hypothesis takes the most probable token in every step. The greedy hypothesis always
    keeps a place in the beam, so the best result never scores lower. An ordinary beam search can
    drop the greedy hypothesis for hypotheses with lower final scores.

    A hypothesis must end at a limit of max(min_length_limit, max_length_ratio ``|X|``) tokens, even
    if the end of sentence has probability 0. In the logarithm of this probability and in cp, the
    smallest normal number of the dtype replaces 0.

    Args:
        beam: number of hypotheses of each source in a step.
        length_penalty: a in [0, 10]; 0 does not normalise by length, which favours short results.
        coverage_penalty: b in [0, 10].
        window: window of both pruning rules in nats; infinity disables both rules.
        max_length_ratio: maximum tokens of the translation per token of the source; both include
            the end of sentence.
        min_length_limit: lower bound of the length limit, for short sources.
        num_best: maximum number of returned hypotheses, at most `beam`.
    """

    beam: int = 8
    length_penalty: float = 0.2
    coverage_penalty: float = 0.2
    window: float = 3.0
    max_length_ratio: float = 2.0
    min_length_limit: int = 10
    num_best: int = 1

    def __post_init__(self) -> None:
        def check(name: str, holds: bool, rule: str) -> None:
            require(holds, f"BeamSearch: {name}", rule, getattr(self, name))

        sizes = {"beam": self.beam, "num_best": self.num_best}
        require_sizes("BeamSearch", **sizes, min_length_limit=self.min_length_limit)
        for name in ("length_penalty", "coverage_penalty"):
            check(name, 0 <= getattr(self, name) <= 10, "be in [0, 10]")  # float32 suffices here
        ratio = self.max_length_ratio
        check("max_length_ratio", 0 <= ratio < math.inf, "be finite and at least 0")
        check("window", self.window >= 0, "be at least 0")
        check("num_best", self.num_best <= self.beam, f"be at most beam = {self.beam}")

    @classmethod
    def greedy(cls) -> Self:
        """Creates a greedy search: a beam of 1 without penalties."""
        return cls(beam=1, length_penalty=0.0, coverage_penalty=0.0, window=0.0)

    def score(
        self, log_prob: Tensor, length: int | Tensor, coverage: Tensor, mask: Tensor
    ) -> Tensor:
        """Computes s(Y, X) [N] of N hypotheses.

        Args:
            log_prob: [N], log P(Y|X).
            length: ``|Y|``, an int for all hypotheses or [N].
            coverage: [N, S], sum_j p_ij.
            mask: [N, S] bool, False at padding and where the attention cannot reach.
        """
        tiny = torch.finfo(coverage.dtype).tiny
        logs = coverage.clamp(tiny, 1).log().masked_fill(~mask, 0)
        # cumsum adds sequentially, so results with more padding are bitwise identical.
        penalty = self.coverage_penalty * logs.cumsum(1)[:, -1]
        return log_prob / self._length_penalty(length, log_prob) + penalty

    def _length_penalty(self, length: int | Tensor, like: Tensor) -> Tensor:
        """Computes lp(Y) in the dtype of `like`."""
        return ((5 + torch.as_tensor(length).to(like)) / 6) ** self.length_penalty

    @torch.no_grad()
    def __call__(
        self,
        model: TranslationModel,
        state: DecoderState,
        source_mask: Tensor,
        eos_id: int,
        attended: Tensor | None = None,
    ) -> list[list[Hypothesis]]:
        """Translates B sources as a batch.

        Args:
            model: the translation model, of which only `step` is called.
            state: state of the model before the first token, with one row for each source.
            source_mask: [B, S] bool, False at padding. Padding follows the tokens.
            eos_id: id of the end of sentence, which is also the first input of the model.
            attended: [B, S] bool, the positions that the attention can reach; the coverage penalty
                has no others. None: source_mask.

        Returns:
            For each source, 1 to num_best hypotheses, best score first.
        """
        name, form = "BeamSearch: source_mask", (source_mask.dtype, tuple(source_mask.shape))
        is_mask = source_mask.dim() == 2 and source_mask.dtype == torch.bool
        require(is_mask, name, "be bool [B, S]", form)
        require_sizes("BeamSearch", 0, eos_id=eos_id)
        tokens = source_mask.sum(1)
        least = min(tokens.tolist(), default=1)
        require(least > 0, name, "have at least 1 token in each row", least)
        if not len(source_mask):
            return []
        attended = source_mask if attended is None else attended
        limit = (tokens * self.max_length_ratio).long().clamp(self.min_length_limit)
        # An empty hypothesis for each source; float32 sums promote to a wider dtype.
        device = source_mask.device
        source = torch.arange(len(source_mask), device=device)
        live = _Live(
            source=source,
            place=torch.zeros_like(source),
            token=torch.full_like(source, eos_id),
            log_prob=torch.zeros(source.shape, device=device),
            coverage=torch.zeros(source_mask.shape, device=device),
            greedy=torch.ones_like(source, dtype=torch.bool),
        )
        parent = live.source
        lowest = torch.full((len(source_mask), self.num_best), -math.inf, device=device)
        nothing = torch.zeros_like(lowest, dtype=torch.int64)
        finished = _Finished(lowest, lowest, nothing, nothing)
        steps: list[_Step] = []
        while len(live.source):
            log_probs, attention, state = model.step(live.token, state)
            vocab_size = log_probs.shape[1]
            require(eos_id < vocab_size, "BeamSearch: eos_id", f"be below V = {vocab_size}", eos_id)
            steps.append(_Step(live.token, parent, attention))
            coverage = live.coverage + attention
            last = limit[live.source] == len(steps)
            candidates = self._candidates(live, log_probs, last, len(limit), eos_id)
            ends = candidates.token == eos_id
            finished = self._finish(finished, candidates, ends, len(steps), coverage, attended)
            chosen = self._go_on(finished, candidates, ends, limit)
            parent = candidates.row[chosen]
            live = _Live(
                source=chosen.nonzero()[:, 0],
                place=(chosen.cumsum(1) - 1)[chosen],
                token=candidates.token[chosen],
                log_prob=candidates.log_prob[chosen],
                coverage=coverage[parent],
                greedy=candidates.greedy[chosen],
            )
            if len(parent):
                state = state.select(parent)
        return self._hypotheses(finished, steps, source_mask, eos_id)

    def _candidates(
        self, live: _Live, log_probs: Tensor, last: Tensor, num_sources: int, eos_id: int
    ) -> _Candidates:
        """Finds the 2 · beam best continuations of each source; at least `beam` do not end.

        `last` is True if a hypothesis has reached its length limit.
        """
        width = min(self.beam + 1, log_probs.shape[1])  # for each hypothesis; one can be an end
        value, token = largest(log_probs, width)  # [N, M]
        # topk orders ties arbitrarily; the greedy token is the first of the most probable tokens.
        greedy_token = token[:, :1].clone()
        tied = (value[:, :2].diff() == 0).any(1)
        if tied.any():
            greedy_token[tied] = log_probs[tied].argmax(1, keepdim=True)
        token = torch.where(token == greedy_token, token[:, :1], token)
        token[:, :1] = greedy_token

        best = value[:, :1]
        worst = float(best.min())
        rule = "have a finite maximum in each row"
        require(worst > -math.inf, "BeamSearch: log_probs", rule, worst)
        value = value.masked_fill(value < best - self.window, -math.inf)
        end = log_probs[:, eos_id].clamp(math.log(torch.finfo(log_probs.dtype).tiny))
        value = value.masked_fill(last[:, None], -math.inf)
        value[:, 0] = torch.where(last, end, value[:, 0])
        token[:, 0] = token[:, 0].masked_fill(last, eos_id)
        log_prob = live.log_prob[:, None] + value  # [N, M]

        # Sort the continuations of each source; the sort is stable, so empty places have no effect.
        order = log_prob.clone()
        order[:, 0] = order[:, 0].masked_fill(live.greedy, math.inf)
        places = order.new_full((num_sources, self.beam, width), -math.inf)
        places[live.source, live.place] = order
        row_at = live.source.new_zeros(num_sources, self.beam)
        row_at[live.source, live.place] = torch.arange(len(order), device=order.device)
        order, index = places.flatten(1).sort(dim=1, descending=True, stable=True)
        order, index = order[:, : 2 * self.beam], index[:, : 2 * self.beam]
        row, column = row_at.gather(1, index // width), index % width
        return _Candidates(
            exists=order > -math.inf,
            row=row,
            token=token[row, column],
            log_prob=log_prob[row, column],
            greedy=order == math.inf,
        )

    def _finish(
        self,
        finished: _Finished,
        candidates: _Candidates,
        ends: Tensor,
        length: int,
        coverage: Tensor,
        attended: Tensor,
    ) -> _Finished:
        """Updates the finished hypotheses with those of the first `beam` candidates that end."""
        ends = ends & candidates.exists
        ends[:, self.beam :] = False
        rows = candidates.row[ends]
        score = candidates.log_prob.new_full(ends.shape, -math.inf)
        score[ends] = self.score(
            candidates.log_prob[ends], length, coverage[rows], attended[ends.nonzero()[:, 0]]
        ).to(score.dtype)
        lengths = torch.full_like(candidates.row, length)
        new = _Finished(score, candidates.log_prob, lengths, candidates.row)
        merged = _Finished(*(torch.cat(pair, 1) for pair in zip(finished, new, strict=True)))
        # The sort is stable, so earlier hypotheses win ties.
        order = merged.score.sort(dim=1, descending=True, stable=True).indices[:, : self.num_best]
        return _Finished(*(x.gather(1, order) for x in merged))

    def _go_on(
        self, finished: _Finished, candidates: _Candidates, ends: Tensor, limit: Tensor
    ) -> Tensor:
        """Returns the candidates to continue, [B, C] bool."""
        chosen = candidates.exists & ~ends
        chosen &= chosen.cumsum(1) <= self.beam
        log_prob = candidates.log_prob
        bound = log_prob / self._length_penalty(limit[:, None], log_prob)
        chosen &= bound >= finished.score[:, :1] - self.window
        highest = bound.masked_fill(~chosen, -math.inf).amax(1, keepdim=True)
        return chosen & (highest > finished.score[:, -1:])

    def _hypotheses(
        self, finished: _Finished, steps: list[_Step], source_mask: Tensor, eos_id: int
    ) -> list[list[Hypothesis]]:
        """Traces back the R finished hypotheses of all sources together."""
        kept = finished.score > -math.inf
        kept &= finished.score >= finished.score[:, :1] - self.window
        length, row = finished.length[kept], finished.row[kept]  # [R]
        size = (len(row), len(steps))
        tokens = length.new_full(size, eos_id)
        attention = steps[0].attention.new_zeros(*size, source_mask.shape[1])
        for j, step in reversed(list(enumerate(steps))):
            longer = (length > j).nonzero()[:, 0]
            rows = row[longer]
            attention[longer, j] = step.attention[rows]
            if j:
                tokens[longer, j - 1] = step.token[rows]
            row[longer] = step.parent[rows]

        results: list[list[Hypothesis]] = [[] for _ in source_mask]
        attention, mask = attention.cpu(), source_mask.cpu()
        for source, number, ids, log_prob, score, weights in zip(
            kept.nonzero()[:, 0].tolist(),
            length.tolist(),
            tokens.tolist(),
            finished.log_prob[kept].tolist(),
            finished.score[kept].tolist(),
            attention,
            strict=True,
        ):
            weights = weights[:number, mask[source]]
            results[source].append(Hypothesis(ids[:number], log_prob, score, weights))
        return results


def largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Computes the k largest values [N, k] of each row of x, descending, and their columns.

    For long rows, this function is faster than torch.topk. The k largest values are in the k blocks
    of columns with the largest maxima, or in the columns after the last block.
    """
    block = 64  # columns
    num_columns = x.shape[1]
    num_blocks = num_columns // block
    if num_blocks <= k:
        return torch.topk(x, k)
    blocks = x[:, : num_blocks * block].unflatten(1, (num_blocks, block))
    chosen = blocks.amax(2).topk(k).indices.unsqueeze(2)  # [N, k, 1]
    columns = torch.arange(num_columns, device=x.device)
    rest = columns[num_blocks * block :]
    values = torch.cat([blocks.gather(1, chosen.expand(-1, -1, block)).flatten(1), x[:, rest]], 1)
    places = (chosen * block + columns[:block]).flatten(1)
    places = torch.cat([places, rest.expand(len(x), -1)], 1)
    value, index = values.topk(k)
    return value, places.gather(1, index)
