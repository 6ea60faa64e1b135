"""Low-rank adapters in all experts of a layer or model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from moe_ext._compiled import uncompiled
from moe_ext._counting import is_of_transformers
from moe_ext.checks import require, require_bool
from moe_ext.experts import Experts, FeedForwardExperts
from moe_ext.lora.experts import LoRAExperts, _AdapterOptions, _Base

__all__ = [
    "LoRAReport",
    "add_lora",
    "disable_lora",
    "lora_experts",
    "lora_state_dict",
    "merge_lora",
]


class LoRAReport(NamedTuple):
    """Says what `add_lora` has done; its text is for a log.

    Attributes:
        experts: the paths of the modules that have the new adapter.
        skipped: the reason for each other module with experts, by path.
        trained: the number of parameters of this rank that require gradients, by path of the
            module with experts; "" for the other parameters of the model.
    """

    experts: tuple[str, ...]
    skipped: dict[str, str]
    trained: dict[str, int]

    def __str__(self) -> str:
        total = sum(self.trained.values())
        lines = [f"LoRA on {len(self.experts)} modules; {total:,} trained parameters on this rank:"]
        lines += [f"  {path or 'other parameters'}: {n:,}" for path, n in self.trained.items()]
        lines += [f"skipped {path}: {reason}" for path, reason in self.skipped.items()]
        return "\n".join(lines)


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    *,
    adapter: str = "default",
    where: Callable[[str], bool] | None = None,
    train_rest: bool = False,
    **options: Unpack[_AdapterOptions],
) -> LoRAReport:
    """Replaces the experts in a layer or model by `LoRAExperts`, and freezes all other parameters.

    Every `FeedForwardExperts` and `QuantizedExperts` in the model is replaced, also in shared
    experts. `LoRAExperts` get another adapter, which becomes the active one. Call the function
    before ``parallelize``, ``fully_shard`` and ``torch.compile``, and before you make the
    optimizer.

    Args:
        model: a `MoE` layer, or a model with such layers. It is changed in place.
        rank, alpha: see `LoRAExperts`.
        adapter: the name of the new adapters.
        where: whether the experts at a path get an adapter; None: all experts do.
        train_rest: whether parameters outside the experts, such as those of gates, stay as they
            are. False freezes them, as PEFT does.
        options: rslora, layers, shared_a, dropout and dtype; see `LoRAExperts`.

    Returns:
        What is trained and what was skipped; print it.

    Warns:
        UserWarning: modules with experts were skipped, because they are of another class.

    Raises:
        ValueError: the model has no experts that can have adapters, or an argument is out of range,
            or adapters are merged. The model is not changed.
        TypeError: an option has the wrong type. The model is not changed.

    Example:
        >>> layer = MoE(64, num_experts=4, k=2, hidden_sizes=[128])
        >>> print(add_lora(layer, rank=8, alpha=16))
        LoRA on 1 modules; 12,288 trained parameters on this rank:
          experts: 12,288
    """
    (train_rest,) = require_bool("add_lora", train_rest=train_rest)
    places = [place for place in _experts_in(model) if where is None or where(place.path)]
    skipped = {place.path: place.reason for place in places if place.reason is not None}
    chosen = [place for place in places if place.reason is None]
    rule = "contain FeedForwardExperts or QuantizedExperts (for experts alone, use LoRAExperts)"
    require(bool(chosen), "add_lora: model", rule, skipped or type(model).__name__)
    for place in chosen:
        if isinstance(place.module, LoRAExperts):
            place.module._require_unmerged("add_lora")
    if skipped:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in skipped.items())
        warnings.warn(f"add_lora: no adapters in {reasons}", stacklevel=2)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    made: dict[nn.Module, LoRAExperts] = {}
    try:
        for place in chosen:
            if place.module in made:
                continue
            if isinstance(place.module, LoRAExperts):
                place.module.add_adapter(adapter, rank, alpha, **options)
                made[place.module] = place.module
            else:
                assert isinstance(place.module, _Base)
                args = place.module, rank, alpha
                made[place.module] = LoRAExperts(*args, adapter=adapter, **options)
    except Exception:
        for parameter, trained in frozen:
            parameter.requires_grad_(trained)
        for module in made:
            if isinstance(module, LoRAExperts):
                module.delete_adapter(adapter)
        raise
    if not train_rest:
        model.requires_grad_(False)
    for place in chosen:
        experts = made[place.module]
        experts.set_adapter(adapter)
        if experts is not place.module:
            setattr(place.parent, place.name, experts.train(place.module.training))
    return LoRAReport(tuple(place.path for place in chosen), skipped, _trained(model))


class _Candidate(NamedTuple):
    parent: nn.Module
    name: str
    path: str
    module: nn.Module
    reason: str | None = None  # why the module can have no adapters


def _experts_in(parent: nn.Module, prefix: str = "") -> Iterator[_Candidate]:
    """Yields the modules with experts below a module, each place of a shared one."""
    if isinstance(parent, LoRAExperts):
        if not prefix:
            yield _Candidate(parent, "", "", parent)
        return
    for name, child in parent._modules.items():
        if child is None:
            continue
        place = _Candidate(parent, name, prefix + name, child)
        if isinstance(child, LoRAExperts):
            yield place
        elif isinstance(child, _Base):
            compiled = uncompiled(parent) is child
            reason = "it is compiled; call add_lora before torch.compile" if compiled else None
            yield place._replace(reason=reason)
        else:
            inner = list(_experts_in(child, f"{place.path}."))
            yield from inner
            if isinstance(child, Experts) and not inner:
                reason = f"{type(child).__name__} is neither FeedForwardExperts nor "
                yield place._replace(reason=f"{reason}QuantizedExperts")
            elif is_of_transformers(child) and not inner:
                reason = "experts of transformers get adapters from PEFT, see "
                yield place._replace(reason=f"{reason}moe_ext.integrations.peft")


def _trained(model: nn.Module) -> dict[str, int]:
    """Counts the parameters that require gradients; see `LoRAReport`."""
    seen: set[Tensor] = set()

    def count(module: nn.Module) -> int:
        new = {p for p in module.parameters() if p.requires_grad} - seen
        seen.update(new)
        return sum(p.numel() for p in new)

    counts = {path: count(module) for path, module in lora_experts(model).items()}
    rest = count(model)
    return counts | ({"": rest} if rest else {})


def lora_experts(model: nn.Module) -> dict[str, LoRAExperts]:
    """Returns the `LoRAExperts` of a model by path, such as to call `set_adapter` of each."""
    modules = model.named_modules()
    return {path: module for path, module in modules if isinstance(module, LoRAExperts)}


@contextmanager
def disable_lora(model: nn.Module) -> Iterator[None]:
    """Computes the model without its adapters within the context, as a reference model for DPO.

    Raises:
        ValueError: adapters are merged.
    """
    with ExitStack() as stack:
        for experts in lora_experts(model).values():
            stack.enter_context(experts.disable_adapter())
        yield


def merge_lora(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replaces all `LoRAExperts` in a model by `LoRAExperts.merged_experts`, with their dtype.

    The adapters are then gone, and packed experts are in floating point. The new weights are
    frozen.

    Raises:
        ValueError: the model has no `LoRAExperts` or is one itself, or its adapters are merged or
            disabled. The model is not changed.
        TypeError: dtype is not floating point. The model is not changed.
    """
    places = [place for place in _experts_in(model) if isinstance(place.module, LoRAExperts)]
    rule = "contain LoRAExperts, and not be one"
    require(bool(places) and places[0].path != "", "merge_lora: model", rule, type(model).__name__)
    for experts in lora_experts(model).values():
        experts._require_mergeable("merge_lora")
    made: dict[nn.Module, FeedForwardExperts] = {}
    for place in places:
        assert isinstance(place.module, LoRAExperts)
        if place.module not in made:
            made[place.module] = place.module.merged_experts(dtype)
        setattr(place.parent, place.name, made[place.module])


def lora_state_dict(model: nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    """Returns the part of a model's state_dict that belongs to one adapter.

    ``model.load_state_dict(state, strict=False)`` loads it.

    Raises:
        ValueError: no experts of the model have such an adapter.
    """
    experts = lora_experts(model)
    names = {name for module in experts.values() for name in module.adapters}
    rule = f"be one of {', '.join(sorted(names)) or 'the adapters of the model, which has none'}"
    require(adapter in names, "lora_state_dict: adapter", rule, adapter)
    owned = {
        p
        for module in experts.values()
        if adapter in module.adapters
        for p in module.adapters[adapter].parameters()
    }
    state = model.state_dict(keep_vars=True)
    return {
        name: value.detach()
        for name, value in state.items()
        if isinstance(value, Tensor) and value in owned  # a module's extra state may be no tensor
    }
