"""The experts modules in a model of Hugging Face transformers, and the names of their weights."""

from torch import nn

from moe_ext._counting import is_of_transformers
from moe_ext.checks import require

__all__ = ["WEIGHT_NAMES", "experts_modules", "weight_names"]

WEIGHT_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def weight_names(has_gate: object) -> list[str]:
    """Returns the names of the weights of the two layers, for experts with a gate or without."""
    return ["gate_up_proj" if has_gate else "up_proj", "down_proj"]


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Finds the modules that hold the experts of each mixture layer of a transformers model.

    Such a module is called with hidden_states [T, D], top_k_index [T, K] and top_k_weights [T, K].
    Its class has the decorator ``use_experts_implementation`` of transformers 5.

    Returns:
        The modules by name, in the order of the model.

    Raises:
        ValueError: the model has no such module.
    """
    modules = {name: module for name, module in model.named_modules() if is_of_transformers(module)}
    rule = "have a module with the experts interface of transformers"
    require(bool(modules), "experts_modules: model", rule, type(model).__name__)
    return modules
