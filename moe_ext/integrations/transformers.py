"""The experts of Hugging Face transformers on the operators of moe_ext.

``import moe_ext.integrations.transformers`` registers the experts implementation "moe_ext". A model
uses it in one of two ways::

    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moe_ext")
    model.set_experts_implementation("moe_ext")

The attention implementation "moe_ext" is transformers' "sdpa", faster for one new token on a CPU.

The import also registers expert parallelism: ``ep_implementation="moe_ext"`` and the style
"moe_ext_experts" of ``ep_plan``, for any number of experts.

The parameters stay as they are: the names, shapes and values of a checkpoint do not change. Modules
that the operators cannot compute use transformers' own implementation, with one warning for each
class and reason.
"""

import inspect

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ext import _build, ops
from moe_ext._ragged import offsets_of
from moe_ext.integrations._transformers.balance import LayerBalance, ModelBalance, balance
from moe_ext.integrations._transformers.experts import by_inputs, experts_modules, weight_names
from moe_ext.integrations._transformers.given_lora import formed_lora, forms_needlessly, given_pairs
from moe_ext.integrations._transformers.warnings import warn_once

try:
    from transformers.distributed.expert_parallel import EPImplementationInterface
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    from moe_ext.integrations._packed.describe import describe
    from moe_ext.integrations._packed.experts import PackedExperts
    from moe_ext.integrations._packed.linear import PackedLinear
    from moe_ext.integrations._packed.load import load
    from moe_ext.integrations._packed.memory_plan import MemoryPlan, memory_plan
    from moe_ext.integrations._packed.perplexity import perplexity
    from moe_ext.integrations._packed.quantize_experts import quantize_experts
    from moe_ext.integrations._packed.save import save
    from moe_ext.integrations._transformers.activation import activation_of
    from moe_ext.integrations._transformers.attention import attention_forward
    from moe_ext.integrations._transformers.callback import CollapseCallback
    from moe_ext.integrations._transformers.parallel import ExchangeParallel, UnevenShard
except ImportError as _error:
    raise ImportError(
        "moe_ext.integrations.transformers needs transformers.integrations.moe: "
        "pip install 'transformers>=5.23'"
    ) from _error

__all__ = [
    "TESTED_VERSIONS",
    "CollapseCallback",
    "LayerBalance",
    "MemoryPlan",
    "ModelBalance",
    "PackedExperts",
    "PackedLinear",
    "attention_forward",
    "balance",
    "describe",
    "experts_forward",
    "experts_modules",
    "load",
    "memory_plan",
    "perplexity",
    "quantize_experts",
    "save",
]

TESTED_VERSIONS: tuple[str, ...] = ("5.23.0", "5.24.0")
"""The versions of transformers that the tests ran with."""

_FEW_ROWS = 8  # for each expert; a cast of the weights takes longer than the experts of so few
_REMEDY = "import moe_ext.integrations.peft, which gives A and B to the operator"
_DEVICES = ["cpu", "meta", *(["cuda"] if _build.cuda_version() else [])]
_DTYPES = [f"torch.{name}" for name in ("float64", "float32", "float16", "bfloat16")]


def experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Computes an experts module of transformers with `moe_ext.ops.experts` (Eq. 1).

    transformers calls this function as the forward method of each experts module of a model with
    ``experts_implementation="moe_ext"``.

    The function passes the parameters to the operator without a copy. It reads the flags that
    transformers sets on a module: has_gate, has_bias, is_transposed and has_post_expert_norm. The
    activation is recognised by its values: the module's gate and the operator's activations must
    agree on a set of random numbers. With expert parallelism, slots with an index of E or more
    belong to other ranks. They are skipped, and the gradient of their weights is 0.

    Autocast applies to the parameters and to hidden_states. Without autocast, hidden_states is
    converted to the dtype of the parameters. Under ``torch.compile``, or inside the module
    act_fn, a later change of the activation has no effect.

    Args:
        module: the experts module, from a class with transformers' decorator
            ``use_experts_implementation``.
        hidden_states: x [T, D].
        top_k_index: [T, K] int64 or int32, the experts of each token.
        top_k_weights: [T, K], the weight of each expert, in any floating-point dtype.

    Returns:
        [T, D], in the dtype of hidden_states.

    Warns:
        UserWarning: the operator cannot compute this module; the warning names the reason.
            The module then uses transformers' "grouped_mm", or "eager" in float64. Or autocast
            casts the weights of all experts for a few tokens, without gradients. There is one
            warning for each class and reason.
    """
    activation = activation_of(module)
    if isinstance(activation, str):
        return _fall_back(activation, module, hidden_states, top_k_index, top_k_weights)
    weights, biases = _parameters_of(module)
    if forms_needlessly(module):
        warn_once(f"PEFT forms W + B A of all experts in each call: {_REMEDY}")
    reason = _refusal(module, [*weights, *biases])
    if reason is not None:
        return _fall_back(reason, module, hidden_states, top_k_index, top_k_weights)
    _warn_of_casts(module, weights, top_k_index)
    weights = [by_inputs(module, weight) for weight in weights]
    num_experts = weights[0].shape[0]
    expert_index, gates, token_offsets = top_k_index.long(), top_k_weights, None
    if module._is_expert_parallel:
        is_local = expert_index < num_experts
        token_offsets = offsets_of(is_local.sum(1))
        expert_index, gates = expert_index[is_local], gates[is_local]
    plan = ops.dispatch_plan(expert_index, num_experts)
    norm = module.get_submodule("post_expert_norm") if module.has_post_expert_norm else None
    y = ops.experts(
        hidden_states.to(weights[0].dtype),
        weights,
        biases,
        activation.name,
        activation_args=activation.args,
        offsets=plan.offsets,
        inverse=plan.inverse,
        gates=gates if norm is None else None,
        token_offsets=token_offsets,
        lora=given_pairs(module, weight_names(module.has_gate)),
    )
    if norm is not None:
        y = ops.combine(norm(y), gates, plan.inverse, token_offsets)
    return y.to(hidden_states.dtype)


def _warn_of_casts(module: nn.Module, weights: list[Tensor], index: Tensor) -> None:
    """Warns once if autocast casts all weights for few rows, as in each step of a generation."""
    device = weights[0].device.type
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if not torch.is_autocast_enabled(device):
        return
    dtype = torch.get_autocast_dtype(device)
    few = index.numel() <= _FEW_ROWS * weights[0].shape[0]
    if few and weights[0].dtype == torch.float32 != dtype:
        warn_once(
            f"experts_implementation='moe_ext': autocast casts the weights of all experts of "
            f"{type(module).__name__} in each call, which takes longer than the experts of a few "
            f"tokens; to generate, use model.to({dtype}) without autocast"
        )


def _parameters_of(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the weights of the two layers as the module has them, and the biases [E, columns]."""
    names = weight_names(module.has_gate)
    weights = [getattr(module, name) for name in names]
    return weights, [getattr(module, f"{name}_bias") for name in names] if module.has_bias else []


def _refusal(module: nn.Module, parameters: list[Tensor]) -> str | None:
    """Returns why the operator cannot compute the module in its present state; None if it can."""
    for parameter in parameters:
        if _is_quantized(parameter):
            return f"its parameters are of the class {type(parameter).__name__}"
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if len(dtypes) > 1 or dtypes[0] not in _DTYPES:
        choices = ", ".join(_DTYPES)
        return f"its parameters must have one dtype of {choices}, got {', '.join(dtypes)}"
    device = parameters[0].device.type
    if device not in _DEVICES:
        return f"its device must be one of {', '.join(_DEVICES)} in this build, got {device}"
    if module._is_expert_parallel and torch.compiler.is_compiling():
        return "torch.compile does not support its number of slots with expert parallelism"
    return None


def _is_quantized(parameter: Tensor) -> bool:
    """Returns whether a parameter wraps other tensors, as those of torchao do."""
    return is_traceable_wrapper_subclass(parameter) and not isinstance(parameter, DTensor)


def _fp8_experts_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Falls back to transformers, which has another registry for the experts of FP8 models."""
    reason, functions = "its parameters are FP8; load keeps them packed", ALL_FP8_EXPERTS_FUNCTIONS
    return _fall_back(reason, module, hidden_states, top_k_index, top_k_weights, functions)


def _fall_back(
    reason: str,
    module: nn.Module,
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    functions: ExpertsInterface = ALL_EXPERTS_FUNCTIONS,
) -> Tensor:
    """Warns once and computes the module with transformers' own implementation."""
    # grouped_mm supports neither float64, nor FP8 activations with a static scale, nor all classes
    # of torchao.
    eager_only = (
        hidden_states.dtype == torch.float64
        or getattr(module, "activation_scheme", None) == "static"
        or any(map(_is_quantized, module.parameters()))
    )
    name = "eager" if eager_only else "grouped_mm"
    warn_once(f"experts_implementation='moe_ext': {type(module).__name__} uses '{name}': {reason}")
    eager = inspect.unwrap(type(module).forward)
    forward = functions.get_interface(name, eager)
    with formed_lora(module):
        y: Tensor = forward(module, hidden_states, index, weights)
    return y


ALL_EXPERTS_FUNCTIONS.register("moe_ext", experts_forward)
ALL_FP8_EXPERTS_FUNCTIONS.register("moe_ext", _fp8_experts_forward)
EPImplementationInterface.register("moe_ext", ExchangeParallel)
ALL_PARALLEL_STYLES["moe_ext_experts"] = UnevenShard()
