"""The perplexity of a model on a text."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moe_ext.checks import require, require_tensor

__all__ = ["perplexity"]


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor) -> float:
    """Returns the perplexity of a model of transformers: the exponential of its mean cross-entropy.

    Each row is a text of its own, whose first token is not predicted. Rows are computed in
    sequence, in evaluation mode; afterwards, each module is in its earlier mode. Losses of the
    routers do not count.

    Args:
        model: the model.
        tokens: [rows, T] int64, such as ``tokenizer(text, return_tensors="pt").input_ids``.

    Raises:
        TypeError: tokens are not a tensor, or not int64.
        ValueError: tokens do not have two dimensions, a row, and two tokens in it.
    """
    require_tensor("perplexity", tokens=tokens)
    if tokens.dtype != torch.int64:
        raise TypeError(f"perplexity: tokens must have dtype torch.int64, got {tokens.dtype}")
    rule = "have the shape [rows, T] with at least one row of two tokens"
    shape = tuple(tokens.shape)
    valid = tokens.dim() == 2 and shape[0] > 0 and shape[1] > 1
    require(valid, "perplexity: tokens", rule, shape)
    modes = {module: module.training for module in model.modules()}
    losses = []
    try:
        model.eval()
        for row in tokens.split(1):
            logits = model(input_ids=row).logits[0, :-1].float()
            losses.append(float(cross_entropy(logits, row[0, 1:])))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return math.exp(math.fsum(losses) / len(losses))
