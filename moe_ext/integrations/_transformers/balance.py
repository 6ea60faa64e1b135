"""The balance of the experts in a model of Hugging Face transformers, measured while it runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_ext import ops
from moe_ext._plain_names import plain_names
from moe_ext.checks import require, require_at_least
from moe_ext.integrations._transformers.experts import experts_modules
from moe_ext.losses import cv_squared, importance_loss
from moe_ext.moe import _in_backward

__all__ = ["LayerBalance", "ModelBalance", "balance"]


def balance(model: nn.Module, w_importance: float = 0.0) -> "ModelBalance":
    """Starts to measure the balance of the experts in each mixture layer of a transformers model.

    The measurement adds a hook to each module of `experts_modules`. The outputs of the model are
    bitwise identical. With expert parallelism, it counts the tokens of this rank, over all experts.
    Use the result in a ``with`` statement, or call its `ModelBalance.remove`:

        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, vocab_size=50)
        >>> heads = dict(num_attention_heads=2, num_key_value_heads=1)
        >>> model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=4))
        >>> input_ids = torch.randint(50, (2, 8))
        >>> with balance(model, w_importance=0.01) as measured:
        ...     loss = model(input_ids, labels=input_ids).loss + measured.loss()
        ...     loss.backward()
        >>> measured.layers[0].load.sum()  # 16 tokens, each with 2 experts
        tensor(32)
        >>> print(measured.table())
        layer                       experts  idle  tokens  cv_importance  cv_load  max/mean load
        model.layers.0.mlp.experts        4 ...
        model.layers.1.mlp.experts        4 ...

    The hooks work with every experts implementation, without gradients, and in training. With
    gradient checkpointing, the recomputed forward pass does not count. With `torch.compile`, call
    this function before the compiled model runs first: a compiled model ignores later hooks.

    Args:
        model: a model of transformers, or a module that contains one.
        w_importance: the scale of `ModelBalance.loss`. 0: no loss; the hooks then hold no autograd
            graph. A loss with gradient checkpointing needs ``use_reentrant=False``; a compiled
            model then also needs ``fullgraph=False``.

    Raises:
        ValueError: the model has no experts module, or w_importance is negative.
    """
    return ModelBalance(model, w_importance)


@dataclass(frozen=True)
class LayerBalance:
    """Holds the routing of a mixture layer since the start or the last `ModelBalance.reset`.

    Attributes:
        name: the name of the experts module in the model.
        importance: [E] float64, the sum of the routing weights of each expert (Eq. 6).
        load: [E] int64, the number of tokens of each expert, whose routing weight is not 0.
        num_tokens: the number of tokens that the layer routed.
    """

    name: str
    importance: Tensor
    load: Tensor
    num_tokens: int

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return len(self.load)

    @property
    def num_idle(self) -> int:
        """The number of experts without a token."""
        return int((self.load == 0).sum())

    @property
    def cv_importance(self) -> float:
        """The coefficient of variation of the importance, between 0 and sqrt(E - 1)."""
        return cv_squared(self.importance).sqrt().item()

    @property
    def cv_load(self) -> float:
        """The coefficient of variation of the load."""
        return cv_squared(self.load.double()).sqrt().item()

    @property
    def max_over_mean_load(self) -> float:
        """The largest load divided by the mean load; 0 without tokens."""
        load = self.load.double()
        return (load.max() / load.mean().clamp_min(1e-30)).item()


class ModelBalance:
    """Measures the balance of the experts; `balance` describes how to use it.

    The results cover all tokens that reach the experts on this rank, including padding. To exclude
    padding, set `mask` before each forward pass and change it only after the backward pass.

    Args:
        model, w_importance: see `balance`.

    Attributes:
        mask: the tokens that count, such as an ``attention_mask``: bool or 0 and 1, one element for
            each token of the batch. None: all tokens count.
        w_importance: the constructor argument.
    """

    def __init__(self, model: nn.Module, w_importance: float = 0.0) -> None:
        require_at_least(0, "balance", w_importance=w_importance)
        self.mask: Tensor | None = None
        self.w_importance = w_importance
        modules = {f"{name}.": module for name, module in experts_modules(model).items()}
        plain = plain_names(model, modules)
        self._recorders = [
            _Recorder(plain[name].removesuffix("."), module) for name, module in modules.items()
        ]
        self._hooks = [
            recorder.module.register_forward_pre_hook(partial(self._record, recorder))
            for recorder in self._recorders
        ]

    @property
    def layers(self) -> list[LayerBalance]:
        """The results of each layer, in the order of the model. Synchronizes with the GPU."""
        return [recorder.result() for recorder in self._recorders]

    def loss(self) -> Tensor:
        """Computes the sum of `losses`, a scalar on the device of the first layer.

        Raises:
            ValueError: see `losses`.
        """
        losses = list(self.losses().values())
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    def losses(self) -> dict[str, Tensor]:
        """Computes L_importance of each layer (Eq. 7), for its last forward pass, with gradients.

        The loss of a layer is L_importance = w_importance · CV(Importance(X))², where Importance(X)
        sums the routing weights of the chosen experts. With p_e, the share of expert e in the sum::

            CV(Importance(X))² = E Σ_e p_e² - 1

        The loss is 0 if the experts of each layer have equal importance. The function
        ``load_balancing_loss_func`` of transformers differs in three ways. It computes
        E Σ_e f_e P_e from the tokens f_e and the mean probability P_e, where f_e sums to K. It
        pools f_e and P_e over all layers, so the imbalances of two layers can cancel. Its gradient
        reaches the probabilities of all experts, not only of the chosen ones.

        Add the sum of the losses to the loss of each micro-batch. ``Trainer`` can divide the task
        loss by the tokens of all ranks and multiply the result by the world size. To keep the
        balancing loss as it is, add it to the result of ``super().compute_loss``. The model and
        ``compute_loss_func`` would add it before the multiplication.

        If the router normalizes the weights and K = 1, all weights are 1. The gradient is then 0.

        Returns:
            A scalar for each experts module that ran, by name, in the order of the model.

        Raises:
            ValueError: w_importance is 0, or no layer ran.
        """
        require(self.w_importance > 0, "ModelBalance.losses: w_importance", "be above 0", 0)
        losses = {
            recorder.name: importance_loss(recorder.last_importance, self.w_importance)
            for recorder in self._recorders
            if recorder.last_importance is not None
        }
        require(
            bool(losses), "ModelBalance.losses: model", "run a forward pass before the loss", None
        )
        return losses

    def reset(self) -> None:
        """Sets all results to 0, to begin a new measurement."""
        for recorder in self._recorders:
            recorder.reset()

    def remove(self) -> None:
        """Removes the hooks. The results stay."""
        for hook in self._hooks:
            hook.remove()

    def table(self) -> str:
        """Formats the results as text, one row for each layer."""
        header = ["layer", "experts", "idle", "tokens", "cv_importance", "cv_load", "max/mean load"]
        rows = [header, *map(_row, self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(_aligned(row, widths)) for row in rows)

    def plot(self, path: str | Path) -> None:
        """Plots the load of each expert, divided by the mean load of its layer, as a heat map.

        Args:
            path: the file to write. Its suffix sets the format, such as ".png" or ".svg".

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise ImportError(
                "ModelBalance.plot: matplotlib must be installed (pip install matplotlib), "
                f"got: {error}"
            ) from error
        layers = self.layers
        shares = torch.full((len(layers), max(layer.num_experts for layer in layers)), torch.nan)
        for row, layer in zip(shares, layers, strict=True):
            load = layer.load.cpu().double()
            row[: len(load)] = load / load.mean().clamp_min(1e-30)
        height, width = shares.shape
        figure = Figure(figsize=(6 + width / 16, 1.5 + height / 4), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares.numpy(), aspect="auto", vmin=0)
        axes.set_xlabel("expert")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_yticks(range(height), [layer.name for layer in layers], fontsize=8)
        figure.colorbar(image, label="load / mean load")
        figure.savefig(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def _record(
        self, recorder: "_Recorder", module: nn.Module, arguments: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """Records the arguments of an experts module."""
        _, expert_index, gates = arguments
        mask = self.mask
        if mask is not None:
            if mask.numel() != len(gates):
                raise ValueError(
                    f"ModelBalance: mask must have one element for each of the {len(gates)} "
                    f"tokens, got shape {tuple(mask.shape)}"
                )
            mask = mask.to(gates.device).reshape(-1, 1).bool()
        recorder.add(gates, expert_index, mask)
        if self.w_importance > 0:
            recorder.set_last_importance(gates, expert_index, mask)


class _Recorder:
    """Holds the sums of one experts module, and the importance of its last forward pass."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        parameter = next(module.parameters(), torch.empty(0))
        self.num_experts = cast(int, module.num_experts)
        if isinstance(parameter, DTensor):  # num_experts may be the number of this rank's experts
            self.num_experts = parameter.shape[0]
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        # Outside inference mode, inference tensors could not be changed.
        with torch.inference_mode(False):
            # Float64 holds counts up to 2^53 exactly.
            self.importance = torch.zeros(self.num_experts, dtype=torch.float64, device=device)
            self.load = torch.zeros_like(self.importance)
            self.num_tokens = self.importance.new_zeros(())
        self.last_importance: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the tensor with a graph, which a copy of the model cannot have."""
        return vars(self) | {"last_importance": None}

    def reset(self) -> None:
        for total in (self.importance, self.load, self.num_tokens):
            total.zero_()
        self.last_importance = None

    def result(self) -> LayerBalance:
        importance, load = self.importance.clone(), self.load.long()
        return LayerBalance(self.name, importance, load, int(self.num_tokens))

    def add(self, gates: Tensor, expert_index: Tensor, mask: Tensor | None) -> None:
        """Adds the routing of a forward pass to the sums."""
        _add_routing(
            self.importance, self.load, self.num_tokens, gates.detach(), expert_index, mask
        )

    def set_last_importance(self, gates: Tensor, expert_index: Tensor, mask: Tensor | None) -> None:
        """Computes the importance with gradients.

        A recomputed forward pass must save the same tensors for backward as the first one, so it
        computes the importance too.
        """
        gates = gates.to(ops.accumulation_dtype(gates))
        importance = _importance(gates, expert_index, mask, self.num_experts)
        if torch.compiler.is_compiling() or not _in_backward():
            self.last_importance = importance
        elif importance.requires_grad and not self._has_gradient():
            raise ValueError(
                "balance: w_importance must be 0 with reentrant gradient checkpointing, which "
                "computes no gradient of the loss; pass use_reentrant=False"
            )

    def _has_gradient(self) -> bool:
        return self.last_importance is not None and self.last_importance.requires_grad


def _importance(
    gates: Tensor, expert_index: Tensor, mask: Tensor | None, num_experts: int
) -> Tensor:
    """Sums gates [T, K] by expert, [E], without the rows that mask [T, 1] excludes.

    With transformers' expert parallelism, an index of E or more means an expert of another rank.
    """
    if mask is not None:
        gates = gates.where(mask, 0)
    expert_index = expert_index.long().clamp(max=num_experts)
    return ops.importance(gates, expert_index, num_experts + 1)[:num_experts]


# As an operator, this function also runs in compiled models, where it sees recomputation too.
@torch.library.custom_op(
    "moe_ext_integrations::add_routing", mutates_args=("importance", "load", "num_tokens")
)
def _add_routing(
    importance: Tensor,
    load: Tensor,
    num_tokens: Tensor,
    gates: Tensor,
    expert_index: Tensor,
    mask: Tensor | None,
) -> None:
    """Adds the routing of a forward pass to the sums, unless the pass is recomputed."""
    if _in_backward():
        return
    importance += _importance(gates.double(), expert_index, mask, len(importance)).to(importance)
    # Load(X) counts the gates that are not 0 (Sec. 4): Zaya gives tokens without an expert a 0.
    load += _importance((gates != 0).double(), expert_index, mask, len(load)).to(load)
    num_tokens += len(gates) if mask is None else mask.sum().to(num_tokens)


_add_routing.register_fake(lambda *_: None)  # it returns nothing, and makes no tensor


def _row(layer: LayerBalance) -> list[str]:
    """Formats a row of the table."""
    counts = [layer.num_experts, layer.num_idle, layer.num_tokens]
    values = [layer.cv_importance, layer.cv_load, layer.max_over_mean_load]
    return [layer.name, *(f"{n:,}" for n in counts), *(f"{value:.3f}" for value in values)]


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    """Pads the cells of a row: the first to the left, the others to the right."""
    first, *numbers = map(str.rjust, row, widths)
    return [first.strip().ljust(widths[0]), *numbers]
