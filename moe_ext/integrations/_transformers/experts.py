"""The experts modules in a model of Hugging Face transformers, and their weights."""

from torch import Tensor, nn

from moe_ext._counting import is_of_transformers
from moe_ext.checks import require

__all__ = ["WEIGHT_NAMES", "by_inputs", "by_outputs", "experts_modules", "weight_names"]

WEIGHT_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def weight_names(has_gate: object) -> list[str]:
    """Returns the names of the weights of the two layers, for experts with a gate or without."""
    return ["gate_up_proj" if has_gate else "up_proj", "down_proj"]


def by_outputs(module: nn.Module, value: Tensor) -> Tensor:
    """Returns a weight of an experts module as [E, out, in]; a bias [E, out] stays as it is.

    The function is its own inverse.
    """
    return value.mT if module.is_transposed and value.dim() == 3 else value


def by_inputs(module: nn.Module, weight: Tensor) -> Tensor:
    """Returns a weight of an experts module as [E, in, out], as the operators take it."""
    return weight if module.is_transposed else weight.mT


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
