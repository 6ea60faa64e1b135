"""The experts, Sections 2 and 3.2: feed-forward networks with stacked weights, or any modules."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext.checks import require
from moe_ext.ops.experts import ACTIVATIONS, GATED_ACTIVATIONS


class FeedForwardExperts(nn.Module):
    """E feed-forward networks of one architecture, the weights of each layer in one tensor.

    Weights are uniform with variance 1 / fan_in, biases zero. `hidden_sizes=()` makes each expert a
    single matrix; `num_experts=1` is a dense feed-forward network.

    Args:
        num_experts: E.
        d_model: D, the width of a row.
        hidden_sizes: the widths of the hidden layers.
        activation: a key of `moe_ext.ops.ACTIVATIONS`; gated ones ("swiglu", …) take a matrix of
            twice the width.
        bias: whether the layers have biases (the paper's have none).
        d_output: width of an output row; None is d_model.

    Raises:
        ValueError: a size is below 1, or there is no such activation.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        hidden_sizes: Sequence[int] = (),
        *,
        activation: str = "relu",
        bias: bool = False,
        d_output: int | None = None,
    ) -> None:
        super().__init__()
        d_output = d_model if d_output is None else d_output
        widths = [d_model, *hidden_sizes, d_output]
        if min(num_experts, *widths) < 1:
            raise ValueError(
                "FeedForwardExperts: num_experts, d_model, hidden_sizes and d_output must be at "
                f"least 1, got {num_experts}, {d_model}, {list(hidden_sizes)} and {d_output}"
            )
        require(
            activation in ACTIVATIONS,
            "FeedForwardExperts: activation",
            f"be one of {', '.join(sorted(ACTIVATIONS))}",
            activation,
        )
        self.num_experts = num_experts
        self.activation = activation
        factor = 2 if activation in GATED_ACTIVATIONS else 1
        columns = [factor * width for width in hidden_sizes] + [d_output]
        self.weights = nn.ParameterList(
            torch.empty(num_experts, fan_in, width)
            for fan_in, width in zip(widths, columns, strict=False)
        )
        self.biases = (
            nn.ParameterList(torch.empty(num_experts, width) for width in columns) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weights:
            bound = math.sqrt(3 / weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)
        for bias in self.biases or ():
            nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None,
        *,
        inverse: Tensor | None = None,
        gates: Tensor | None = None,
        token_offsets: Tensor | None = None,
        recompute: bool = False,
    ) -> Tensor:
        """Rows x [R, D] grouped by expert, offsets [E + 1], to [R, d_output].

        Or, with the further arguments of `moe_ext.ops.experts`, tokens x [T, D] to the mixture
        [T, d_output].
        """
        return ops.experts(
            x,
            list(self.weights),
            None if self.biases is None else list(self.biases),
            self.activation,
            offsets=offsets,
            inverse=inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
        )

    def extra_repr(self) -> str:
        shapes = " -> ".join(str(weight.shape[1]) for weight in self.weights)
        d_output = self.weights[-1].shape[2]
        return f"{self.num_experts} x ({shapes} -> {d_output}), activation={self.activation}"


class ModuleExperts(nn.Module):
    """Any modules as experts, one after the other; they may differ in kind.

    Every module maps [n, D] to [n, d_output] and is called in each forward pass, with n = 0 when no
    token chose it: so its parameters always have gradients. The split into experts needs the counts
    on the host, so that on CUDA the host waits for the device, and torch.compile breaks the graph.

    Args:
        modules: one module for each expert.

    Raises:
        ValueError: there is no module.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(modules)
        if len(self.experts) == 0:
            raise ValueError("ModuleExperts: modules must be at least one, got none")
        self.num_experts = len(self.experts)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, D] grouped by expert, offsets [E + 1], to [R, d_output]."""
        bounds = pairwise(offsets.tolist())
        return torch.cat(
            [expert(rows[a:b]) for expert, (a, b) in zip(self.experts, bounds, strict=True)]
        )
