"""Low-rank adapters of frozen experts (LoRA, arXiv 2106.09685).

Contents::

    LoRAExperts    experts with adapters, each a LoRAAdapter
    add_lora       replaces the experts of a model; the other functions act on such a model
"""

from moe_ext.lora.experts import LoRAAdapter, LoRAExperts
from moe_ext.lora.models import (
    LoRAReport,
    add_lora,
    disable_lora,
    lora_experts,
    lora_state_dict,
    merge_lora,
)

__all__ = [
    "LoRAAdapter",
    "LoRAExperts",
    "LoRAReport",
    "add_lora",
    "disable_lora",
    "lora_experts",
    "lora_state_dict",
    "merge_lora",
]
