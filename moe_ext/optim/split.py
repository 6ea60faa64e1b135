"""Splits the parameters of a model by the optimizer that suits them."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_ext.experts import FeedForwardExperts
from moe_ext.gates import balanced_gates

__all__ = ["ParameterSplit", "split_parameters"]


class ParameterSplit(NamedTuple):
    """Holds the parameters of a model in three disjoint lists, each in the model's order.

    Attributes:
        experts: the weight matrices [E, D, F] of every `FeedForwardExperts`, which Appendix D
            factors. Biases [E, F] are in rest, because they are not matrices. So are DTensors: the
            experts after `moe_ext.distributed.distribute_experts`, and the matrices of a shared
            expert that FSDP has divided between the ranks.
        thresholds: the thresholds of strictly balanced gates (App. F). They have the scale of a
            softmax over the experts and may need a separate learning rate.
        rest: all other parameters.
    """

    experts: list[nn.Parameter]
    thresholds: list[nn.Parameter]
    rest: list[nn.Parameter]


def _are_matrices(param: Tensor) -> bool:
    return param.dim() == 3 and not isinstance(param, DTensor)


def split_parameters(model: nn.Module) -> ParameterSplit:
    """Splits a model's parameters into expert matrices, gate thresholds and the rest.

    Example:
        >>> split = split_parameters(MoE(8, num_experts=4, k=2))
        >>> [len(part) for part in split]  # weight_0 and weight_1; none; W_g and W_noise
        [2, 0, 2]
    """
    experts, thresholds = set(), set()
    for module in model.modules():
        if isinstance(module, FeedForwardExperts):
            # Not module.weights: a parametrized weight is not itself a parameter.
            experts |= {param for param in module.parameters() if _are_matrices(param)}
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
