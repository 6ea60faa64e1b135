"""Low-rank adapters of frozen experts (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from moe_ext import ops
from moe_ext.checks import (
    is_whole,
    require,
    require_at_least,
    require_bool,
    require_dtype,
    require_sizes,
)
from moe_ext.experts import Experts, FeedForwardExperts
from moe_ext.formats import PackedWeight
from moe_ext.lora._pairs import joined, with_dropout
from moe_ext.quantized import QuantizedExperts

__all__ = ["LoRAAdapter", "LoRAExperts"]

_Base = FeedForwardExperts | QuantizedExperts


class _AdapterOptions(TypedDict, total=False):
    """The options of an adapter; see `LoRAExperts`."""

    rslora: bool
    layers: Sequence[int] | None
    shared_a: bool
    dropout: float
    dtype: torch.dtype | None


class LoRAAdapter(nn.Module):
    """Holds the matrices A and B of one adapter of `LoRAExperts`, which makes it.

    A starts with uniform random values of variance 1 / (3 · fan_in) and B with zeros, as in PEFT:
    a new adapter changes nothing. The seed of each expert is one random number from torch's global
    CPU generator plus the expert's global index. So ranks with equal RNG state start with the
    values of a single process.

    Args:
        base: the experts.
        rank, alpha, rslora, layers, shared_a, dropout, dtype: see `LoRAExperts`.

    Attributes:
        rank: r.
        alpha: the numerator of the scale.
        rslora: whether alpha is divided by sqrt(r) instead of r.
        layers: the indices of the layers that have matrices.
        shared_a: whether all experts share A.
        dropout: the probability with which a number of the input of A is 0 in training; it may
            change.
        scale: the factor of x A B; alpha / r, or alpha / sqrt(r) with rslora.
        a_0: [E, D, r] parameter, A of the first layer; [1, D, r] with shared_a. The next layers
            have a_1, … [E, fan_in, r].
        b_0: [E, r, width] parameter, B of the first layer. The next layers have b_1, …

    Raises:
        ValueError, TypeError: see `LoRAExperts`.
    """

    rank: int
    alpha: float
    rslora: bool
    shared_a: bool
    dropout: float

    def __init__(
        self,
        base: _Base,
        rank: int,
        alpha: float,
        *,
        rslora: bool = False,
        layers: Sequence[int] | None = None,
        shared_a: bool = False,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = "LoRAExperts"
        (self.dropout,) = require_at_least(0, name, dropout=dropout)
        require(self.dropout < 1, f"{name}: dropout", "be below 1", dropout)
        (self.rank,) = require_sizes(name, rank=rank)
        (self.alpha,) = require_at_least(0, name, alpha=alpha)
        self.rslora, self.shared_a = require_bool(name, rslora=rslora, shared_a=shared_a)
        chosen = range(base.num_layers) if layers is None else layers
        rule = f"be different indices below {base.num_layers}, at least one"
        whole = isinstance(chosen, Sequence) and all(map(is_whole, chosen))
        valid = whole and {*chosen} <= {*range(base.num_layers)}
        require(valid and len({*chosen}) == len(chosen) > 0, f"{name}: layers", rule, layers)
        self.layers: tuple[int, ...] = tuple(sorted(chosen))
        self.scale: float = self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
        self.num_experts: int = base.num_experts
        self.first_expert: int = base.first_expert
        like = _first_tensor(base)
        rule = "be plain tensors; add adapters before fully_shard"
        is_plain = not is_traceable_wrapper_subclass(like)  # a DTensor is no plain tensor
        require(is_plain, f"{name}: weights", rule, type(like).__name__)
        if require_dtype(name, dtype) is None:
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        layer_sizes = base._layer_sizes()
        for i in self.layers:
            fan_in, width = layer_sizes[i]
            sizes = 1 if self.shared_a else base.num_experts, fan_in, self.rank
            a = like.new_empty(sizes, dtype=dtype)
            b = like.new_empty(base.num_experts, self.rank, width, dtype=dtype)
            self.register_parameter(f"a_{i}", nn.Parameter(a))
            self.register_parameter(f"b_{i}", nn.Parameter(b))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitializes A and sets B to zero."""
        first = getattr(self, f"a_{self.layers[0]}")
        if first.is_meta or is_fake(first):
            return
        seed = int(torch.randint(2**31, (), device="cpu"))
        generator = torch.Generator(first.device)
        for e in range(1 if self.shared_a else self.num_experts):
            generator.manual_seed(seed + (0 if self.shared_a else self.first_expert) + e)
            for i in self.layers:
                a = getattr(self, f"a_{i}").detach()
                bound = 1 / math.sqrt(a.shape[1])
                nn.init.uniform_(a[e], -bound, bound, generator=generator)
        for i in self.layers:
            nn.init.zeros_(getattr(self, f"b_{i}"))

    def pair(self, layer: int) -> ops.LoRA | None:
        """Returns A [E, fan_in, r], B [E, r, width] and the scale of a layer; None if it has none.

        A that the experts share is expanded without a copy.
        """
        if layer not in self.layers:
            return None
        a, b = getattr(self, f"a_{layer}"), getattr(self, f"b_{layer}")
        return ops.LoRA(a.expand(len(b), -1, -1) if self.shared_a else a, b, self.scale)

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        options = "".join(
            f", {name}=True" for name in ("rslora", "shared_a") if getattr(self, name)
        )
        if self.dropout > 0:
            options += f", dropout={self.dropout:g}"
        dtype = next(self.parameters()).dtype
        layers = list(self.layers)
        return f"rank={self.rank}, alpha={self.alpha:g}{options}, layers={layers}, dtype={dtype}"


class LoRAExperts(Experts):
    """Adds low-rank adapters to feed-forward experts, which are frozen.

    Layer l of each expert computes x W_l + b_l + scale (x A_l) B_l (LoRA, Hu et al. 2021, arXiv
    2106.09685). The operator never forms W + A B. The base may be packed: then its weights stay in
    4 or 8 bits, as in QLoRA (arXiv 2305.14314).

    There may be several adapters, by name. Those of `active` are added up. Adapters that are not
    active are frozen.

    Adapters have the dtype float32 by default, float64 for a base in float64. They are cast to the
    dtype of the input rows in each call, so that half-precision models train float32 adapters.

    With a process group, each rank has the adapters of its experts. Then shared_a must be False.

    Args:
        experts: the base. All its parameters are frozen; ``experts.base.requires_grad_()`` trains
            them again, if they are not packed.
        rank: r, the rank of A B.
        alpha: the scale of A B is alpha / r.
        adapter: the name of the first adapter.
        rslora: whether the scale is alpha / sqrt(r) (arXiv 2312.03732).
        layers: the indices of the layers that get A and B; None: all layers.
        shared_a: whether all experts share A of a layer.
        dropout: the probability with which a number of the input of A is 0 in training. Adapters
            that are active together must have the same dropout.
        dtype: dtype of A and B; None: float32, or float64 for a base in float64.

    Attributes:
        base: the constructor argument experts.
        adapters: the `LoRAAdapter` of each name, an ``nn.ModuleDict``.
        active: the names of the active adapters.
        merged: whether `merge` has added the active adapters to the weights.
        disabled: whether a `disable_adapter` context is open.

    Raises:
        ValueError: an argument is out of range.
        TypeError: experts are neither `FeedForwardExperts` nor `QuantizedExperts`, rslora or
            shared_a is not a bool, or dtype is not floating point.

    Example:
        >>> base = QuantizedExperts.from_experts(FeedForwardExperts(4, 64, [128]), "mxfp4")
        >>> layer = MoE(64, num_experts=4, k=2, experts=LoRAExperts(base, rank=8, alpha=16))
    """

    fused: ClassVar[bool] = True
    can_split: ClassVar[bool] = True

    def __init__(
        self,
        experts: _Base,
        rank: int,
        alpha: float,
        *,
        adapter: str = "default",
        **options: Unpack[_AdapterOptions],
    ) -> None:
        if not isinstance(experts, _Base):
            kind = type(experts).__name__
            raise TypeError(
                f"LoRAExperts: experts must be a FeedForwardExperts or QuantizedExperts, got {kind}"
            )
        super().__init__(experts.num_experts, experts.d_model, experts.d_output)
        self.base: _Base = experts
        self.adapters: nn.ModuleDict = nn.ModuleDict()
        self.active: tuple[str, ...] = ()
        self._disabled = 0
        self._originals: list[Tensor] | None = None  # the weights without the merged adapters
        self.register_state_dict_pre_hook(_require_unmerged_to_save)
        self.register_load_state_dict_pre_hook(_require_unmerged_to_load)
        self.add_adapter(adapter, rank, alpha, **options)
        self.set_adapter(adapter)
        experts.requires_grad_(False)  # after the checks of the arguments

    def reset_parameters(self) -> None:
        """Reinitializes all adapters; the base does not change."""
        for adapter in self._adapters(self.adapters):
            adapter.reset_parameters()

    @property
    def weights(self) -> tuple[nn.Parameter, ...] | tuple[PackedWeight, ...]:
        """The weights of the base."""
        return self.base.weights

    @property
    def biases(self) -> tuple[nn.Parameter, ...] | None:
        """The biases of the base."""
        return self.base.biases

    @property
    def merged(self) -> bool:
        """Whether `merge` has added the active adapters to the weights."""
        return self._originals is not None

    @property
    def disabled(self) -> bool:
        """Whether a `disable_adapter` context is open."""
        return self._disabled > 0

    def add_adapter(
        self,
        name: str,
        rank: int,
        alpha: float,
        **options: Unpack[_AdapterOptions],
    ) -> None:
        """Adds an adapter that is neither active nor trained; see `set_adapter`.

        Args:
            name: its name, without dots.
            rank, alpha: see the class.
            options: rslora, layers, shared_a, dropout and dtype; see the class.

        Raises:
            ValueError: there is an adapter of this name, or an argument is out of range.
            TypeError: an option has the wrong type.
        """
        usable = isinstance(name, str) and name and "." not in name
        usable = usable and not hasattr(nn.ModuleDict, name) and name != "training"
        rule = "be a name without dots that is no attribute of nn.ModuleDict"
        require(bool(usable), "LoRAExperts: adapter", rule, name)
        require(name not in self.adapters, "LoRAExperts: adapter", "be a new name", name)
        made = LoRAAdapter(self.base, rank, alpha, **options)
        self.adapters[name] = made.train(self.training).requires_grad_(False)

    def delete_adapter(self, name: str) -> None:
        """Deletes an adapter.

        Raises:
            ValueError: there is no such adapter, or adapters are merged.
        """
        self._require_names(name)
        self._require_unmerged("delete_adapter")
        self.active = tuple(active for active in self.active if active != name)
        del self.adapters[name]

    def set_adapter(self, *names: str) -> None:
        """Makes adapters the active ones and trains them; freezes the other adapters.

        Several active adapters are added up. Without names, the experts are those of the base.

        Raises:
            ValueError: there is no such adapter, or adapters are merged.
        """
        self._require_names(*names)
        self._require_unmerged("set_adapter")
        self.active = tuple(dict.fromkeys(names))
        for name, adapter in self.adapters.items():
            adapter.requires_grad_(name in self.active)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Computes the base alone within the context, such as a reference model; may be nested.

        Results are bitwise identical to those of the base.

        Raises:
            ValueError: adapters are merged.
        """
        self._require_unmerged("disable_adapter")
        self._disabled += 1
        try:
            yield
        finally:
            self._disabled -= 1

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the active adapters to the weights of the base, for inference without extra cost.

        Keeps a copy of the weights for `unmerge`. `merged_experts` keeps none. Until `unmerge`, a
        state_dict cannot be taken or loaded: it would have both the adapters and their sum with
        the weights.

        Raises:
            ValueError: adapters are merged already or disabled, or the base is packed.
        """
        self._require_mergeable("merge")
        if not isinstance(self.base, FeedForwardExperts):
            raise ValueError(
                "LoRAExperts: merge needs experts in floating point, got packed weights; "
                "merged_experts() merges into a dequantized copy"
            )
        weights = self.base.weights
        originals = [weight.detach().clone() for weight in weights]
        try:
            self._add_to(weights)
        except BaseException:  # such as a lack of memory for a later layer
            _copy_each(originals, weights)
            raise
        self._originals = originals

    @torch.no_grad()
    def unmerge(self) -> None:
        """Restores the weights from before `merge`, bit for bit.

        Raises:
            ValueError: no adapters are merged.
        """
        require(self.merged, "LoRAExperts: unmerge", "follow merge", "adapters that are not merged")
        assert isinstance(self.base, FeedForwardExperts)
        _copy_each(self._originals or (), self.base.weights)
        self._originals = None

    @torch.no_grad()
    def merged_experts(self, dtype: torch.dtype | None = None) -> FeedForwardExperts:
        """Returns new experts with the weights W + scale A B of the active adapters.

        Args:
            dtype: of the new experts. None: the dtype of the base, or float32 for a packed base.

        Raises:
            ValueError: adapters are merged or disabled.
            TypeError: dtype is not floating point.
        """
        self._require_mergeable("merged_experts")
        require_dtype("LoRAExperts", dtype)
        base = self.base
        if isinstance(base, QuantizedExperts):
            experts = base.dequantize(dtype or torch.float32)
        else:
            experts = copy.deepcopy(base).to(dtype or base.weights[0].dtype)
        self._add_to(experts.weights)
        return experts.train(self.training).requires_grad_(False)

    def _add_to(self, weights: Sequence[Tensor]) -> None:
        """Adds the active adapters to weights [E, fan_in, width], one expert at a time."""
        dtype = ops.accumulation_dtype(weights[0])
        for weight, pair in zip(weights, self._pairs(dtype) or (), strict=False):
            for e in range(len(weight) if pair is not None else 0):
                assert pair is not None
                delta = pair.scale * (pair.a[e] @ pair.b[e])
                weight.detach()[e].copy_(weight.detach()[e].to(dtype) + delta)

    def _pairs(
        self, dtype: torch.dtype, experts: slice = slice(None), used: Tensor | None = None
    ) -> list[ops.LoRA | None] | None:
        """Returns A and B of each layer in a dtype; see `_pair`. None if no layer has any."""
        layers = range(self.base.num_layers)
        pairs = [self._pair(layer, dtype, experts, used) for layer in layers]
        return pairs if any(pairs) else None

    def _pair(
        self,
        layer: int,
        dtype: torch.dtype,
        experts: slice = slice(None),
        used: Tensor | None = None,
    ) -> ops.LoRA | None:
        """Returns the sum of the active adapters of a layer, unless they are merged or disabled."""
        if self.disabled or self.merged:
            return None
        pairs = [adapter.pair(layer) for adapter in self._adapters(self.active)]
        return joined([pair for pair in pairs if pair is not None], dtype, experts, used)

    def _pairs_for(
        self,
        x: Tensor,
        offsets: Tensor | None,
        inverse: Tensor | None = None,
        experts: slice = slice(None),
    ) -> list[ops.LoRA | None] | None:
        """Returns A, B and the dropout masks for the rows of a call; see `_pairs`."""
        # The base refuses what is not a tensor of numbers.
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        pairs = self._pairs(x.dtype, experts, _used_experts(x, offsets, inverse))
        if pairs is None or not self.training:
            return pairs
        dropout, *rates = {adapter.dropout for adapter in self._adapters(self.active)}
        rule = "be equal for all active adapters"
        require(not rates, "LoRAExperts: dropout", rule, sorted([dropout, *rates]))
        if dropout == 0:
            return pairs
        num_rows = x.shape[0] if inverse is None else inverse.numel()
        return [pair and with_dropout(pair, dropout, num_rows) for pair in pairs]

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
        """Maps rows x [R, D], sorted by expert, to [R, d_output].

        The arguments are those of `FeedForwardExperts.forward`.

        Raises:
            ValueError: in training mode, the active adapters differ in dropout.
            ValueError, TypeError, IndexError: see `moe_ext.ops.experts`.
        """
        return self.base(
            x,
            offsets,
            inverse=inverse,
            gates=gates,
            token_offsets=token_offsets,
            recompute=recompute,
            lora=self._pairs_for(x, offsets, inverse),
        )

    if TYPE_CHECKING:
        __call__ = forward

    def _dtype_of_rows(self) -> torch.dtype | None:
        """Returns the dtype of the base's rows; adapters follow the rows."""
        return self.base._dtype_of_rows()

    def split(self, sizes: Sequence[int]) -> list[Callable[..., Tensor]]:
        """Splits the experts into consecutive blocks without copies; see `Experts.split`."""

        def part(base: Callable[..., Tensor], experts: slice) -> Callable[..., Tensor]:
            def forward(x: Tensor, offsets: Tensor | None, **options: Any) -> Tensor:
                lora = self._pairs_for(x, offsets, options.get("inverse"), experts)
                return base(x, offsets, lora=lora, **options)

            return forward

        blocks = pairwise(accumulate(sizes, initial=0))
        parts = zip(self.base.split(sizes), blocks, strict=True)
        return [part(base, slice(first, last)) for base, (first, last) in parts]

    def _adapters(self, names: Iterable[str]) -> list[LoRAAdapter]:
        return [cast(LoRAAdapter, self.adapters[name]) for name in names]

    def _require_names(self, *names: str) -> None:
        for name in names:
            rule = f"be one of {', '.join(self.adapters)}"
            require(name in self.adapters, "LoRAExperts: adapter", rule, name)

    def _require_unmerged(self, method: str) -> None:
        rule = "be called without merged adapters (call unmerge first)"
        require(not self.merged, f"LoRAExperts: {method}", rule, f"merged {', '.join(self.active)}")

    def _require_mergeable(self, method: str) -> None:
        self._require_unmerged(method)
        rule = "be called outside disable_adapter"
        require(not self.disabled, f"LoRAExperts: {method}", rule, "disabled adapters")

    def extra_repr(self) -> str:
        """Returns the arguments that the text of the module shows."""
        merged = ", merged=True" if self.merged else ""
        return f"active={list(self.active)}{merged}"


def _copy_each(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _require_unmerged_to_save(experts: LoRAExperts, prefix: str, keep_vars: bool) -> None:
    if not keep_vars:  # with keep_vars, tools look for the names of parameters
        experts._require_unmerged("state_dict")


def _require_unmerged_to_load(experts: LoRAExperts, *_: Any) -> None:
    experts._require_unmerged("load_state_dict")


def _used_experts(x: Tensor, offsets: Tensor | None, inverse: Tensor | None) -> Tensor | None:
    """Returns the experts that have rows if they are few, as in generation; None: cast all.

    Reading the offsets would synchronize a GPU and break a compiled graph.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    rows = x if inverse is None else inverse
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or not isinstance(rows, Tensor):
        return None  # the operator refuses them
    num_rows = len(rows) if inverse is None else rows.numel()
    if num_rows + 1 >= len(offsets) or not offsets.is_cpu or is_fake(offsets):
        return None
    return offsets.diff().nonzero()[:, 0]


def _first_tensor(base: _Base) -> Tensor:
    # Not a parameter: while `distribute_experts` shards the experts, only `weights` are plain.
    weight = base.weights[0]
    return weight if isinstance(weight, Tensor) else weight.panels
