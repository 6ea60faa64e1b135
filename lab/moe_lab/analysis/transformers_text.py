"""Records how a model of Hugging Face transformers routes the tokens of a text to experts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from moe_ext.checks import require, require_sizes
from moe_lab.analysis.routed_text import RoutedText, windows_of
from moe_lab.models import evaluating
from moe_lab.progress import progress


@dataclass(frozen=True)
class RoutedLines:
    """The routing of N tokens in the mixture layers of a transformers model.

    In the spelling of a token, a space is "▁"; a tab or another invisible character is written as
    in a Python string. A token that is a part of a character has the spelling of the tokenizer.
    """

    windows: Tensor  # [N, 5] int64, each token between its neighbours, as in `RoutedText`
    spelling: tuple[str, ...]  # the text of each token that occurs, by its index in windows
    _recorders: tuple["_Recorder", ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The name of each experts module that ran, in the order of the model."""
        return tuple(recorder.name for recorder in self._recorders)

    def layer(self, index: int) -> RoutedText:
        """Returns the routing of one layer, by its index in `layers`."""
        number = len(self._recorders)
        rule = f"be in [0, {number}), the indices of the layers with experts"
        require(0 <= index < number, "RoutedLines.layer: index", rule, index)
        recorder = self._recorders[index]
        expert, gate = torch.cat(recorder.experts), torch.cat(recorder.gates)
        position = torch.arange(len(expert)).unsqueeze(1).expand_as(expert)
        # Some models skip a slot with an index of E or more.
        kept = expert < recorder.num_experts
        return RoutedText(
            recorder.num_experts, self.windows, position[kept], expert[kept].long(), gate[kept]
        )


@dataclass
class _Recorder:
    """Holds the experts [N, K] and gates [N, K] of one experts module, one tensor for each batch.

    Experts are int16 and gates float32, 6 bytes for each slot.
    """

    name: str
    num_experts: int
    experts: list[Tensor] = field(default_factory=list)
    gates: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def route_lines(
    model: Any,
    tokenizer: Any,
    lines: Iterable[str],
    *,
    num_positions: int = 200_000,
    max_length: int = 512,
    tokens_per_batch: int = 2_560,
) -> RoutedLines:
    """Runs a transformers model on the first lines of a text; records the routing of each layer.

    The model sees each line on its own. Empty lines are skipped, and longer lines are split. Hooks
    on the modules of `experts_modules` record the experts and the gates, with any experts
    implementation. A layer that did not run has no entry.

    The memory does not grow with the length of the text, which is read only as far as needed: 6
    bytes for each layer and each of the k experts of a token.

    Args:
        model: a model of transformers that is called with input_ids and attention_mask.
        tokenizer: the tokenizer of the model.
        lines: the text.
        num_positions: the largest number of tokens to run.
        max_length: the largest number of tokens that the model sees together.
        tokens_per_batch: the size of a batch, padding included.
    """
    from moe_ext.integrations.transformers import experts_modules

    require_sizes("route_lines", num_positions=num_positions, max_length=max_length)
    require_sizes("route_lines", tokens_per_batch=tokens_per_batch)
    modules = experts_modules(model)
    recorders = [_Recorder(name, cast(int, module.num_experts)) for name, module in modules.items()]
    parts = _split(tokenizer, lines, num_positions, max_length)
    batches = progress(_batches(parts, tokens_per_batch), "running the model", "batches")
    windows = []
    with evaluating(model):
        for ids, mask in batches:
            hooks = [
                module.register_forward_pre_hook(partial(_record, recorder, mask))
                for recorder, module in zip(recorders, modules.values(), strict=True)
            ]
            try:
                on_device = {"input_ids": ids, "attention_mask": mask.long()}
                model(**{k: v.to(model.device) for k, v in on_device.items()}, use_cache=False)
            finally:
                for hook in hooks:
                    hook.remove()
            windows.append(windows_of(ids, mask))
    require(bool(windows), "route_lines: lines", "have at least one token", 0)
    ran = tuple(recorder for recorder in recorders if recorder.experts)
    require(bool(ran), "route_lines: model", "run at least one experts module", len(ran))
    for recorder in ran:
        rule = f"run once in each of the {len(windows)} batches"
        calls = len(recorder.experts)
        require(calls == len(windows), f"route_lines: {recorder.name} of the model", rule, calls)
    ids, index = torch.cat(windows).unique(return_inverse=True)  # the first id is NO_WORD
    words = tuple(_spelling(tokenizer, token) for token in ids[1:].tolist())
    return RoutedLines(index - 1, words, ran)


def _split(
    tokenizer: Any, lines: Iterable[str], num_positions: int, max_length: int
) -> Iterator[list[int]]:
    """Yields the ids of parts of the lines, each of at most max_length tokens."""
    left = num_positions
    for line in lines:
        if not (text := line.rstrip()):
            continue
        ids = tokenizer(text, verbose=False)["input_ids"][:left]
        for begin in range(0, len(ids), max_length):
            yield ids[begin : begin + max_length]
        left -= len(ids)
        if left == 0:
            return


def _batches(parts: Iterable[list[int]], tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields ids [B, S] and the mask [B, S] of their tokens, padded at the end."""
    batch: list[list[int]] = []
    for part in parts:
        longest = max(map(len, [*batch, part]))
        if batch and longest * (len(batch) + 1) > tokens:
            yield _padded(batch)
            batch = []
        batch.append(part)
    if batch:
        yield _padded(batch)


def _padded(batch: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = pad_sequence([torch.tensor(part) for part in batch], batch_first=True)
    length = torch.tensor([len(part) for part in batch])
    return ids, torch.arange(ids.shape[1]) < length.unsqueeze(1)


def _record(
    recorder: _Recorder, mask: Tensor, module: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Records the arguments of an experts module for the tokens that are not padding."""
    _, index, gates = arguments
    rule = f"receive the {mask.numel()} tokens of a batch"
    name = f"route_lines: {recorder.name} of the model"
    require(len(index) == mask.numel(), name, rule, len(index))
    kept = mask.flatten()
    experts = index.cpu()[kept].clamp(max=recorder.num_experts)
    recorder.experts.append(experts.to(torch.int16))
    recorder.gates.append(gates.cpu()[kept].float())


def _spelling(tokenizer: Any, token: int) -> str:
    """Returns the text of a token; sentencepiece tokenizers decode "▁word" without its space."""
    name = str(tokenizer.convert_ids_to_tokens(token))
    text = str(tokenizer.decode([token])).replace(" ", "▁")
    if not text or "\ufffd" in text:
        return name
    if name.startswith("▁") and not text.startswith("▁"):
        text = "▁" + text
    return text if text.isprintable() else repr(text)[1:-1]
