"""The MoE layers of known models, by the name of the model.

Each function returns a `MoE` with the gate, the activation, the biases and the sizes of the model.
Every size has the value of the released model as its default. The other options are those of `MoE`,
such as process_group, recompute and losses. A layer has no balancing loss unless you give one, by
w_importance and w_load or by losses.

    >>> from moe_ext import presets
    >>> layer = presets.qwen3_moe(d_model=64, d_hidden=32, num_experts=16, k=4)
    >>> y, aux = layer(torch.randn(10, 64))

A layer of full size may need more memory than there is. Make it under ``torch.device("meta")`` to
look at its shapes.

The names of the weights differ from those of transformers' modules::

    gate.w_gate               weight.T of the router
    gate.b_gate               bias of the router, gpt-oss only
    gate.selection_bias       e_score_correction_bias, DeepSeek-V3 only
    experts.weight_0          gate_up_proj.mT; as it is for gpt-oss
    experts.weight_1          down_proj.mT; as it is for gpt-oss
    experts.bias_0, bias_1    gate_up_proj_bias, down_proj_bias, gpt-oss only

    shared_expert.expert.weight_0    cat([gate_proj, up_proj]).T[None] of the shared expert
    shared_expert.expert.weight_1    down_proj.T[None] of the shared expert

Only DeepSeek-V3 has a shared expert.
"""

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch.types import Device

from moe_ext._argument_names import accepts_top_k
from moe_ext._capacity import Capacity
from moe_ext.checks import require_sizes
from moe_ext.gates import TopKGate
from moe_ext.moe import MoE, _CommonOptions
from moe_ext.ops import Activation
from moe_ext.shared import SharedExpert

__all__ = ["deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"]


class _LayerOptions(_CommonOptions, total=False):
    """The options of `MoE` that the model does not decide."""

    capacity: Capacity | float | None


class _Factory(TypedDict, total=False):
    device: Device
    dtype: torch.dtype | None


def _factory(options: _LayerOptions) -> _Factory:
    """Returns the options with which parameters are made."""
    return {"device": options.get("device"), "dtype": options.get("dtype")}


def _layer(
    gate: TopKGate,
    d_hidden: int,
    options: _LayerOptions,
    activation: Activation = "swiglu",
    activation_args: Sequence[float] | None = None,
    bias: bool = False,
    shared_expert: SharedExpert | None = None,
) -> MoE:
    if options.get("w_importance") is None:
        options["w_importance"] = 0.0
    if options.get("w_load") is None:
        options["w_load"] = 0.0
    return MoE(
        gate.d_model,
        gate.num_experts,
        gate.k,
        hidden_sizes=(d_hidden,),
        activation=activation,
        activation_args=activation_args,
        bias=bias,
        gate=gate,
        shared_expert=shared_expert,
        **options,
    )


@accepts_top_k
def deepseek_v3(
    d_model: int = 7168,
    d_hidden: int = 2048,
    num_experts: int = 256,
    k: int = 8,
    *,
    num_shared_experts: int = 1,
    num_groups: int = 8,
    groups_per_token: int = 4,
    scale: float = 2.5,
    bias_update_rate: float = 1e-3,
    **options: Unpack[_LayerOptions],
) -> MoE:
    """Makes the layer of DeepSeek-V3 (arXiv 2412.19437).

    The scores are sigmoids. A selection bias balances the experts; `update_gates` updates it. A
    token selects in its groups_per_token best groups. The gates are renormalized and scaled. The
    experts are SwiGLU networks. A shared expert of width num_shared_experts · d_hidden processes
    every token.

    Args:
        d_model: D, the width of x.
        d_hidden: the hidden width of an expert.
        num_experts: E, the number of routed experts.
        k: routed experts per token.
        num_shared_experts: 0: no shared expert.
        num_groups, groups_per_token, scale, bias_update_rate: see `TopKGate`.
        options: see `MoE`.

    Raises:
        ValueError, TypeError: see `MoE` and `TopKGate`.
    """
    (num_shared_experts,) = require_sizes("deepseek_v3", 0, num_shared_experts=num_shared_experts)
    gate = TopKGate(
        d_model,
        num_experts,
        k,
        score="sigmoid",
        scale=scale,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        bias_update_rate=bias_update_rate,
        **_factory(options),
    )
    shared_expert = None
    if num_shared_experts:
        shared_expert = SharedExpert(
            d_model,
            (num_shared_experts * d_hidden,),
            activation="swiglu",
            device=options.get("device"),
            dtype=options.get("expert_dtype") or options.get("dtype"),
            recompute=options.get("recompute", False),
        )
    return _layer(gate, d_hidden, options, shared_expert=shared_expert)


@accepts_top_k
def mixtral(
    d_model: int = 4096,
    d_hidden: int = 14336,
    num_experts: int = 8,
    k: int = 2,
    **options: Unpack[_LayerOptions],
) -> MoE:
    """Makes the layer of Mixtral 8x7B (arXiv 2401.04088).

    The gates are the softmax over the chosen logits. The experts are SwiGLU networks.

    Args:
        d_model: D, the width of x.
        d_hidden: the hidden width of an expert.
        num_experts: E, the number of experts.
        k: experts per token.
        options: see `MoE`.

    Raises:
        ValueError, TypeError: see `MoE` and `TopKGate`.
    """
    return _layer(TopKGate(d_model, num_experts, k, **_factory(options)), d_hidden, options)


@accepts_top_k
def qwen3_moe(
    d_model: int = 2048,
    d_hidden: int = 768,
    num_experts: int = 128,
    k: int = 8,
    **options: Unpack[_LayerOptions],
) -> MoE:
    """Makes the layer of Qwen3-30B-A3B (arXiv 2505.09388).

    The gates are softmax scores, renormalized over the chosen experts (norm_topk_prob=True). The
    experts are SwiGLU networks.

    Args:
        d_model: D, the width of x.
        d_hidden: the hidden width of an expert.
        num_experts: E, the number of experts.
        k: experts per token.
        options: see `MoE`.

    Raises:
        ValueError, TypeError: see `MoE` and `TopKGate`.
    """
    return _layer(TopKGate(d_model, num_experts, k, **_factory(options)), d_hidden, options)


@accepts_top_k
def olmoe(
    d_model: int = 2048,
    d_hidden: int = 1024,
    num_experts: int = 64,
    k: int = 8,
    **options: Unpack[_LayerOptions],
) -> MoE:
    """Makes the layer of OLMoE-1B-7B (arXiv 2409.02060).

    The gates are the softmax scores over all experts, not renormalized (norm_topk_prob=False). The
    experts are SwiGLU networks.

    Args:
        d_model: D, the width of x.
        d_hidden: the hidden width of an expert.
        num_experts: E, the number of experts.
        k: experts per token.
        options: see `MoE`.

    Raises:
        ValueError, TypeError: see `MoE` and `TopKGate`.
    """
    return _layer(
        TopKGate(d_model, num_experts, k, renormalize=False, **_factory(options)), d_hidden, options
    )


@accepts_top_k
def gpt_oss(
    d_model: int = 2880,
    d_hidden: int = 2880,
    num_experts: int = 128,
    k: int = 4,
    *,
    limit: float = 7.0,
    alpha: float = 1.702,
    **options: Unpack[_LayerOptions],
) -> MoE:
    """Makes the layer of gpt-oss-120b (arXiv 2508.10925); gpt-oss-20b has num_experts=32.

    The logits have a bias. The gates are the softmax over the chosen logits. The experts have
    biases and the clamped SwiGLU with interleaved columns of `moe_ext.ops.experts`.

    Args:
        d_model: D, the width of x.
        d_hidden: the hidden width of an expert.
        num_experts: E, the number of experts.
        k: experts per token.
        limit, alpha: the numbers of the clamped SwiGLU; its offset is 1.
        options: see `MoE`.

    Raises:
        ValueError, TypeError: see `MoE` and `TopKGate`.
    """
    gate = TopKGate(d_model, num_experts, k, logit_bias=True, **_factory(options))
    args = (limit, alpha, 1.0)
    return _layer(gate, d_hidden, options, "interleaved_clamped_swiglu", args, bias=True)
