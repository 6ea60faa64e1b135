"""Attention of transformers, faster for one new token on a CPU."""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

__all__ = ["GROUPED_MODELS", "attention_forward"]

# The types of the models that use `attention_forward` after `load`. Some other models compare the
# name of the implementation with "sdpa", and then compute something else for another name.
GROUPED_MODELS = ("mixtral", "qwen2_moe", "qwen3_moe")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Computes the attention of a module of transformers: ``attn_implementation="moe_ext"``.

    The function is transformers' "sdpa", except for one query token whose heads share keys and
    values. The heads of a group then become the query tokens of one head. On a CPU, torch reads the
    keys and values once for each query head otherwise, and in bfloat16 converts them each time.

    Args:
        module: the attention module.
        query: [B, H, T, D].
        key: [B, G, S, D], where G divides H.
        value: [B, G, S, V].
        attention_mask: [B or 1, H or 1, T, S], or None for a causal mask.
        dropout: the probability of dropout.
        scaling: the factor of the scores; None: 1 / √D.
        options: arguments of "sdpa".

    Returns:
        [B, T, H, V], and None for the weights.

    Raises:
        ValueError: the module has attention sinks, which "sdpa" would ignore.
    """
    if options.get("s_aux") is not None:
        raise ValueError(
            "attn_implementation='moe_ext': the attention must have no sinks, got "
            f"{type(module).__name__}; use 'eager'"
        )
    batch, heads, tokens, _ = query.shape
    groups = key.shape[1]
    plain = all(options.get(name) is None for name in ("position_bias", "softcap", "cache"))
    shared = attention_mask is None or attention_mask.shape[1] == 1
    if not (tokens == 1 and groups < heads and plain and shared):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    y = scaled_dot_product_attention(
        query.reshape(batch, groups, heads // groups, -1),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return y.reshape(batch, 1, heads, -1), None


ALL_ATTENTION_FUNCTIONS.register("moe_ext", attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register("moe_ext", sdpa_mask)
