"""Records how a trained model routes the words of a text to experts.

The MoE layers of a language model route its input words. In a translation model, the encoder's MoE
(layer 0) routes the source wordpieces and the decoder's MoE (layer 1) the target wordpieces.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_ext import Gate, MoE, MoEAux, MoELSTM, ops
from moe_lab.data import AnyText, EncodedPairs, PairBatch, batches_of
from moe_lab.models import AnyModel, evaluating
from moe_lab.progress import progress

NEIGHBOURS = 2  # words on either side of a position
NO_WORD = -1


@dataclass(frozen=True)
class RoutedText:
    """The routing of N positions in R slots; a slot is one (position, expert) assignment."""

    num_experts: int
    windows: Tensor  # [N, 5] int64, each input word between its neighbours; NO_WORD beyond the ends
    position: Tensor  # [R] int64, of each slot
    expert: Tensor  # [R] int64
    gate: Tensor  # [R]
    pair: Tensor | None = None  # [N] int64, the language pair; None with fewer than two pairs
    pair_names: tuple[str, ...] = ()  # such as "en-fr"

    @property
    def words(self) -> Tensor:
        """The input word of each position, [N]."""
        return self.windows[:, NEIGHBOURS]

    def slots_by_gate(self) -> tuple[Tensor, Tensor]:
        """Sorts the slots by expert, then by decreasing gate; returns the order and the loads."""
        return self._sorted_slots(self.expert, self.num_experts)

    def slots_by_position(self) -> tuple[Tensor, Tensor]:
        """Sorts the slots by position, then by decreasing gate; returns the order and the loads."""
        return self._sorted_slots(self.position, len(self.windows))

    def _sorted_slots(self, key: Tensor, number: int) -> tuple[Tensor, Tensor]:
        order = self.gate.argsort(descending=True, stable=True)
        return order[key[order].argsort(stable=True)], torch.bincount(key, minlength=number)

    def highest(self, number: int) -> Tensor:
        """Returns the positions of each expert's highest gates, [E, number], padded with -1."""
        order, load = self.slots_by_gate()
        expert = self.expert[order]
        rank = torch.arange(len(order)) - (load.cumsum(0) - load)[expert]
        kept = rank < number
        positions = torch.full((self.num_experts, number), -1)
        positions[expert[kept], rank[kept]] = self.position[order[kept]]
        return positions

    def first_choice(self) -> tuple[Tensor, Tensor]:
        """Returns the positions with an expert, and each position's expert of the highest gate."""
        order, _ = self.slots_by_position()
        first = self.position[order].diff(prepend=torch.tensor([-1])) > 0
        return self.position[order[first]], self.expert[order[first]]

    def sentences(self) -> list[range]:
        begins = (self.windows[:, NEIGHBOURS - 1] == NO_WORD).nonzero().flatten().tolist()
        return list(map(range, begins, [*begins[1:], len(self.windows)]))


def joined(texts: Sequence[RoutedText]) -> RoutedText:
    """Concatenates the positions of several routed texts, in the order of `texts`."""
    offset, positions = 0, []
    pairs = [routed.pair for routed in texts if routed.pair is not None]
    for routed in texts:
        positions.append(routed.position + offset)
        offset += len(routed.windows)
    return RoutedText(
        texts[0].num_experts,
        torch.cat([routed.windows for routed in texts]),
        torch.cat(positions),
        torch.cat([routed.expert for routed in texts]),
        torch.cat([routed.gate for routed in texts]),
        torch.cat(pairs) if pairs else None,
        texts[0].pair_names,
    )


def find_moe_layer(model: AnyModel, layer: int) -> MoE | MoELSTM:
    """Returns the MoE layer with index `layer` among the model's MoE layers."""
    layers = [module for module in model.layers if isinstance(module, (MoE, MoELSTM))]
    if not 0 <= layer < len(layers):
        raise ValueError(
            f"find_moe_layer: layer must be in [0, {len(layers)}), the indices of the MoE layers, "
            f"got {layer}"
        )
    return layers[layer]


@torch.inference_mode()
def route_text(
    model: AnyModel,
    text: AnyText,
    *,
    num_positions: int = 200_000,
    layer: int = 0,
    tokens_per_batch: int = 2_560,
) -> RoutedText:
    """Runs a model on random sentences without noise or dropout; records one layer's routing.

    Args:
        model: a model with a MoE layer.
        text: sentences encoded with the model's vocabulary; sentence pairs for a translation model.
        num_positions: the approximate number of words to run.
        layer: the index among the MoE layers; 0 is the encoder and 1 the decoder in translation.
        tokens_per_batch: affects the choice of sentences, not their routing.
    """
    module = find_moe_layer(model, layer)
    # The experts of the gate: those without weights too.
    num_experts = (module.cell.moe if isinstance(module, MoELSTM) else module).gate.num_experts
    device = model.embedding.weight.device
    language_pair: Tensor | None = None
    names: tuple[str, ...] = ()
    if isinstance(text, EncodedPairs) and len(text.names) > 1:
        language_pair, names = text.pair, text.names
    batches = batches_of(text, tokens_per_batch=tokens_per_batch, shuffle=True)
    # All batches have nearly the same number of tokens.
    needed = math.ceil(num_positions * batches.num_batches / batches.num_tokens)
    bar: Iterable[Any] = progress(
        batches.epoch(0), "running the model", "batches", min(needed, batches.num_batches)
    )
    parts = []
    seen = 0
    with evaluating(model):
        for batch in bar:
            ids, mask, after = batch.inputs, batch.mask, text.eos_id
            if isinstance(batch, PairBatch) and layer == 0:  # sources include their end tokens
                ids, mask, after = batch.source, batch.source_mask, NO_WORD
            _, aux = model.hidden_states(batch.to(device))
            pair = None
            if language_pair is not None:
                pair = language_pair[batch.sentence_index].repeat_interleave(mask.sum(1))
            windows = windows_of(ids, mask, after)
            parts.append(RoutedText(num_experts, windows, *_slots(aux[layer]), pair, names))
            seen += len(windows)
            if seen >= num_positions:
                break
    return joined(parts)


def windows_of(ids: Tensor, mask: Tensor, after: int = NO_WORD) -> Tensor:
    """Returns each token of ids [B, S] with its neighbours, [N, 5]; `after` follows each row."""
    text = F.pad(ids.masked_fill(~mask, NO_WORD), (NEIGHBOURS, NEIGHBOURS), value=NO_WORD)
    text.scatter_(1, mask.sum(1, keepdim=True) + NEIGHBOURS, after)
    return text.unfold(1, 2 * NEIGHBOURS + 1, 1)[mask]


def _slots(aux: MoEAux) -> tuple[Tensor, Tensor, Tensor]:
    """Returns position (from 0), expert and gate of each slot that is not dropped."""
    position = ops.token_index(aux.expert_index, aux.token_offsets)
    kept = slice(None) if aux.kept is None else aux.kept.flatten()
    position, expert, gate = (
        part.flatten()[kept].cpu() for part in (position, aux.expert_index, aux.gates)
    )
    return position, expert, gate


@contextmanager
def untrained_gates(layer: nn.Module, seed: int) -> Iterator[None]:
    """Replaces W_g of the layer's gates by normal noise of equal root mean square, in a context."""
    parameters: list[nn.Parameter] = []
    for gate in (module for module in layer.modules() if isinstance(module, Gate)):
        for name, parameter in gate.named_parameters(recurse=False):
            if name.startswith("threshold"):
                raise ValueError(
                    "untrained_gates: layer must have gates without thresholds, "
                    f"got a {type(gate).__name__}"
                )
            if name.startswith("w_gate"):
                parameters.append(parameter)
    trained = [parameter.detach().clone() for parameter in parameters]
    generator = torch.Generator().manual_seed(seed)
    try:
        with torch.no_grad():
            for parameter, before in zip(parameters, trained, strict=True):
                drawn = torch.randn(parameter.shape, generator=generator).to(before)
                parameter.copy_(drawn * before.square().mean().sqrt())
        yield
    finally:
        with torch.no_grad():
            for parameter, before in zip(parameters, trained, strict=True):
                parameter.copy_(before)
