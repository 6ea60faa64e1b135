"""The experts, Sections 2 and 3.2: feed-forward networks with stacked weights, or any modules."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ext import ops
from moe_ext.checks import is_whole, require, require_sizes
from moe_ext.ops.experts import ACTIVATIONS, GATED_ACTIVATIONS


def uniform_(weight: Tensor, fan_in: int, generator: torch.Generator | None = None) -> None:
    """Draws a weight anew, uniform with variance 1 / fan_in."""
    bound = math.sqrt(3 / fan_in)
    nn.init.uniform_(weight, -bound, bound, generator=generator)


class _FeedForward(NamedTuple):
    """Feed-forward experts as their tensors."""

    weights: Sequence[Tensor]
    biases: Sequence[Tensor]
    activation: str

    def __call__(self, x: Tensor, offsets: Tensor | None, **options: Any) -> Tensor:
        """See `FeedForwardExperts.forward`."""
        return ops.experts(
            x, self.weights, self.biases, self.activation, offsets=offsets, **options
        )


class FeedForwardExperts(nn.Module):
    """E feed-forward networks of one architecture, the weights of each layer in one tensor.

    Weights are uniform with variance 1 / fan_in, biases zero. Every expert is drawn by itself, from
    a seed that one draw of torch's generator and the expert's number make: experts that are spread
    over processes start as they would in one. `hidden_sizes=()` makes each expert a single matrix;
    `num_experts=1` is a dense feed-forward network.

    Args:
        num_experts: E, which may be 0 for a process without a share of the experts.
        d_model: D, the width of a row.
        hidden_sizes: the widths of the hidden layers.
        activation: one of `moe_ext.ops.ACTIVATIONS`; gated ones ("swiglu", …) take a matrix of
            twice the width.
        bias: whether the layers have biases (the paper's have none).
        d_output: width of an output row; None is d_model.
        dtype: of weights and biases, and so of what goes in; None is torch's default.
        first_expert: the number of the first of these experts among those of all processes.

    Raises:
        ValueError: a size is out of range, or there is no such activation.
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
        dtype: torch.dtype | None = None,
        first_expert: int = 0,
    ) -> None:
        super().__init__()
        require(
            isinstance(hidden_sizes, Sequence)
            and all(is_whole(width) and width >= 1 for width in hidden_sizes),
            "FeedForwardExperts: hidden_sizes",
            "be a sequence of whole numbers of at least 1",
            hidden_sizes,
        )
        d_output = d_model if d_output is None else d_output
        widths = [d_model, *hidden_sizes, d_output]
        require_sizes("FeedForwardExperts", d_model=d_model, d_output=d_output)
        require_sizes("FeedForwardExperts", 0, num_experts=num_experts, first_expert=first_expert)
        require(
            activation in ACTIVATIONS,
            "FeedForwardExperts: activation",
            f"be one of {', '.join(ACTIVATIONS)}",
            activation,
        )
        self.num_experts = num_experts
        self.d_model = d_model
        self.first_expert = first_expert
        self.activation = activation
        factor = 2 if activation in GATED_ACTIVATIONS else 1
        columns = [factor * width for width in hidden_sizes] + [d_output]
        self.weights = nn.ParameterList(
            torch.empty(num_experts, fan_in, width, dtype=dtype)
            for fan_in, width in zip(widths, columns, strict=False)
        )
        self.biases = (
            nn.ParameterList(torch.empty(num_experts, width, dtype=dtype) for width in columns)
            if bias
            else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        device = self.weights[0].device
        if device.type == "meta":
            return
        seed = int(torch.randint(2**31, (), device="cpu"))
        generator = torch.Generator(device)
        for e in range(self.num_experts):
            generator.manual_seed(seed + self.first_expert + e)
            for weight in self.weights:
                uniform_(weight.detach()[e], weight.shape[1], generator)
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
        network = _FeedForward(list(self.weights), list(self.biases or ()), self.activation)
        return network(
            x,
            offsets,
            inverse=inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
        )

    def split(self, sizes: Sequence[int]) -> list["_FeedForward"]:
        """The first sizes[0] experts, the next sizes[1], …: to be called as the whole is."""
        weights = zip(*(weight.split(sizes) for weight in self.weights), strict=True)
        biases = zip(*(bias.split(sizes) for bias in self.biases or ()), strict=True)
        return [
            _FeedForward(w, b, self.activation)
            for w, b in zip_longest(weights, biases, fillvalue=())
        ]

    def extra_repr(self) -> str:
        shapes = " -> ".join(str(weight.shape[1]) for weight in self.weights)
        d_output = self.weights[-1].shape[2]
        return f"{self.num_experts} x ({shapes} -> {d_output}), activation={self.activation}"


class ModuleExperts(nn.Module):
    """Any modules as experts, one after the other; they may differ in kind.

    Every module maps [n, D] to [n, d_output], of any floating type: the mixture is of x's. It is
    called in each forward pass, with n = 0 when no token chose it: so its parameters always have
    gradients. The split into experts needs the counts on the host, so that on CUDA the host waits
    for the device, and torch.compile breaks the graph.

    Args:
        modules: one module for each expert.

    Raises:
        ValueError: there is no module.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(modules)
        self.num_experts = len(self.experts)
        require(self.num_experts >= 1, "ModuleExperts: modules", "be at least one", "none")

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Rows x [R, D] grouped by expert, offsets [E + 1], to [R, d_output]."""
        bounds = pairwise(offsets.tolist())
        return torch.cat(
            [expert(x[a:b]) for expert, (a, b) in zip(self.experts, bounds, strict=True)]
        )

    def split(self, sizes: Sequence[int]) -> list["ModuleExperts"]:
        """The first sizes[0] experts, the next sizes[1], …; none may be 0."""
        modules = iter(self.experts)
        return [ModuleExperts(islice(modules, size)) for size in sizes]


def mixture(
    experts: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    gates: Tensor,
    plan: ops.DispatchPlan,
    token_offsets: Tensor | None = None,
    *,
    equal_load: bool = False,
    recompute: bool = False,
) -> Tensor:
    """Σ_i G(x)_i E_i(x) of the tokens' chosen experts (Eq. 1), [T, d_output].

    Args:
        experts: a module from rows [R, D] and offsets [E + 1] to [R, d_output].
        x: [T, D].
        gates: [T, K], or [R] with token_offsets.
        plan: of the chosen experts.
        token_offsets: see `moe_ext.ops.combine`.
        equal_load: every expert has R / E rows, so that the counts need not be read.
        recompute: keep nothing of the experts for the backward pass.
    """
    if isinstance(experts, FeedForwardExperts | _FeedForward):
        return experts(
            x,
            None if equal_load else plan.offsets,
            inverse=plan.inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
        )

    def in_steps(x: Tensor, gates: Tensor) -> Tensor:
        rows = experts(ops.dispatch(x, plan.inverse, token_offsets), plan.offsets)
        # What other processes make of theirs is of that type, too.
        return ops.combine(rows.to(x.dtype), gates, plan.inverse, token_offsets)

    if recompute:
        return checkpoint(in_steps, x, gates, use_reentrant=False)
    return in_steps(x, gates)
