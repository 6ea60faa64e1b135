"""A model's parameters by the optimizer that suits them."""

from typing import NamedTuple

from torch import nn

from moe_ext.experts import FeedForwardExperts
from moe_ext.gates import balanced_gates

__all__ = ["ParameterSplit", "split_parameters"]


class ParameterSplit(NamedTuple):
    """The parameters of a model, each in one of the lists, in the model's order.

    Attributes:
        experts: the experts' matrices [E, D, F], which App. D factors: the `weights` of every
            FeedForwardExperts. Their biases belong to the rest: [E, F] is no matrix.
        thresholds: of the strictly balanced gates (App. F): their parameters whose name begins with
            "threshold". They are on the scale of a softmax over the experts, and may want a rate of
            their own.
        rest: all others.
    """

    experts: list[nn.Parameter]
    thresholds: list[nn.Parameter]
    rest: list[nn.Parameter]


def split_parameters(model: nn.Module) -> ParameterSplit:
    """The experts' matrices, the gates' thresholds and the rest of a model's parameters.

    Example:
        >>> split = split_parameters(MoE(8, num_experts=4, k=2))
        >>> [len(part) for part in split]  # two matrices of all experts, W_g and W_noise
        [2, 0, 2]
    """
    experts, thresholds = set(), set()
    for module in model.modules():
        if isinstance(module, FeedForwardExperts):
            # Not module.weights: a parametrized weight is computed from a parameter.
            experts |= {param for param in module.parameters() if param.dim() == 3}
    for gate in balanced_gates(model):
        for name, param in gate.named_parameters():
            if name.startswith("threshold"):
                thresholds.add(param)
    split = ParameterSplit([], [], [])
    for param in model.parameters():
        if param in experts:
            split.experts.append(param)
        elif param in thresholds:
            split.thresholds.append(param)
        else:
            split.rest.append(param)
    return split
