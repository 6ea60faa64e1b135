"""The gates' logits, and the checks of their sizes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from moe_ext import ops
from moe_ext.checks import is_whole, require, require_sizes


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x · weight, each row by itself: its bits do not depend on the other rows of the batch. (On
    CUDA they may: torch chooses another kernel for another number of rows.)"""
    return ops.experts(x, [weight.unsqueeze(0)])


def widened(x: Tensor) -> Tensor:
    """x in float32 at least: converted once for all matrices of a gate."""
    return x.to(ops.accumulation_dtype(x))


def logits(
    x: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor] = matmul
) -> Tensor:
    """x · weight in float32 at least, under autocast too: a threshold minus a logit cancels."""
    x = widened(x)
    wide = torch.promote_types(x.dtype, weight.dtype)
    # The meta device has no autocast and raises an error when asked for it.
    meta = x.device.type == "meta"
    with nullcontext() if meta else torch.autocast(x.device.type, enabled=False):
        return product(x.to(wide), weight.to(wide))


def require_k_of_levels(
    owner: str,
    k: int | tuple[int, int],
    d_model: int,
    num_groups: int,
    experts_per_group: int,
) -> tuple[int, int]:
    """Checks the sizes of a gate of two levels and returns (k1, k2); one number is both.

    Raises:
        ValueError: a size is below 1, k1 is not between 1 and num_groups, or k2 not between 1 and
            experts_per_group.
    """
    sizes = {"num_groups": num_groups, "experts_per_group": experts_per_group}
    require_sizes(owner, d_model=d_model, **sizes)
    k1, k2 = k if isinstance(k, Sequence) and len(k) == 2 else (k, k)
    require(is_whole(k1) and is_whole(k2), f"{owner}: k", "be a whole number or a pair of them", k)
    for level, chosen, choices, limit in (
        ("first", k1, num_groups, "num_groups"),
        ("second", k2, experts_per_group, "experts_per_group"),
    ):
        rule = f"be between 1 and {limit} = {choices} at the {level} level"
        require(1 <= chosen <= choices, f"{owner}: k", rule, k)
    return k1, k2
