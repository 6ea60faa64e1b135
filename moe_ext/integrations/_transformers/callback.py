"""A callback of transformers' Trainer that warns before the routers of a model collapse."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from transformers import TrainerCallback

from moe_ext.checks import given, require, require_at_least
from moe_ext.integrations._transformers.balance import LayerBalance, ModelBalance, balance

__all__ = ["CollapseCallback"]

_MIN_LOAD = 32  # tokens for each expert; fewer may miss an expert by chance


class CollapseCallback(TrainerCallback):
    """Warns while training when the router of a layer begins to collapse onto few experts.

    The callback of ``Trainer`` measures the balance of each mixture layer, see `balance`. At each
    log line of the training loss, it checks the tokens since the last check. A check needs 32
    tokens for each expert. Until then, the next log line checks a longer part of the training. A
    warning has the layer, the share of the busiest expert, the number of dead experts, and the
    rule:

        CollapseCallback: model.layers.3.mlp.experts: the share of the busiest expert must be at
        most 0.625, got 0.87 (expert 5); 4 of 8 experts are dead; step 120

    The share of an expert is the fraction of the tokens that have the expert among their k experts.
    It is k / E with perfect balance, and 1 after a collapse. A dead expert has no token.

    Padding counts as tokens. With several ranks, rank 0 checks its own tokens. The measurement does
    not change the results of the model.

    Args:
        max_share: the largest share of an expert, from 0 to 1. None: the middle between
            k / E and 1.
        max_dead: the largest fraction of dead experts in a layer, from 0 to 1.

    Attributes:
        max_share: the constructor argument.
        max_dead: the constructor argument.
        measured: the balance since the last check; None outside the training.

    Example:
        >>> callback = CollapseCallback(max_share=0.6)  # Trainer(..., callbacks=[callback])

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, max_share: float | None = None, max_dead: float = 0.25) -> None:
        limits = given(max_share=max_share, max_dead=max_dead)
        require_at_least(0, "CollapseCallback", **limits)
        for name, limit in limits.items():
            require(limit <= 1, f"CollapseCallback: {name}", "be at most 1", limit)
        self.max_share: float | None = max_share
        self.max_dead: float = max_dead
        self.measured: ModelBalance | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Starts to measure."""
        self.on_train_end(args, state, control)  # an error may have ended the last training
        self.measured = balance(kwargs["model"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Checks the layers, and warns."""
        if self.measured is None or "loss" not in kwargs["logs"]:
            return
        layers = self.measured.layers
        if any(layer.load.sum() < _MIN_LOAD * layer.num_experts for layer in layers):
            return
        self.measured.reset()
        if state.is_world_process_zero:
            for layer in layers:
                for broken in self._broken_rules(layer):
                    warnings.warn(f"{broken}; step {state.global_step}", stacklevel=2)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets the tokens of an evaluation."""
        if self.measured is not None:
            self.measured.reset()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the hooks of the measurement."""
        if self.measured is not None:
            self.measured.remove()
        self.measured = None

    def _broken_rules(self, layer: LayerBalance) -> Iterator[str]:
        """Yields the text of each rule that a layer breaks."""
        shares = layer.load / layer.num_tokens
        share, busiest, dead = float(shares.max()), int(shares.argmax()), layer.num_idle
        limit = (1 + float(shares.mean())) / 2 if self.max_share is None else self.max_share
        name = f"CollapseCallback: {layer.name}"
        if share > limit:
            yield (
                f"{name}: the share of the busiest expert must be at most {limit:.3g}, got "
                f"{share:.2f} (expert {busiest}); {dead} of {layer.num_experts} experts are dead"
            )
        if dead > self.max_dead * layer.num_experts:
            yield (
                f"{name}: the fraction of dead experts must be at most {self.max_dead:g}, got "
                f"{dead / layer.num_experts:.2f} ({dead} of {layer.num_experts}); the busiest "
                f"expert, {busiest}, has a share of {share:.2f}"
            )
