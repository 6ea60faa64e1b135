"""Beam search with length and coverage penalties (Wu et al. 2016, "GNMT", Sec. 7)."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from moe_ext.checks import require, require_sizes


class StepState(Protocol):
    """What a model knows of N rows: sources, each with the tokens that it was given so far."""

    def select(self, index: Tensor) -> Self:
        """The state of the rows index [N'] int64, in any order and any number of times."""


State = TypeVar("State", bound=StepState)


class StepModel(Protocol[State]):
    """A model that translates token by token."""

    def step(self, tokens: Tensor, state: State) -> tuple[Tensor, Tensor, State]:
        """One more token of each row.

        Args:
            tokens: [N] int64.
            state: of N rows.

        Returns:
            The next token's log-probabilities [N, V]; the weights [N, S] with which the source's
            positions took part in it, p_ij of a step j, 0 at padding; the state to go on from.
        """


@dataclass(frozen=True)
class Hypothesis:
    """A translation Y of a source X.

    Attributes:
        tokens: the ids, of which the last is the end of sentence.
        log_prob: log P(Y|X).
        score: s(Y, X), see `BeamSearch`.
        attention: [|Y|, |X|], row j the weights p_ij of the step that gave token j. On the CPU.
    """

    tokens: list[int]
    log_prob: float
    score: float
    attention: Tensor


class _Live(NamedTuple):
    """N hypotheses that go on, those of a source side by side; j - 1 tokens each."""

    source: Tensor  # [N]
    place: Tensor  # [N], among those of its source
    token: Tensor  # [N], the last
    log_prob: Tensor  # [N]
    coverage: Tensor  # [N, S], the sum of p_ij over its tokens
    greedy: Tensor  # [N] bool, whether it is the greedy one


class _Candidates(NamedTuple):
    """C continuations of each source, best first."""

    exists: Tensor  # [B, C] bool
    row: Tensor  # [B, C], of the live hypothesis
    token: Tensor  # [B, C]
    log_prob: Tensor  # [B, C]
    greedy: Tensor  # [B, C] bool


class _Finished(NamedTuple):
    """The best full hypotheses of each source so far; -inf where there are less than n."""

    score: Tensor  # [B, n]
    log_prob: Tensor  # [B, n]
    length: Tensor  # [B, n]
    row: Tensor  # [B, n], among those of its last step


class _Step(NamedTuple):
    """What is kept of a step, to follow hypotheses back."""

    token: Tensor  # [N], given to the model
    parent: Tensor  # [N], the row of the step before
    attention: Tensor  # [N, S]


@dataclass(frozen=True)
class BeamSearch:
    """Searches for the translation Y of a source X with the highest score

        s(Y, X) = log P(Y|X) / lp(Y) + cp(X, Y)
        lp(Y) = (5 + |Y|)^a / (5 + 1)^a
        cp(X, Y) = b sum_i log(min(sum_j p_ij, 1))

    where |Y| counts the end of sentence and p_ij is the weight of source position i when token j
    was chosen (GNMT, Eq. 14). Step by step, the `beam` most probable continuations of a source's
    hypotheses are kept; those which end a sentence are full hypotheses, in whose place others go
    on. Two prunings:

    1. A token whose log-probability is more than `window` below that of the best token after the
       same hypothesis is not considered.
    2. A full hypothesis that scores more than `window` below the best one is dropped, and at once
       every other that can only lead to such: for no continuation exceeds
       log P / lp(longest Y), as probabilities shrink and cp <= 0.

    A source is finished, and takes no more part in the model's steps, as soon as no hypothesis can
    come among its `num_best` full ones, by the same bound. What is found does not depend on the
    other sources, as far as the model's outputs do not, nor the best hypothesis on `num_best`.

    The greedy hypothesis, that of the most probable token in every step, always keeps a place,
    even while it is not among the `beam` most probable ones. So the best result never scores below
    it, which a beam alone does not guarantee: what pushes it out can turn out worse.

    At the limit of max(min_length_limit, max_length_ratio |X|) tokens a hypothesis ends, whatever
    the probability of that. Where a logarithm of 0 would leave no score to compare (there, and in
    cp), the smallest normal number of the type stands for 0.

    Args:
        beam: hypotheses that go on together, for each source.
        length_penalty: a in [0, 10]; with 0 long translations are the less probable ones.
        coverage_penalty: b in [0, 10].
        window: in nats, for both prunings; infinity for none.
        max_length_ratio: of a translation's and its source's tokens, ends of sentences included.
        min_length_limit: tokens that a translation may have of however short a source.
        num_best: hypotheses to return, at most `beam`.

    Raises:
        ValueError: an option is out of range.
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
            check(name, 0 <= getattr(self, name) <= 10, "be in [0, 10]")  # where float32 suffices
        ratio = self.max_length_ratio
        check("max_length_ratio", 0 <= ratio < math.inf, "be finite and not negative")
        check("window", self.window >= 0, "not be negative")
        check("num_best", self.num_best <= self.beam, f"be at most the beam, {self.beam}")

    @classmethod
    def greedy(cls) -> Self:
        """The most probable token in every step: a beam of 1 without penalties."""
        return cls(beam=1, length_penalty=0.0, coverage_penalty=0.0, window=0.0)

    def score(
        self, log_prob: Tensor, length: int | Tensor, coverage: Tensor, mask: Tensor
    ) -> Tensor:
        """s(Y, X) of N hypotheses.

        Args:
            log_prob: [N], log P(Y|X).
            length: |Y|, of all or [N].
            coverage: [N, S], sum_j p_ij.
            mask: [N, S] bool, False at padding.

        Returns:
            [N].
        """
        tiny = torch.finfo(coverage.dtype).tiny
        logs = coverage.clamp(tiny, 1).log().masked_fill(~mask, 0)
        # One after the other, so that padding at the end changes no bits.
        penalty = self.coverage_penalty * logs.cumsum(1)[:, -1]
        return log_prob / self._length_penalty(length, log_prob) + penalty

    def _length_penalty(self, length: int | Tensor, like: Tensor) -> Tensor:
        """lp(Y), in another tensor's type."""
        return ((5 + torch.as_tensor(length).to(like)) / 6) ** self.length_penalty

    @torch.no_grad()
    def __call__(
        self, model: StepModel[State], state: State, source_mask: Tensor, eos_id: int
    ) -> list[list[Hypothesis]]:
        """Translates B sources at once.

        Args:
            model: which translates.
            state: the model's, of one row for each source and before the first token.
            source_mask: [B, S] bool, False at padding, which follows the source.
            eos_id: the end of sentence; also the first token that the model is given.

        Returns:
            For each source from 1 to num_best hypotheses, those with the highest score first.

        Raises:
            ValueError: source_mask is not a matrix of bool with a token in each row, eos_id is
                negative or, where the model itself does not refuse that, not below V, or a row of
                log-probabilities has no largest number (NaN).
        """
        require(
            source_mask.dim() == 2 and source_mask.dtype == torch.bool,
            "BeamSearch: source_mask",
            "be bool [B, S]",
            (source_mask.dtype, tuple(source_mask.shape)),
        )
        require_sizes("BeamSearch", 0, eos_id=eos_id)
        tokens = source_mask.sum(1)
        least = min(tokens.tolist(), default=1)
        require(least > 0, "BeamSearch: source_mask", "have a token in each row", least)
        if not len(source_mask):
            return []
        limit = (tokens * self.max_length_ratio).long().clamp(self.min_length_limit)
        live = self._start(source_mask, eos_id)
        parent = live.source
        finished = self._none_finished(source_mask)
        steps: list[_Step] = []
        while len(live.source):
            log_probs, attention, state = model.step(live.token, state)
            vocab_size = log_probs.shape[1]
            require(eos_id < vocab_size, "BeamSearch: eos_id", f"be below {vocab_size}", eos_id)
            steps.append(_Step(live.token, parent, attention))
            coverage = live.coverage + attention
            last = limit[live.source] == len(steps)
            candidates = self._candidates(live, log_probs, last, len(limit), eos_id)
            ends = candidates.token == eos_id
            finished = self._finish(finished, candidates, ends, len(steps), coverage, source_mask)
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

    def _start(self, source_mask: Tensor, eos_id: int) -> _Live:
        """One hypothesis for each source, without tokens. Sums take the model's type, if wider."""
        source = torch.arange(len(source_mask), device=source_mask.device)
        return _Live(
            source=source,
            place=torch.zeros_like(source),
            token=torch.full_like(source, eos_id),
            log_prob=torch.zeros(source.shape, device=source.device),
            coverage=torch.zeros(source_mask.shape, device=source.device),
            greedy=torch.ones_like(source, dtype=torch.bool),
        )

    def _none_finished(self, source_mask: Tensor) -> _Finished:
        shape = (len(source_mask), self.num_best)
        lowest = torch.full(shape, -math.inf, device=source_mask.device)
        nothing = torch.zeros(shape, dtype=torch.int64, device=source_mask.device)
        return _Finished(lowest, lowest, nothing, nothing)

    def _candidates(
        self, live: _Live, log_probs: Tensor, last: Tensor, num_sources: int, eos_id: int
    ) -> _Candidates:
        """The 2 beam best continuations of each source: `beam` of them don't end a sentence.

        Args:
            live: N hypotheses.
            log_probs: [N, V], of their next tokens.
            last: [N] bool, where a hypothesis has reached its limit.
            num_sources: B.
            eos_id: the end of sentence.
        """
        width = min(self.beam + 1, log_probs.shape[1])  # of one hypothesis, an end among them
        value, token = largest(log_probs, width)  # [N, M]
        # Equal values come in any order: the greedy token is the first of the best.
        greedy_token = token[:, :1].clone()
        tied = (value[:, :2].diff() == 0).any(1)
        if tied.any():
            greedy_token[tied] = log_probs[tied].argmax(1, keepdim=True)
        token = torch.where(token == greedy_token, token[:, :1], token)
        token[:, :1] = greedy_token

        best = value[:, :1]
        worst = float(best.min())
        require(
            worst > -math.inf, "BeamSearch: log_probs", "have a largest number in each row", worst
        )
        value = value.masked_fill(value < best - self.window, -math.inf)
        end = log_probs[:, eos_id].clamp(math.log(torch.finfo(log_probs.dtype).tiny))
        value = value.masked_fill(last[:, None], -math.inf)
        value[:, 0] = torch.where(last, end, value[:, 0])
        token[:, 0] = token[:, 0].masked_fill(last, eos_id)
        log_prob = live.log_prob[:, None] + value  # [N, M]

        # The hypotheses of a source side by side; stable, so that empty places change no order.
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
        source_mask: Tensor,
    ) -> _Finished:
        """The best of those finished before and of the first `beam` candidates that end now."""
        ends = ends & candidates.exists
        ends[:, self.beam :] = False
        rows = candidates.row[ends]
        score = candidates.log_prob.new_full(ends.shape, -math.inf)
        score[ends] = self.score(
            candidates.log_prob[ends], length, coverage[rows], source_mask[ends.nonzero()[:, 0]]
        ).to(score.dtype)
        new = _Finished(
            score, candidates.log_prob, torch.full_like(candidates.row, length), candidates.row
        )
        both = _Finished(*(torch.cat(pair, 1) for pair in zip(finished, new, strict=True)))
        # Stable: of equals those found first.
        order = both.score.sort(dim=1, descending=True, stable=True).indices[:, : self.num_best]
        return _Finished(*(x.gather(1, order) for x in both))

    def _go_on(
        self, finished: _Finished, candidates: _Candidates, ends: Tensor, limit: Tensor
    ) -> Tensor:
        """[B, C] bool, the candidates that go on."""
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
        """Follows the finished ones back, all at once: R of them."""
        kept = finished.score > -math.inf
        kept &= finished.score >= finished.score[:, :1] - self.window
        length, row = finished.length[kept], finished.row[kept]  # [R]
        size = (len(row), len(steps))
        tokens = length.new_full(size, eos_id)
        attention = steps[0].attention.new_zeros(*size, source_mask.shape[1])
        for j, step in reversed(list(enumerate(steps))):
            there = (length > j).nonzero()[:, 0]
            rows = row[there]
            attention[there, j] = step.attention[rows]
            if j:
                tokens[there, j - 1] = step.token[rows]
            row[there] = step.parent[rows]

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
    """The k largest numbers of each row, [N, k], largest first, and where they stand.

    As `topk`, in a fraction of its time where rows are long: they are in the k blocks of columns
    with the largest maxima, or in what the blocks leave.
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
