"""The mixture of the chosen experts' outputs, Eq. 1, as one operator or in three steps."""

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
    """Σ_i G(x)_i E_i(x) of the tokens' chosen experts (Eq. 1), [T, d_output].

    Args:
        experts: see `Experts`; or some of them, as its `split` returns them.
        x: [T, D].
        gates: [T, K], or [R] with token_offsets.
        plan: of the chosen experts.
        token_offsets: see `moe_ext.ops.combine`.
        fused: whether experts take the gates and the plan too, see `Experts`.
        equal_load: every expert has R / E rows, so that the counts need not be read.
        recompute: keep nothing of the experts for the backward pass.
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
        # What other ranks make of theirs is of that type, too.
        return ops.combine(rows.to(x.dtype), gates, plan.inverse, token_offsets)

    if recompute:
        return checkpoint(in_steps, x, gates, use_reentrant=False)
    return in_steps(x, gates)
