"""Feed-forward experts whose weights stay in 4 or 8 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._packed_weights import Arithmetic, panels_name, parsed_name, quantized
from moe_ext.checks import (
    refuse,
    require,
    require_not_nested,
    require_one_of,
    require_sizes,
    require_tensor,
)
from moe_ext.experts import Experts, FeedForwardExperts
from moe_ext.formats import FORMATS, FormatName, PackedWeight
from moe_ext.formats._layouts import LAYOUTS
from moe_ext.ops import GATED_ACTIVATIONS, Activation
from moe_ext.ops._activations import checked_activation

__all__ = ["QuantizedExperts"]


class QuantizedExperts(Experts):
    """Computes feed-forward experts from packed weights, which are frozen.

    The output, and the gradients of x, gates and biases are bitwise identical to those of
    `FeedForwardExperts` with the dequantized weights in the dtype of x. No weight matrix is written
    to memory; see `moe_ext.ops.packed_experts`.

    Each layer has one parameter: the panels of its `moe_ext.formats.PackedWeight`, uint8. A change
    of dtype, such as ``.bfloat16()``, leaves them as they are. The name of the parameter says what
    its bytes mean: the format, [out, in], the number of inputs with one scale, and the dtype of the
    scales. So a state_dict, a safetensors file or a checkpoint of another format has other names,
    and loading it is an error.

    An average of all parameters, such as that of ``torch.optim.swa_utils.get_ema_multi_avg_fn``,
    rounds the panels. Average the parameters that require gradients only.

    Args:
        weights: one for each layer, with E experts each. The layers may have different formats.
            Their panels are not copied.
        biases: one [E, width] for each of `weights`, in the dtype of the input rows; or None. They
            are frozen; ``requires_grad_()`` of a bias trains it.
        activation, activation_args: see `FeedForwardExperts`.
        arithmetic: "exact", or "integer" for the fastest inference on a CPU, without gradients; see
            `moe_ext.ops.packed_experts`.
        first_expert: global index of the first expert on this rank.

    Attributes:
        activation: the constructor argument.
        activation_args: the constructor argument, as a tuple; or None.
        arithmetic: the constructor argument; it may change between calls.
        first_expert: the constructor argument.

    Raises:
        ValueError: the layers do not fit together, the activation is unknown, or activation_args do
            not fit it.
        TypeError: weights or biases have a wrong type.

    Example:
        >>> experts = FeedForwardExperts(4, 64, [128], activation="swiglu")
        >>> quantized = QuantizedExperts.from_experts(experts, "mxfp4")
        >>> layer = MoE(64, num_experts=4, k=2, experts=quantized)
    """

    fused: ClassVar[bool] = True
    can_split: ClassVar[bool] = True
    first_expert: int

    def __init__(
        self,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor] | None = None,
        *,
        activation: Activation = "relu",
        activation_args: Sequence[float] | None = None,
        arithmetic: Arithmetic = "exact",
        first_expert: int = 0,
    ) -> None:
        name = type(self).__name__
        require_one_of(f"{name}: arithmetic", get_args(Arithmetic), arithmetic)
        args = checked_activation(name, activation, activation_args)
        num_experts = _checked_weights(name, weights, activation)
        super().__init__(num_experts, weights[0].inputs, weights[-1].outputs)
        self.activation: Activation = activation
        self.activation_args: tuple[float, ...] | None = args
        self.arithmetic: Arithmetic = arithmetic
        (self.first_expert,) = require_sizes(name, 0, first_expert=first_expert)
        self.num_layers: int = len(weights)
        # Without the panels, which are parameters.
        self._layouts = [weight._replace(panels=weight.panels.new_empty(0)) for weight in weights]
        for key, weight in zip(self._names(), weights, strict=True):
            self.register_parameter(key, nn.Parameter(weight.panels, requires_grad=False))
        self.has_bias: bool = biases is not None
        if biases is not None:
            _require_biases(name, biases, weights)
            for i, bias in enumerate(biases):
                frozen = nn.Parameter(bias.detach(), requires_grad=False)
                self.register_parameter(f"bias_{i}", frozen)

    @classmethod
    def from_experts(
        cls,
        experts: FeedForwardExperts,
        format: FormatName | Sequence[FormatName],
        *,
        group: int | None = None,
    ) -> QuantizedExperts:
        """Quantizes experts, one at a time: the peak of memory is the result plus one expert.

        Experts on the meta device give panels there, into which a state_dict can be loaded.

        Args:
            experts: the experts; they do not change. Biases are copied.
            format: a format of `moe_ext.formats.quantize`, or one for each layer.
            group: the number of inputs with one scale, for the layers in int4, int8 or fp8; see
                `moe_ext.formats.quantize`.

        Raises:
            TypeError: experts are not a `FeedForwardExperts`.
            ValueError: the format is unknown or cannot be written, there is not one for each layer,
                or weights do not fit the format or are not finite.
        """
        name = cls.__name__
        if not isinstance(experts, FeedForwardExperts):
            kind = type(experts).__name__
            raise TypeError(f"{name}: experts must be a FeedForwardExperts, got {kind}")
        weights, biases = experts.weights, experts.biases
        formats = [format] * len(weights) if isinstance(format, str) else list(format)
        rule = f"be a name, or one name for each of {len(weights)} layers"
        require(len(formats) == len(weights), f"{name}: format", rule, format)
        for layer_format in formats:
            require_one_of(f"{name}: format", FORMATS, layer_format)
        free = [LAYOUTS[layer_format].group is None for layer_format in formats]
        rule = "be None without a layer in int4, int8 or fp8"
        require(group is None or any(free), f"{name}: group", rule, group)
        groups = [group if is_free else None for is_free in free]
        layers = enumerate(zip(weights, formats, groups, strict=True))
        return cls(
            [quantized(f"{name}: weight_{i}", w.detach(), f, g) for i, (w, f, g) in layers],
            None if biases is None else [bias.detach().clone() for bias in biases],
            activation=experts.activation,
            activation_args=experts.activation_args,
            first_expert=experts.first_expert,
        )

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        activation: Activation = "relu",
        activation_args: Sequence[float] | None = None,
    ) -> QuantizedExperts:
        """Makes the experts of a state_dict, whose names have the formats. Copies no tensor.

        Raises:
            ValueError: a name or a shape is not that of packed experts.
        """
        name = cls.__name__
        weights: dict[int, PackedWeight] = {}
        biases: dict[int, Tensor] = {}
        for key, value in state_dict.items():
            if match := re.fullmatch(r"bias_(\d+)", key):
                biases[int(match[1])] = value
            elif (parsed := parsed_name(key, value)) is not None:
                weights[parsed[0]] = parsed[1]
            else:
                rule = "have only names such as bias_0 and weight_0_mxfp4_128x64_g32_uint8"
                refuse(f"{name}: state_dict", rule, key)
        layers = [*range(len(weights))]
        complete = sorted(weights) == layers and sorted(biases) in ([], layers)
        rule = "have a weight, and a bias or none, for each layer"
        require(complete, f"{name}: state_dict", rule, [*state_dict])
        return cls(
            [weights[i] for i in layers],
            [biases[i] for i in layers] if biases else None,
            activation=activation,
            activation_args=activation_args,
        )

    def _names(self) -> list[str]:
        """Returns the names of the panels of all layers."""
        return [panels_name(i, layout) for i, layout in enumerate(self._layouts)]

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        """The packed weights of all layers; ``unpack()`` of each returns the bytes of a file."""
        panels = [getattr(self, name) for name in self._names()]
        pairs = zip(self._layouts, panels, strict=True)
        return tuple([layout._replace(panels=part) for layout, part in pairs])

    @property
    def biases(self) -> tuple[nn.Parameter, ...] | None:
        """The biases [E, width] of all layers, or None."""
        if not self.has_bias:
            return None
        return tuple([getattr(self, f"bias_{i}") for i in range(self.num_layers)])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> FeedForwardExperts:
        """Returns experts with the dequantized weights and the biases in a dtype."""
        weights, biases = self.weights, self.biases
        factor = 2 if self.activation in GATED_ACTIVATIONS else 1
        with torch.device("meta"):
            experts = FeedForwardExperts(
                self.num_experts,
                weights[0].inputs,
                [weight.outputs // factor for weight in weights[:-1]],
                activation=self.activation,
                activation_args=self.activation_args,
                bias=self.has_bias,
                d_output=self.d_output,
                dtype=dtype,
                first_expert=self.first_expert,
            )
        experts.to_empty(device=weights[0].panels.device)
        with torch.no_grad():
            for target, weight in zip(experts.weights, weights, strict=True):
                for own, one in zip(target, _each_expert(weight), strict=True):
                    own.copy_(one.dequantize(dtype)[0].mT)
            for target, bias in zip(experts.biases or (), biases or (), strict=True):
                target.copy_(bias)
        return experts

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

        The arguments are those of `FeedForwardExperts.forward`. x may have any floating-point
        dtype; with biases, it must have theirs.
        """
        require_not_nested("QuantizedExperts", x=x)
        if offsets is not None:
            require_tensor("QuantizedExperts", offsets=offsets)
        biases = self.biases
        try:
            return ops.packed_experts(
                x,
                self.weights,
                biases,
                self.activation,
                offsets=offsets,
                inverse=inverse,
                gates=gates,
                token_offsets=token_offsets,
                recompute=recompute,
                activation_args=self.activation_args,
                arithmetic=self.arithmetic,
                lora=lora,
            )
        except TypeError as error:
            if biases is None or "biases[0] must have dtype" not in str(error):
                raise
            rule = f"x must have the dtype of the biases, {biases[0].dtype}"
            remedy = "use torch.autocast, or cast x or the biases"
            raise TypeError(f"QuantizedExperts: {rule}, got {x.dtype}; {remedy}") from None

    if TYPE_CHECKING:
        __call__ = forward

    def split(self, sizes: Sequence[int]) -> list[Callable[..., Tensor]]:
        """Splits the experts into consecutive blocks without copies; see `Experts.split`."""
        layer_parts = [
            [weight._replace(panels=panels) for panels in weight.panels.split(sizes)]
            for weight in self.weights
        ]
        weights = zip(*layer_parts, strict=True)
        biases = zip(*(bias.split(sizes) for bias in self.biases or ()), strict=True)

        def part(
            weights: Sequence[PackedWeight], biases: Sequence[Tensor] | None
        ) -> Callable[..., Tensor]:
            def forward(x: Tensor, offsets: Tensor | None, **options: Any) -> Tensor:
                return ops.packed_experts(
                    x,
                    weights,
                    biases,
                    self.activation,
                    offsets=offsets,
                    activation_args=self.activation_args,
                    arithmetic=self.arithmetic,
                    **options,
                )

            return forward

        return [part(w, b) for w, b in zip_longest(weights, biases)]

    def _packed_sizes(self) -> Iterable[tuple[Tensor, int]]:
        """Yields the panels of each layer and the number of weights of an expert there."""
        return [(weight.panels, weight.inputs * weight.outputs) for weight in self.weights]

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        weights = self.weights
        shapes = " -> ".join(str(weight.inputs) for weight in weights)
        args = f"{list(self.activation_args)}" if self.activation_args else ""
        arithmetic = "" if self.arithmetic == "exact" else f"arithmetic={self.arithmetic}, "
        formats = " ".join(weight.format for weight in weights)
        size = sum(weight.panels.nbytes for weight in weights)
        return (
            f"{self.num_experts} x ({shapes} -> {self.d_output}), "
            f"activation={self.activation}{args}, bias={self.has_bias}, "
            f"{arithmetic}formats={formats}, {size:,} bytes"
        )


def _each_expert(weight: PackedWeight) -> Iterator[PackedWeight]:
    for panels in weight.panels.split(1) if len(weight.panels) else ():
        yield weight._replace(panels=panels)


def _checked_weights(name: str, weights: Sequence[PackedWeight], activation: str) -> int:
    """Checks that the layers fit together; returns the number of experts."""
    wrong: list[object] = [weights]
    if isinstance(weights, Sequence) and not isinstance(weights, PackedWeight):
        wrong = [weight for weight in weights if not isinstance(weight, PackedWeight)]
    if wrong:
        kind = type(wrong[0]).__name__
        raise TypeError(f"{name}: weights must be a sequence of PackedWeight, got {kind}")
    require(len(weights) >= 1, f"{name}: weights", "have at least one layer", "none")
    num_experts = len(weights[0].panels)
    for i, weight in enumerate(weights):
        owner = f"{name}: weights[{i}]"
        require_one_of(f"{owner}.format", FORMATS, weight.format)
        panels = weight.panels
        if panels.dtype != torch.uint8:
            raise TypeError(f"{owner}.panels must have dtype torch.uint8, got {panels.dtype}")
        shape, actual = weight.shape(num_experts), tuple(panels.shape)
        require(actual == shape, f"{owner}.panels", f"have shape {shape}", actual)
    factor = 2 if activation in GATED_ACTIVATIONS else 1
    for i, (weight, following) in enumerate(pairwise(weights)):
        rule = f"be {factor} x {following.inputs}, for {activation} and weights[{i + 1}]"
        fits = weight.outputs == factor * following.inputs
        require(fits, f"{name}: weights[{i}].outputs", rule, weight.outputs)
    return num_experts


def _require_biases(name: str, biases: Sequence[Tensor], weights: Sequence[PackedWeight]) -> None:
    rule = f"be None or have one tensor for each of {len(weights)} weights"
    require(len(biases) == len(weights), f"{name}: biases", rule, len(biases))
    for i, (bias, weight) in enumerate(zip(biases, weights, strict=True)):
        owner = f"{name}: biases[{i}]"
        require_tensor(name, **{f"biases[{i}]": bias})
        if not bias.is_floating_point() or bias.dtype != biases[0].dtype:
            rule = "have the same floating-point dtype as the other biases"
            raise TypeError(f"{owner} must {rule}, got {bias.dtype}")
        shape = len(weight.panels), weight.outputs
        require(tuple(bias.shape) == shape, owner, f"have shape {shape}", tuple(bias.shape))
