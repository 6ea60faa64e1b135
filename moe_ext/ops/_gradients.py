"""What an operator must know about gradients before it is called."""

import torch
from torch import Tensor, nn


def needs_gradient(*values: object) -> bool:
    """Returns whether a tensor among the values, or in a list of them, requires a gradient.

    Values of other types need none: the operator refuses them with its own error.
    """
    if not torch.is_grad_enabled():
        return False
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple, nn.ParameterList)):
            for item in value:
                if isinstance(item, Tensor) and item.requires_grad:
                    return True
    return False
