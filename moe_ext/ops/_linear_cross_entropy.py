"""The cross-entropy of a linear layer (App. C.1), without its logits in memory."""

from typing import Literal

import torch
from torch import Tensor

from moe_ext.ops._gradients import needs_gradient


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: Literal["none", "mean", "sum"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    recompute: bool = False,
) -> Tensor:
    """Computes the cross-entropy of the classes of a linear layer, such as the next words.

    With V classes, the logits l = input · linear_weightᵀ + linear_bias and ε = label_smoothing, the
    loss of token t is::

        lse_t  = ln Σ_v exp(l_tv)
        loss_t = lse_t - (1 - ε) · l_t,target - ε · mean_v(l_tv) + z_loss · lse_t²

    The arguments are those of ``torch.nn.functional.linear_cross_entropy``, with class indices as
    targets. The term with z_loss keeps the logits near 0 (PaLM, arXiv 2204.02311). With softcap,
    every logit l becomes c · tanh(l / c) (Gemma 2, arXiv 2408.00118).

    The [T, V] logits are never in memory on the CPU: a thread has at most 8 MB of them. If the loss
    is reduced, the forward pass also computes the required gradients, for three GEMMs in all (Liger
    Kernel, arXiv 2410.10989). The gradients stay in memory until the backward pass scales them.
    With reduction="none" or `recompute`, the backward pass recomputes the logits: four GEMMs. On
    the CPU, this also holds for over 38,000 float32 classes and more than min(D, 640) tokens.

    A token's loss and gradient do not depend on the other tokens, bit for bit.

    CUDA is experimental: no kernel has run on a GPU yet.

    Args:
        input: [T, D].
        linear_weight: [V, D].
        target: [T] int64, in [0, V) or ignore_index. On CUDA, the loss of another target is NaN.
        linear_bias: [V], or None. It may be float32 if the others have half precision.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none".
        ignore_index: the target of tokens without loss and gradient.
        label_smoothing: ε in [0, 1], the weight of the uniform distribution (arXiv 1512.00567).
        z_loss: the weight of the squared log-sum-exp.
        softcap: c > 0, or None.
        recompute: whether to save only the log-sum-exp for the backward pass. This saves the memory
            of the gradients between the two passes. Results agree to rounding.

    Returns:
        Scalar in nats, or [T] with reduction="none"; float32 for half-precision inputs. The mean of
        no tokens is NaN.

    Raises:
        ValueError, TypeError, IndexError: an argument has a wrong shape, dtype, device or value.
    """
    keeps = reduction != "none" and not recompute
    loss: Tensor
    loss, *_ = torch.ops.moe_ext.linear_cross_entropy(
        input,
        linear_weight,
        target,
        linear_bias,
        reduction,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        [keeps and needs_gradient(tensor) for tensor in (input, linear_weight, linear_bias)],
    )
    return loss
