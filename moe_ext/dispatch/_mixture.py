"""Computes Eq. 1 after the gate, by one fused operator or by dispatch, experts and combine."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_ext import ops


def mixture(
    experts: Callable[..., Tensor],
    x: Tensor,
    gates: Tensor,
    plan: ops.DispatchPlan,
    token_offsets: Tensor | None = None,
    *,
    fused: bool,
    equal_load: bool = False,
    recompute: bool = False,
) -> Tensor:
    """Computes Σ_i G(x)_i E_i(x) over the chosen experts (Eq. 1), [T, d_output].

    Args:
        experts: an `Experts`, or a callable that `Experts.split` returned.
        x: [T, D], the tokens.
        gates: [T, K], or [R] with token_offsets. The weights of the chosen experts.
        plan: the dispatch plan of the routing decision.
        token_offsets: see `moe_ext.ops.combine`.
        fused: whether experts take the gates and the dispatch plan; see `Experts`.
        equal_load: whether every expert has R / E rows, so that plan.offsets is not needed.
        recompute: whether to recompute the experts in the backward pass and save no activations.
    """
    if fused:
        return experts(
            x,
            None if equal_load else plan.offsets,
            inverse=plan.inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
        )

    def in_steps(x: Tensor, gates: Tensor) -> Tensor:
        rows = experts(ops.dispatch(x, plan.inverse, token_offsets), plan.offsets)
        # Experts may return any dtype. The outputs of all ranks must have the same one.
        return ops.combine(rows.to(x.dtype), gates, plan.inverse, token_offsets)

    if recompute:
        y: Tensor = checkpoint(in_steps, x, gates, use_reentrant=False)
        return y
    return in_steps(x, gates)
