"""Gates that adapt to the tokens of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.types import Device

from moe_ext.checks import require
from moe_ext.gates.gate import Gate
from moe_ext.ranks.layout import Layout

__all__ = ["AdaptiveGate", "adaptive_gates", "update_gates"]


class AdaptiveGate(Gate):
    """Counts tokens in training mode and adapts to them after each optimizer step.

    A derived class keeps its state in buffers. Its `forward` calls `count`, and `update_gates`
    calls its `update` with the sum of the counts. The following gate routes as another gate does,
    and knows the mean share of each expert:

        >>> class ShareGate(AdaptiveGate):
        ...     def __init__(self, gate):
        ...         sizes = gate.d_model, gate.num_experts, gate.k
        ...         super().__init__(*sizes, num_counts=gate.num_experts)
        ...         self.gate = gate
        ...         self.register_buffer("share", torch.zeros(gate.num_experts))
        ...
        ...     def forward(self, x, ranks=None):
        ...         routing = self.gate(x, ranks)
        ...         self.count(routing.load)
        ...         return routing
        ...
        ...     def update(self, counts):
        ...         self.share.lerp_(counts / counts.sum().clamp_min(1), 0.01)

    A token counts once, whatever recomputes its forward pass: both kinds of
    `torch.utils.checkpoint.checkpoint` do. Floating-point buffers are at least float32, also after
    ``gate.bfloat16()`` and ``load_state_dict(..., assign=True)``: in half precision, small steps
    would round to zero.

    Args:
        d_model, num_experts, k: see `Gate`.
        num_counts: N, the number of counts; 0: the gate does not adapt.
        device: of the counts; None: torch's default.

    Attributes:
        tokens_since_update: [N] int64, the sum of the counts since the last update; None: the gate
            does not adapt. It is not in the state_dict.

    Raises:
        ValueError: a size is below 1, or k is not between 1 and num_experts.
    """

    tokens_since_update: Tensor | None = None

    def __init__(
        self, d_model: int, num_experts: int, k: int, *, num_counts: int, device: Device = None
    ) -> None:
        super().__init__(d_model, num_experts, k)
        if num_counts > 0:
            # Not a buffer: DistributedDataParallel would replace it by the counts of rank 0.
            self.tokens_since_update = _with_fixed_size(
                torch.zeros(num_counts, dtype=torch.int64, device=device)
            )

    def count(self, counts: Tensor) -> None:
        """Adds counts [N], whole numbers of any dtype, to tokens_since_update in training mode.

        The backward pass does not count, because it recomputes tokens that have counted already.
        """
        if self.training and self.tokens_since_update is not None:
            torch.ops.moe_ext._count_tokens_(self.tokens_since_update, counts)

    def update(self, counts: Tensor) -> None:
        """Adapts the state to counts [N] int64, the sum over all micro-batches and ranks.

        `update_gates` calls this method without gradients. The state must depend only on the ratios
        of the counts. If a layer has summed over some ranks already, all counts have grown by the
        same factor.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(counts)")

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Converts half-precision buffers, which assign=True leaves, to float32.

        assign=True also replaces the tensors of a gate on the meta device, but not the counts.
        """
        super()._load_from_state_dict(*arguments)
        for name, buffer in self.named_buffers(recurse=False):
            if _is_half(buffer):
                setattr(self, name, buffer.float())
            if self.tokens_since_update is not None and self.tokens_since_update.is_meta:
                self._move_counts(buffer.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the counts too, and keeps the buffers in at least float32."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self.get_buffer(name)
            if _is_half(new):
                setattr(self, name, old.to(new.device))
        if self.tokens_since_update is not None:
            self._move_counts(fn(self.tokens_since_update).device)
        return self

    def _move_counts(self, device: torch.device) -> None:
        """Moves the counts; those on the meta device have no values and start from zero."""
        counts = self.tokens_since_update
        assert counts is not None
        from_meta = counts.is_meta and device.type != "meta"
        self.tokens_since_update = _with_fixed_size(
            torch.zeros_like(counts, device=device) if from_meta else counts.to(device)
        )


def _with_fixed_size(counts: Tensor) -> Tensor:
    """Does what `torch._dynamo.mark_static` does, without the import of torch's compiler.

    A compiled graph then does not take the number of counts for a number of tokens that it equals.
    """
    counts._dynamo_static_indices = {0}  # type: ignore[attr-defined]
    return counts


def _is_half(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


def adaptive_gates(model: nn.Module) -> list[AdaptiveGate]:
    """Returns the gates of a model that `update_gates` updates: each `AdaptiveGate` with counts."""
    gates = [module for module in model.modules() if isinstance(module, AdaptiveGate)]
    return [gate for gate in gates if gate.tokens_since_update is not None]


@torch.no_grad()
def update_gates(model: nn.Module, process_group: ProcessGroup | DeviceMesh | None = None) -> None:
    """Adapts every gate of the model that adapts to the tokens of each optimizer step.

    Such gates are a `TopKGate` with bias_update_rate, a `ReLUGate` and each other
    `moe_ext.gates.AdaptiveGate` with counts. Call the function once in each optimizer step, on
    every rank, or let the optimizer call it::

        optimizer.register_step_post_hook(lambda *_: update_gates(model))

    Each gate adapts to the tokens that it has routed in training mode since the last update, over
    all micro-batches. Its counts then start again from zero.

    Args:
        model: a module with such gates.
        process_group: all ranks that train, or their mesh; None: only this rank. If a layer has
            summed over some ranks already, all counts grow by the same factor, which does not
            change the update. So always pass the ranks.

    Raises:
        ValueError: the model has no gate that adapts.
    """
    gates = adaptive_gates(model)
    rule = "contain a gate that adapts: a ReLUGate, or a TopKGate with bias_update_rate"
    require(len(gates) > 0, "update_gates: model", rule, type(model).__name__)
    counts = [cast(Tensor, gate.tokens_since_update) for gate in gates]
    totals = Layout.of(process_group, "update_gates").world.sum(*counts)
    for gate, count, total in zip(gates, counts, totals, strict=True):
        gate.update(total)
        count.zero_()
