"""What transformers knows about a model with packed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moe_ext.integrations._packed.checkpoint import Checkpoint
from moe_ext.integrations._packed.experts import PackedExperts
from moe_ext.integrations._packed.linear import PackedLinear

__all__ = ["PackedConfig", "PackedQuantizer"]


@register_quantization_config("moe_ext")
class PackedConfig(QuantizationConfigMixin):
    """Names the experts modules and linear layers that transformers' loader leaves out."""

    def __init__(self, experts: Sequence[str] = (), linear: Sequence[str] = ()) -> None:
        self.quant_method = "moe_ext"  # type: ignore[assignment]
        self.experts = experts
        self.linear = linear


@register_quantizer("moe_ext")
class PackedQuantizer(HfQuantizer):
    """Tells transformers what it can do with a model that has packed experts.

    Attributes:
        checkpoint: the checkpoint of `load`; None for other models. The packed experts that it does
            not have are those of `quantize_experts`.
        dtype: the dtype in which `load` read the weights outside the experts.
        fallbacks: the reason for each experts module that is not packed.
        unused: the tensors of the checkpoint that the model does not have.
    """

    checkpoint: Checkpoint | None = None
    dtype: torch.dtype = torch.bfloat16
    quantization_config: PackedConfig

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.fallbacks: dict[str, str] = {}
        self.unused: list[str] = []

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for name in self.quantization_config.experts:
            model.set_submodule(name, PackedExperts(model.get_submodule(name)))
        for name in self.quantization_config.linear:
            model.set_submodule(name, PackedLinear(model.get_submodule(name)))
        return model

    def is_serializable(self) -> bool:
        """Returns False: `save` writes the model."""
        transformers.utils.logging.get_logger("transformers").warning(
            "save_pretrained: the model has packed experts; call "
            "moe_ext.integrations.transformers.save(model, folder)"
        )
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters and dense weights can be trained."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether `Trainer` accepts the model without an adapter of PEFT."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` supports the model."""
        return True
