"""Feed-forward experts whose weights stay in 4 or 8 bits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor, nn

from moe_ext import ops
from moe_ext._panel_parameters import Arithmetic, pack_floats, panels_name, parsed_name
from moe_ext.checks import refuse, require, require_one_of, require_tensor
from moe_ext.experts import FeedForwardExperts, _Networks
from moe_ext.formats import FORMATS, FormatName, PackedWeight
from moe_ext.formats._layouts import LAYOUTS
from moe_ext.ops import Activation
from moe_ext.ops._activations import width_factor
from moe_ext.ops._packed_experts import require_packed

__all__ = ["QuantizedExperts"]


class QuantizedExperts(_Networks):
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
        biases: one [E, width] for each of `weights`, in the dtype of the input rows; or None: input
            rows may have any floating-point dtype. Biases are frozen; ``requires_grad_()`` of a
            bias trains it.
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
        num_experts = _checked_weights(name, weights)
        d_model, d_output = weights[0].inputs, weights[-1].outputs
        super().__init__(num_experts, d_model, d_output, activation, activation_args, first_expert)
        _require_chain(name, weights, activation)
        self.arithmetic: Arithmetic = arithmetic
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
            [pack_floats(f"{name}: weight_{i}", w.detach(), f, g) for i, (w, f, g) in layers],
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

        Args:
            state_dict: the tensors of packed experts, by name.
            activation, activation_args: see the class.

        Raises:
            ValueError: a name or a shape is not that of packed experts, the activation is unknown,
                or activation_args do not fit it.
            TypeError: a tensor has the wrong dtype.
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

    def dequantize(self, dtype: torch.dtype = torch.float32) -> FeedForwardExperts:
        """Returns experts with the dequantized weights and the biases in a dtype.

        Raises:
            TypeError: dtype is not floating point.
        """
        weights, biases = self.weights, self.biases
        with torch.device("meta"):
            experts = FeedForwardExperts(
                self.num_experts,
                weights[0].inputs,
                [weight.inputs for weight in weights[1:]],
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

    def _layer_sizes(self) -> list[tuple[int, int]]:
        return [(weight.inputs, weight.outputs) for weight in self.weights]

    def _split_weight(self, weight: PackedWeight, sizes: Sequence[int]) -> Sequence[PackedWeight]:
        return [weight._replace(panels=panels) for panels in weight.panels.split(sizes)]

    def _compute(
        self,
        x: Tensor,
        offsets: Tensor | None,
        *,
        weights: Sequence[PackedWeight],
        biases: Sequence[Tensor] | None,
        **options: Any,
    ) -> Tensor:
        try:
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
        except TypeError as error:
            if biases is None or "biases[0] must have dtype" not in str(error):
                raise
            rule = f"x must have the dtype of the biases, {biases[0].dtype}"
            remedy = "use torch.autocast, or cast x or the biases"
            raise TypeError(f"QuantizedExperts: {rule}, got {x.dtype}; {remedy}") from None

    def _packed_sizes(self) -> Iterable[tuple[Tensor, int]]:
        """Yields the panels of each layer and the number of weights of an expert there."""
        return [(weight.panels, weight.inputs * weight.outputs) for weight in self.weights]

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        weights = self.weights
        arithmetic = "" if self.arithmetic == "exact" else f"arithmetic={self.arithmetic}, "
        formats = " ".join(weight.format for weight in weights)
        size = sum(weight.panels.nbytes for weight in weights)
        return f"{super().extra_repr()}, {arithmetic}formats={formats}, {size:,} bytes"


def _each_expert(weight: PackedWeight) -> Iterator[PackedWeight]:
    for panels in weight.panels.split(1) if len(weight.panels) else ():
        yield weight._replace(panels=panels)


def _checked_weights(name: str, weights: Sequence[PackedWeight]) -> int:
    """Checks each layer by itself; returns the number of experts."""
    require_packed(name, weights)
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
    return num_experts


def _require_chain(name: str, weights: Sequence[PackedWeight], activation: str) -> None:
    """Requires that the outputs of each layer, after the activation, are the inputs of the next."""
    factor = width_factor(activation)
    for i, (weight, following) in enumerate(pairwise(weights)):
        rule = f"be {factor} x {following.inputs}, for {activation} and weights[{i + 1}]"
        fits = weight.outputs == factor * following.inputs
        require(fits, f"{name}: weights[{i}].outputs", rule, weight.outputs)


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
