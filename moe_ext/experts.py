"""Experts (Sections 2 and 3.2): feed-forward networks with stacked weights, or any modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional as F
from torch.types import Device
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ext import ops
from moe_ext._argument_names import explains_names
from moe_ext._former_names import current_names
from moe_ext.checks import (
    is_whole,
    require,
    require_bool,
    require_dtype,
    require_not_nested,
    require_shape,
    require_sizes,
    require_tensor,
)
from moe_ext.formats import PackedWeight
from moe_ext.ops import Activation
from moe_ext.ops._activations import checked_activation, width_factor

__all__ = ["ActivationLike", "Experts", "FeedForwardExperts", "ModuleExperts", "uniform_"]


_Part = Callable[..., Tensor]  # a subset of the experts, with the arguments of Experts.forward


ActivationLike = Activation | nn.Module | type[nn.Module] | Callable[[Tensor], Tensor]

_NAMES: dict[Any, Activation] = {
    nn.Identity: "identity",
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.Sigmoid: "sigmoid",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    F.gelu: "gelu",
    F.relu: "relu",
    F.sigmoid: "sigmoid",
    F.silu: "silu",
    F.tanh: "tanh",
    torch.relu: "relu",
    torch.sigmoid: "sigmoid",
    torch.tanh: "tanh",
}


def _name_of(activation: ActivationLike) -> Activation:
    """Returns the name of an activation of torch; other values as they are."""
    if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
        return "gelu_tanh"
    name: Any = type(activation) if isinstance(activation, nn.Module) else activation
    return cast(Activation, _NAMES.get(name, activation) if callable(name) else name)


def uniform_(weight: Tensor, fan_in: int, generator: torch.Generator | None = None) -> None:
    """Fills weight with uniform random values from generator: mean 0, variance 1 / fan_in."""
    bound = math.sqrt(3 / fan_in)
    nn.init.uniform_(weight, -bound, bound, generator=generator)


class Experts(nn.Module):
    """Defines the interface between `MoE` and its experts; each expert maps its own rows.

    Derive custom experts from this class. Call ``super().__init__(num_experts, d_model,
    d_output)`` and define `forward`:

        >>> class ScaleExperts(Experts):
        ...     def __init__(self, num_experts, d_model):
        ...         super().__init__(num_experts, d_model)
        ...         self.scale = torch.nn.Parameter(torch.ones(num_experts, d_model))
        ...
        ...     def forward(self, x, offsets):
        ...         rows = torch.repeat_interleave(offsets.diff(), output_size=len(x))
        ...         return x * self.scale[rows]

    Custom experts can be sharded over ranks if the first dimension of every parameter and buffer
    is the expert dimension, of size num_experts.

    Args:
        num_experts: E, the number of experts on this rank; may be 0.
        d_model: D, the width of an input row; None: any width.
        d_output: the width of an output row; None: d_model.

    Attributes:
        num_experts: the constructor argument.
        d_model: the constructor argument.
        d_output: the width of an output row.
        fused: whether `forward` also accepts tokens, gates and the dispatch plan and returns the
            mixture, as `FeedForwardExperts.forward` does.
        can_split: whether `split` is defined. ``ExpertParallel(num_chunks=...)`` needs `split` for
            more than one chunk. The callables from `split` are fused if the experts are fused.

    Raises:
        ValueError: a size is out of range.
    """

    fused: ClassVar[bool] = False
    can_split: ClassVar[bool] = False
    num_experts: int

    def __init__(self, num_experts: int, d_model: int | None, d_output: int | None = None) -> None:
        super().__init__()
        name = type(self).__name__
        (self.num_experts,) = require_sizes(name, 0, num_experts=num_experts)
        if d_model is not None:
            (d_model,) = require_sizes(name, d_model=d_model)
        if d_output is not None:
            (d_output,) = require_sizes(name, d_output=d_output)
        self.d_model = d_model
        self.d_output: int | None = d_model if d_output is None else d_output

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Maps the rows x to output rows; each expert maps its own rows.

        Args:
            x: [R, D], sorted by expert.
            offsets: [E + 1] int64; expert e has the rows offsets[e] <= r < offsets[e + 1]. Fused
                experts must also accept None, which means R / E rows for every expert.

        Returns:
            The output rows [R, d_output].
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, offsets)")

    if TYPE_CHECKING:
        __call__: _Part  # fused experts take more arguments

    def _dtype_of_rows(self) -> torch.dtype | None:
        """Returns the dtype of input rows; None: any, as packed weights have no dtype."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), None)

    def split(self, sizes: Sequence[int]) -> Sequence[_Part]:
        """Splits the experts into consecutive blocks of sizes[0], sizes[1], … experts.

        Returns:
            Callables with the arguments of `forward`, one for each size.
        """
        raise NotImplementedError(f"{type(self).__name__} must define split(sizes)")


class _Networks(Experts):
    """Implements E feed-forward networks of equal shape, without their weights.

    A derived class sets num_layers and has_bias, and registers bias_0, bias_1, … if has_bias.
    """

    fused: ClassVar[bool] = True
    can_split: ClassVar[bool] = True
    num_layers: int
    has_bias: bool
    first_expert: int

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_output: int | None,
        activation: Activation,
        activation_args: Sequence[float] | None,
        first_expert: int,
    ) -> None:
        super().__init__(num_experts, d_model, d_output)
        name = type(self).__name__
        self.activation: Activation = activation
        self.activation_args: tuple[float, ...] | None = checked_activation(
            name, activation, activation_args
        )
        (self.first_expert,) = require_sizes(name, 0, first_expert=first_expert)

    @property
    def weights(self) -> tuple[nn.Parameter, ...] | tuple[PackedWeight, ...]:
        """The weights of all layers."""
        raise NotImplementedError

    @property
    def biases(self) -> tuple[nn.Parameter, ...] | None:
        """The biases [E, width] of all layers; None if the layers have none."""
        if not self.has_bias:
            return None
        return tuple([getattr(self, f"bias_{i}") for i in range(self.num_layers)])

    def _layer_sizes(self) -> list[tuple[int, int]]:
        """Returns fan_in and width of the weights of each layer."""
        raise NotImplementedError

    def _split_weight(self, weight: Any, sizes: Sequence[int]) -> Sequence[Any]:
        """Splits one of `weights` into blocks of experts."""
        raise NotImplementedError

    def _compute(
        self,
        x: Tensor,
        offsets: Tensor | None,
        *,
        weights: Sequence[Any],
        biases: Sequence[Tensor] | None,
        **options: Any,
    ) -> Tensor:
        """Calls the operator with the weights and biases of all experts or of a block of them."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        offsets: Tensor | None,
        *,
        inverse: Tensor | None = None,
        gates: Tensor | None = None,
        token_offsets: Tensor | None = None,
        recompute: bool = False,
        lora: Sequence[ops.LoRA | None] | None = None,
    ) -> Tensor:
        """Maps rows x [R, D], sorted by expert, to [R, d_output].

        With inverse and gates, maps tokens x [T, D] to the mixture [T, d_output]. See
        `moe_ext.ops.experts` for offsets, token_offsets, recompute and lora.

        Raises:
            ValueError, TypeError, IndexError: see `moe_ext.ops.experts`.
        """
        # Both conditions are tested here too: the calls would take microseconds.
        if not isinstance(x, Tensor) or x.is_nested:
            require_not_nested(type(self).__name__, x=x)
        if not isinstance(offsets, Tensor | None):
            require_tensor(type(self).__name__, offsets=offsets)
        return self._compute(
            x,
            offsets,
            weights=self.weights,
            biases=self.biases,
            inverse=inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
            lora=lora,
        )

    if TYPE_CHECKING:
        __call__ = forward

    def split(self, sizes: Sequence[int]) -> list[_Part]:
        """Splits the experts into consecutive blocks without copies; see `Experts.split`."""
        weights = zip(*(self._split_weight(weight, sizes) for weight in self.weights), strict=True)
        biases = zip(*(bias.split(sizes) for bias in self.biases or ()), strict=True)
        return [
            partial(self._compute, weights=block_weights, biases=block_biases)
            for block_weights, block_biases in zip_longest(weights, biases)
        ]

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        widths = " -> ".join(str(fan_in) for fan_in, _ in self._layer_sizes())
        args = f"{list(self.activation_args)}" if self.activation_args else ""
        return (
            f"{self.num_experts} x ({widths} -> {self.d_output}), "
            f"activation={self.activation}{args}, bias={self.has_bias}"
        )


class FeedForwardExperts(_Networks):
    """Implements E feed-forward networks of equal shape; each layer has one stacked weight tensor.

    Initial weights are uniform with variance 1 / fan_in; biases are zero. The seed of each expert
    is one random number from torch's global CPU generator plus the expert's global index. So ranks
    with equal RNG state start with the weights of a single process.

    ``hidden_sizes=()`` makes each expert a single matrix. ``num_experts=1`` is a dense feed-forward
    network.

    Args:
        num_experts: E, the number of experts on this rank; may be 0.
        d_model: D, the width of an input row.
        hidden_sizes: widths of the hidden layers; a number: the width of a single one.
        activation: one of `moe_ext.ops.ACTIVATIONS`, or torch's module or function for it, such as
            nn.GELU() or torch.relu. A gated activation ("swiglu", …) doubles the output width of
            the matrix before the activation.
        activation_args: (limit, alpha, offset) for `moe_ext.ops.CLAMPED_ACTIVATIONS`, else None.
            See `moe_ext.ops.experts`.
        bias: whether the layers have biases. The paper's experts have none.
        d_output: width of an output row; None: d_model.
        device: device of weights and biases; None: torch's default device.
        dtype: dtype of weights, biases and input rows; None: torch's default dtype.
        first_expert: global index of the first expert on this rank.

    Attributes:
        weight_0: [E, D, width] parameter, the matrices of the first layer. The next layers have
            weight_1, … [E, fan_in, width].
        bias_0: [E, width] parameter of the first layer, only with bias=True. The next layers have
            bias_1, …

    Raises:
        ValueError: a size is out of range, the activation is unknown, or activation_args do not
            fit it.
        TypeError: bias is not a bool, or dtype is not floating point.
    """

    has_bias: bool

    @explains_names
    def __init__(
        self,
        num_experts: int,
        d_model: int,
        hidden_sizes: int | Sequence[int] = (),
        *,
        activation: ActivationLike = "relu",
        activation_args: Sequence[float] | None = None,
        bias: bool = False,
        d_output: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        first_expert: int = 0,
    ) -> None:
        activation = _name_of(activation)
        super().__init__(num_experts, d_model, d_output, activation, activation_args, first_expert)
        sizes: Any = (hidden_sizes,) if is_whole(hidden_sizes) else hidden_sizes
        require(
            isinstance(sizes, Sequence) and all(is_whole(size) and size >= 1 for size in sizes),
            "FeedForwardExperts: hidden_sizes",
            "be a sequence of whole numbers, each at least 1",
            hidden_sizes,
        )
        (self.has_bias,) = require_bool("FeedForwardExperts", bias=bias)
        dtype = require_dtype("FeedForwardExperts", dtype)
        factor = width_factor(activation)
        fans_in = [d_model, *sizes]
        widths = [
            *(factor * width for width in sizes),
            d_model if d_output is None else d_output,
        ]
        self.num_layers: int = len(widths)
        for i, (fan_in, width) in enumerate(zip(fans_in, widths, strict=True)):
            weight = torch.empty(num_experts, fan_in, width, device=device, dtype=dtype)
            self.register_parameter(f"weight_{i}", nn.Parameter(weight))
        for i, width in enumerate(widths if bias else ()):
            vector = torch.empty(num_experts, width, device=device, dtype=dtype)
            self.register_parameter(f"bias_{i}", nn.Parameter(vector))
        self.register_load_state_dict_pre_hook(_take_former_names)
        self.reset_parameters()

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The weights [E, fan_in, width] of all layers."""
        return tuple([getattr(self, f"weight_{i}") for i in range(self.num_layers)])

    def reset_parameters(self) -> None:
        """Reinitializes the weights and sets the biases to zero.

        Raises:
            RuntimeError: fully_shard has divided the weights.
        """
        weights = self.weights
        device = weights[0].device
        if device.type == "meta" or is_fake(weights[0]):
            return
        if is_traceable_wrapper_subclass(weights[0]):
            rule = "must be called before fully_shard, which has divided the weights"
            raise RuntimeError(f"{type(self).__name__}: reset_parameters {rule}")
        seed = int(torch.randint(2**31, (), device="cpu"))
        generator = torch.Generator(device)
        for e in range(self.num_experts):
            generator.manual_seed(seed + self.first_expert + e)
            for weight in weights:
                uniform_(weight.detach()[e], weight.shape[1], generator)
        for bias in self.biases or ():
            nn.init.zeros_(bias)

    def _layer_sizes(self) -> list[tuple[int, int]]:
        return [(weight.shape[1], weight.shape[2]) for weight in self.weights]

    def _split_weight(self, weight: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        blocks: Sequence[Tensor] = weight.split(sizes)
        return blocks

    def _compute(
        self,
        x: Tensor,
        offsets: Tensor | None,
        *,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] | None,
        **options: Any,
    ) -> Tensor:
        try:
            return ops.experts(
                x,
                weights,
                biases,
                self.activation,
                offsets=offsets,
                activation_args=self.activation_args,
                **options,
            )
        except TypeError as error:
            if "x must have the dtype of the weights" not in str(error):
                raise
            remedy = "use torch.autocast, cast x, or set expert_dtype of MoE (dtype of the experts)"
            raise TypeError(f"{error}; {remedy}") from None

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        return f"{super().extra_repr()}, dtype={self.weights[0].dtype}"


def _take_former_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames the parameters of module, under prefix, in a state_dict of an earlier version."""
    wanted = [prefix + name for name, _ in module.named_parameters()]
    for former, name in current_names(state_dict, wanted).items():
        state_dict[name] = state_dict.pop(former)


class ModuleExperts(Experts):
    """Runs arbitrary modules as experts, sequentially. The modules may have different types.

    Every module maps [n, D] to [n, d_output]. It may return any floating-point dtype; `MoE` casts
    the result to the dtype of x. Every forward pass calls every module, with n = 0 if the module
    has no tokens. So the parameters of every module always have gradients.

    The host needs the number of rows of each expert. So on CUDA the host synchronizes with the
    device, and torch.compile breaks the graph.

    Args:
        modules: one module for each expert.

    Raises:
        ValueError: modules is empty, has a module with parameters twice, or in the forward pass,
            offsets have another shape or the modules' outputs differ in width.
        TypeError: a module is no torch.nn.Module, or in the forward pass, x or offsets is not a
            tensor or is nested.
    """

    can_split: ClassVar[bool] = True

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        experts = nn.ModuleList(modules)
        require(len(experts) >= 1, "ModuleExperts: modules", "contain at least one module", "none")
        trained = [expert for expert in experts if any(True for _ in expert.parameters())]
        names = [type(expert).__name__ for expert in experts]
        rule = "have no module twice (make a copy of the module for each expert)"
        require(len({*trained}) == len(trained), "ModuleExperts: modules", rule, names)
        super().__init__(len(experts), None)
        self.experts = experts

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Maps rows x [R, D], sorted by expert with offsets [E + 1], to [R, d_output]."""
        require_not_nested("ModuleExperts", x=x, offsets=offsets)
        require_shape("ModuleExperts", (self.num_experts + 1,), offsets=offsets)
        bounds = pairwise(offsets.tolist())
        parts = [expert(x[a:b]) for expert, (a, b) in zip(self.experts, bounds, strict=True)]
        shapes = [tuple(part.shape[1:]) for part in parts]
        rule = "all return the same width"
        require(len(set(shapes)) == 1, "ModuleExperts: experts", rule, shapes)
        return torch.cat(parts)

    def split(self, sizes: Sequence[int]) -> list[ModuleExperts]:
        """Splits the experts into consecutive blocks of sizes[0] >= 1, sizes[1] >= 1, … experts."""
        modules = iter(self.experts)
        return [ModuleExperts(islice(modules, size)) for size in sizes]
