"""The experts, Sections 2 and 3.2: feed-forward networks with stacked weights, or any modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from moe_ext import ops
from moe_ext._former_names import current_names
from moe_ext.checks import is_whole, require, require_sizes
from moe_ext.ops import ACTIVATIONS, GATED_ACTIVATIONS, Activation

__all__ = ["Experts", "FeedForwardExperts", "ModuleExperts", "uniform_"]


_Part = Callable[..., Tensor]  # some of the experts, called as all of them are


def uniform_(weight: Tensor, fan_in: int, generator: torch.Generator | None = None) -> None:
    """Fills a weight with uniform draws of variance 1 / fan_in."""
    bound = math.sqrt(3 / fan_in)
    nn.init.uniform_(weight, -bound, bound, generator=generator)


class Experts(nn.Module):
    """Networks that each process their own rows: what `MoE` asks of experts.

    Derive experts of your own from this class. Call ``super().__init__(num_experts, d_model,
    d_output)`` and define `forward`:

        >>> class ScaleExperts(Experts):
        ...     def __init__(self, num_experts, d_model):
        ...         super().__init__(num_experts, d_model)
        ...         self.scale = torch.nn.Parameter(torch.ones(num_experts, d_model))
        ...
        ...     def forward(self, x, offsets):
        ...         rows = torch.repeat_interleave(offsets.diff(), output_size=len(x))
        ...         return x * self.scale[rows]

    Several ranks share such experts when every parameter and buffer has a row for each expert.

    Args:
        num_experts: E; on several ranks the number of this rank's experts, which may be 0.
        d_model: D, the width of a row; None: any.
        d_output: the width of an output row; None: d_model.

    Attributes:
        num_experts, d_model, d_output: as given.
        fused: whether `forward` also takes tokens, gates and the plan, and returns the mixture, as
            `FeedForwardExperts.forward` does.
        can_split: whether `split` works, which an exchange in chunks needs. What it returns is
            fused if the experts are.
    """

    fused: ClassVar[bool] = False
    can_split: ClassVar[bool] = False

    def __init__(self, num_experts: int, d_model: int | None, d_output: int | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        require_sizes(name, 0, num_experts=num_experts)
        for size, width in (("d_model", d_model), ("d_output", d_output)):
            if width is not None:
                require_sizes(name, **{size: width})
        self.num_experts = num_experts
        self.d_model = d_model
        self.d_output = d_model if d_output is None else d_output

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Maps rows to output rows.

        Args:
            x: [R, D], grouped by expert.
            offsets: [E + 1] int64; expert e has the rows offsets[e] <= r < offsets[e + 1]. With
                fused = True also None: every expert has R / E rows.

        Returns:
            [R, d_output].
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, offsets)")

    if TYPE_CHECKING:
        __call__: _Part  # fused experts take more arguments

    def split(self, sizes: Sequence[int]) -> Sequence[_Part]:
        """The first sizes[0] experts, the next sizes[1], …; each is called as the whole is."""
        raise NotImplementedError(f"{type(self).__name__} does not define split(sizes)")


class FeedForwardExperts(Experts):
    """E feed-forward networks of one architecture, the weights of each layer in one tensor.

    Weights are uniform with variance 1 / fan_in, biases zero. Every expert is drawn by itself, from
    a seed that one draw of torch's generator and the expert's number make: experts that are spread
    over ranks start as they would in one. `hidden_sizes=()` makes each expert a single matrix;
    `num_experts=1` is a dense feed-forward network.

    Args:
        num_experts: E, which may be 0 for a rank without a share of the experts.
        d_model: D, the width of a row.
        hidden_sizes: the widths of the hidden layers.
        activation: one of `moe_ext.ops.ACTIVATIONS`; gated ones ("swiglu", …) take a matrix of
            twice the width.
        bias: whether the layers have biases (the paper's have none).
        d_output: width of an output row; None is d_model.
        dtype: of weights and biases, and so of what goes in; None is torch's default.
        first_expert: the number of the first of these experts among those of all ranks.

    Attributes:
        weight_0, weight_1, …: [E, fan_in, width] parameters; `weights` is all of them.
        bias_0, bias_1, …: [E, width] parameters, with bias=True; `biases` is all of them, or None.

    Raises:
        ValueError: a size is out of range, or there is no such activation.
    """

    fused: ClassVar[bool] = True
    can_split: ClassVar[bool] = True

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        hidden_sizes: Sequence[int] = (),
        *,
        activation: Activation = "relu",
        bias: bool = False,
        d_output: int | None = None,
        dtype: torch.dtype | None = None,
        first_expert: int = 0,
    ) -> None:
        super().__init__(num_experts, d_model, d_output)
        require(
            isinstance(hidden_sizes, Sequence)
            and all(is_whole(width) and width >= 1 for width in hidden_sizes),
            "FeedForwardExperts: hidden_sizes",
            "be a sequence of whole numbers of at least 1",
            hidden_sizes,
        )
        require_sizes("FeedForwardExperts", 0, first_expert=first_expert)
        require(
            activation in ACTIVATIONS,
            "FeedForwardExperts: activation",
            f"be one of {', '.join(ACTIVATIONS)}",
            activation,
        )
        self.first_expert = first_expert
        self.activation: Activation = activation
        self.has_bias = bias
        factor = 2 if activation in GATED_ACTIVATIONS else 1
        fans_in = [d_model, *hidden_sizes]
        widths = [
            *(factor * width for width in hidden_sizes),
            d_model if d_output is None else d_output,
        ]
        self.num_layers = len(widths)
        for i, (fan_in, width) in enumerate(zip(fans_in, widths, strict=True)):
            weight = torch.empty(num_experts, fan_in, width, dtype=dtype)
            self.register_parameter(f"weight_{i}", nn.Parameter(weight))
        for i, width in enumerate(widths if bias else ()):
            vector = torch.empty(num_experts, width, dtype=dtype)
            self.register_parameter(f"bias_{i}", nn.Parameter(vector))
        self.register_load_state_dict_pre_hook(_take_former_names)
        self.reset_parameters()

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The matrices of all layers, [E, fan_in, width] each."""
        return tuple(getattr(self, f"weight_{i}") for i in range(self.num_layers))

    @property
    def biases(self) -> tuple[nn.Parameter, ...] | None:
        """The biases of all layers, [E, width] each; None: there are none."""
        if not self.has_bias:
            return None
        return tuple(getattr(self, f"bias_{i}") for i in range(self.num_layers))

    def reset_parameters(self) -> None:
        """Draws the weights and sets the biases to zero, as in new experts."""
        weights = self.weights
        device = weights[0].device
        if device.type == "meta" or is_fake(weights[0]):
            return
        seed = int(torch.randint(2**31, (), device="cpu"))
        generator = torch.Generator(device)
        for e in range(self.num_experts):
            generator.manual_seed(seed + self.first_expert + e)
            for weight in weights:
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
        return ops.experts(
            x,
            self.weights,
            self.biases,
            self.activation,
            offsets=offsets,
            inverse=inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
        )

    if TYPE_CHECKING:
        __call__ = forward

    def split(self, sizes: Sequence[int]) -> list[_Part]:
        weights = zip(*(weight.split(sizes) for weight in self.weights), strict=True)
        biases = zip(*(bias.split(sizes) for bias in self.biases or ()), strict=True)

        def part(weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> _Part:
            def forward(x: Tensor, offsets: Tensor | None, **options: Any) -> Tensor:
                return ops.experts(x, weights, biases, self.activation, offsets=offsets, **options)

            return forward

        return [part(w, b) for w, b in zip_longest(weights, biases)]

    def extra_repr(self) -> str:
        shapes = " -> ".join(str(weight.shape[1]) for weight in self.weights)
        dtype = self.weights[0].dtype
        return (
            f"{self.num_experts} x ({shapes} -> {self.d_output}), activation={self.activation}, "
            f"bias={self.has_bias}, dtype={dtype}"
        )


def _take_former_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Lets a module load the state_dict of a former version."""
    wanted = [prefix + name for name, _ in module.named_parameters()]
    for former, name in current_names(state_dict, wanted).items():
        state_dict[name] = state_dict.pop(former)


class ModuleExperts(Experts):
    """Any modules as experts, one after the other; they may differ in kind.

    Every module maps [n, D] to [n, d_output], of any floating type: the mixture is of x's. It is
    called in each forward pass, with n = 0 when no token chose it: so its parameters always have
    gradients. The split into experts needs the counts on the host, so that on CUDA the host waits
    for the device, and torch.compile breaks the graph.

    Args:
        modules: one module for each expert.

    Raises:
        ValueError: there is no module; in the forward pass, two modules return different widths.
    """

    can_split: ClassVar[bool] = True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        experts = nn.ModuleList(modules)
        require(len(experts) >= 1, "ModuleExperts: modules", "be at least one", "none")
        super().__init__(len(experts), None)
        self.experts = experts

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Maps rows x [R, D], grouped by expert with offsets [E + 1], to [R, d_output]."""
        bounds = pairwise(offsets.tolist())
        parts = [expert(x[a:b]) for expert, (a, b) in zip(self.experts, bounds, strict=True)]
        shapes = [tuple(part.shape[1:]) for part in parts]
        rule = "return rows of one width"
        require(len(set(shapes)) == 1, "ModuleExperts: experts", rule, shapes)
        return torch.cat(parts)

    def split(self, sizes: Sequence[int]) -> list[ModuleExperts]:
        """The first sizes[0] experts, the next sizes[1], …; none may be 0."""
        modules = iter(self.experts)
        return [ModuleExperts(islice(modules, size)) for size in sizes]
