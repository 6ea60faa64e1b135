"""Memory, network traffic and time of a model whose experts are sharded over devices (Sec. 3).

Every device has a replica of the dense parameters, a shard of the experts, and its own tokens. The
counts of parameters, operations and bytes are exact if all experts get equally many tokens. The
activation memory is an estimate. Times assume peak throughput, except those of an `Efficiency`.
"""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from moe_ext import FeedForwardExperts, MoE
from moe_ext.checks import require, require_one_of, require_sizes
from moe_ext.distributed import ExchangeUnit, ExpertPlacement, Placement
from moe_ext.gates import StrictlyBalancedGate
from moe_ext.optim import split_parameters
from moe_lab.analysis.costs import training_flops
from moe_lab.analysis.devices import Device
from moe_lab.benchmarks.roofline import Work, limit
from moe_lab.models import LanguageModel
from moe_lab.models.lstm import LSTM
from moe_lab.models.parts import require_values
from moe_lab.training.config import Config


@dataclass(frozen=True)
class Efficiency:
    """The fractions of a device's peak throughput that its GEMMs reach.

    A GEMM of an expert with M rows reaches M / (M + half_rows) of the fraction `experts`.
    """

    dense: float = 1.0  # outside the experts
    experts: float = 1.0  # in an expert with very many rows
    half_rows: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dense", "experts"):
            value = getattr(self, name)
            require(0 < value <= 1, f"Efficiency: {name}", "be in (0, 1]", value)
        require(self.half_rows >= 0, "Efficiency: half_rows", "be at least 0", self.half_rows)


# Fitted to the TFLOPS per device of the 15 mixtures in Tables 7 and 8, on the device k40: the
# largest ratio of predicted and published is 1.26.
PAPER = Efficiency(dense=0.31, experts=0.71, half_rows=1360)


def exchange_bytes(
    rows: float,
    copies: float,
    d_input: int,
    d_output: int,
    itemsize: int,
    exchange: str,
    gate_itemsize: int = 4,
    secondary: tuple[int, float] | None = None,
    balanced: bool = False,
) -> tuple[float, float]:
    """Counts the bytes that a layer sends to other ranks, in forward and in backward (Sec. 3.2).

    Forward sends x to the experts and y back; backward sends the gradients of x and y. With
    exchange="tokens", forward also sends the gates and an int32 index for each row, and backward
    sends the gradients of the gates.

    With placement="groups", the same holds for groups in place of experts. Forward also sends the
    noise of a secondary gate, and returns the gates and int32 indices of k2 experts. Backward sends
    the gradients of these gates. A strictly balanced gate has no noise. It returns the number of
    experts of each row as int32.

    Args:
        rows: number of (token, expert) assignments to experts on other ranks.
        copies: number of (token, rank) pairs in these assignments.
        d_input, d_output: widths of the experts.
        itemsize: bytes of an element of x and y.
        exchange: "rows" or "tokens"; see ``moe_ext.distributed.Exchange``.
        gate_itemsize: bytes of a gate.
        secondary: (b, k2), the experts of a group and those of a chosen group that a token uses,
            with placement="groups"; exchange has then no effect. None: placement="experts".
        balanced: whether the gate with `secondary` is strictly balanced; k2 is then a mean.
    """
    if exchange == "rows" and secondary is None:
        round_trip = rows * (d_input + d_output) * itemsize
        return round_trip, round_trip
    round_trip = copies * (d_input + d_output) * itemsize
    b, k2 = secondary or (0, 0)
    forward = gate_itemsize + 4 + (4 if balanced else b * gate_itemsize) + k2 * (gate_itemsize + 4)
    backward = gate_itemsize + k2 * gate_itemsize
    return round_trip + rows * forward, round_trip + rows * backward


def mask_bytes(scores: float, num_devices: int, itemsize: int = 4) -> float:
    """Counts the bytes that a device sends for the batchwise masks of strictly balanced gates.

    Each device selects the rows of some experts. It receives the scores of all rows for these
    experts, and returns one byte for each. `scores` is the number of the device's own scores.
    """
    return scores * (itemsize + 1) * (1 - 1 / num_devices)


def leaving(placement: ExpertPlacement, k: int) -> tuple[float, float]:
    """Computes a token's ``rows`` and ``copies`` of `exchange_bytes`, for uniform routing."""
    size, group = placement.num_ranks, placement.experts_per_group
    choices = placement.num_experts // group
    # Rank q has none of the k choices in C(choices - choices of q, k) of C(choices, k) cases.
    reached = sum(
        1 - math.comb(choices - number // group, k) / math.comb(choices, k)
        for number in placement.counts
    )
    elsewhere = 1 - 1 / size  # the mean over the token's ranks
    return (k if group == 1 else k**2) * elsewhere, reached * elsewhere


@dataclass(frozen=True)
class Plan:
    """A cluster plan: the cost of a training step for the device with the most experts.

    Bytes, operations and seconds are those of this device in a step.
    """

    num_devices: int
    num_experts: int  # of a layer, on all devices
    tokens: int
    dense_parameters: int  # that every device has, with embedding and softmax
    expert_parameters: int  # on all devices together
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # estimated; saved for backward of one batch
    exchange_bytes: float  # sent for experts and batchwise masks, forward and backward
    reduce_bytes: float  # sent in the ring all-reduce of the dense gradients: 2 (d - 1) / d of them
    flops: float
    # Forward operations of an expert per byte of its rows on the network, if all rows are remote.
    # With one hidden layer, this is 2 · hidden width / itemsize.
    expert_intensity: float
    device_intensity: float  # flops / link; if it is greater, sending takes longer than computing
    # max(flops / peak, bytes / memory bandwidth). The bytes are two reads of the weights, one write
    # of the gradients, and one write and one read of the activations.
    compute_seconds: float
    optimizer_seconds: float  # to read and write weights, gradients and optimizer state
    network_seconds: float  # (exchange_bytes + reduce_bytes) / link
    flops_seconds: float  # flops / peak
    expert_flops: float  # the part of flops that the experts compute
    expert_rows: float  # mean number of rows of an expert in one batch, from all devices
    imbalance: float  # experts of this device, divided by the mean over the devices
    vocabulary_bytes: float  # the part of reduce_bytes of embedding and softmax

    @property
    def memory_bytes(self) -> int:
        weights = self.parameter_bytes + self.gradient_bytes
        return weights + self.optimizer_bytes + self.activation_bytes

    def step_seconds(self, *, overlap: bool) -> float:
        """Computes the seconds of a step; overlap=True sends data during the computation."""
        parts = self.compute_seconds, self.network_seconds
        return (max(parts) if overlap else sum(parts)) + self.optimizer_seconds

    def expected_seconds(self, device: Device, efficiency: Efficiency) -> float:
        """Estimates the seconds of a step, without overlap, from the efficiency of GEMMs.

        The step waits for the device with the most experts. The gradients of embedding and softmax
        are not sent: as in the paper, few words of the vocabulary have one. Elementwise operations
        count as a part of the GEMMs, so they need no time of their own.
        """
        filled = self.expert_rows / (self.expert_rows + efficiency.half_rows)
        dense = (self.flops - self.expert_flops) / efficiency.dense
        experts = self.imbalance * self.expert_flops / (efficiency.experts * filled)
        sent = self.imbalance * self.exchange_bytes + self.reduce_bytes - self.vocabulary_bytes
        return (dense + experts) / device.flops + sent / device.link + self.optimizer_seconds

    def efficiency(self, *, overlap: bool) -> float:
        """Computes the time of a step without network traffic, divided by the time of the step.

        This is the weak-scaling efficiency: every added device has its own tokens.
        """
        return (self.compute_seconds + self.optimizer_seconds) / self.step_seconds(overlap=overlap)

    def share_of_peak(self, *, overlap: bool) -> float:
        return self.flops_seconds / self.step_seconds(overlap=overlap)


def plan(
    config: Config,
    device: Device,
    num_devices: int,
    *,
    exchange: str = "rows",
    placement: Placement | None = None,
) -> Plan:
    """Computes the cost of a training step with the experts sharded over `num_devices` devices.

    Weights and gradients have the dtypes of the model; the optimizer state is float32. With
    autocast, activations and network traffic are bfloat16. Each device has data.tokens_per_batch
    tokens. ``moe_ext.distributed.ExpertParallel`` explains `exchange` and `placement`.
    """
    require_one_of("plan: exchange", get_args(ExchangeUnit), exchange)
    require_sizes("plan", num_devices=num_devices)
    kinds = config.model.layers
    require(
        "moe" in kinds and "moe_lstm" not in kinds,
        "plan: config.model.layers",
        'contain "moe" and must not contain "moe_lstm"',
        kinds,
    )
    with torch.device("meta"):
        model = LanguageModel(config.model, config.data.vocab_size)
    layers = [layer for layer in model.layers if isinstance(layer, MoE)]  # all alike
    moe = config.model.moe
    off = {"num_identity_experts": 0, "num_null_experts": 0}
    require_values(moe, off, prefix="plan: config.model.moe.")
    weights = list(layers[0].experts.parameters())
    d_input, d_output = weights[0].shape[1], weights[-1].shape[2]
    num_experts, k = moe.num_experts, moe.experts_per_token
    batch = config.data.tokens_per_batch
    batches = config.optimizer.accumulate
    itemsize = 2 if config.autocast else 4
    row_itemsize = min(itemsize, weights[0].itemsize)

    # Numbers of parameters and of elements of the optimizer state.
    group = num_experts // moe.num_groups if moe.num_groups else 1
    expert_placement = ExpertPlacement(num_experts, num_devices, group)
    by_groups = placement != "experts" and layers[0].gate.shares_groups
    balanced = isinstance(layers[0].gate, StrictlyBalancedGate)
    share = max(expert_placement.counts)
    expert = sum(weight[0].numel() for weight in weights)
    gate_parameters = layers[0].gate.named_parameters()
    secondary = sum(p.numel() for name, p in gate_parameters if name.endswith("_secondary"))
    beside = len(layers) * secondary // num_experts if by_groups else 0  # each expert's part
    everything = sum(p.numel() for p in model.parameters())
    dense = everything - len(layers) * num_experts * expert - num_experts * beside
    local = dense + share * (len(layers) * expert + beside)
    expert_bytes = len(layers) * expert * weights[0].itemsize + beside * 4
    dense_bytes = sum(p.nbytes for p in model.parameters()) - num_experts * expert_bytes
    local_bytes = dense_bytes + share * expert_bytes
    averages = 2 * local - _averages_saved(config, model, share)

    # Cost of each token; activations of experts are on the ranks of the experts.
    if by_groups:
        exchange, row_placement = "tokens", ExpertPlacement(moe.num_groups, num_devices)
    else:
        row_placement = expert_placement
    rows, copies = leaving(row_placement, moe.k)
    sent = exchange_bytes(
        rows,
        copies,
        d_input,
        d_output,
        row_itemsize,
        exchange,
        secondary=(group, moe.k) if by_groups else None,
        balanced=balanced and by_groups,
    )
    masked = 0.0
    if balanced:
        num_secondary = moe.k * group if moe.num_groups and not by_groups else 0
        masked = mask_bytes((moe.num_groups or num_experts) + num_secondary, num_devices)
    travelling = k * (d_input + (d_output if exchange == "rows" else 0)) if num_devices > 1 else 0
    kept = _kept_of_token(config, model, group, travelling)
    token_flops = training_flops(model)
    again = 0  # recomputed
    if moe.recompute:
        again = 2 * len(layers) * k * sum(weight[0].numel() for weight in weights[:-1])

    tokens = batch * batches
    flops = float((token_flops.total + again) * tokens)
    activation_bytes = itemsize * kept * batch
    bytes_moved = batches * (3 * local_bytes + 2 * activation_bytes)
    exchanged = len(layers) * (sum(sent) + masked) * tokens
    reduced = 2 * (1 - 1 / num_devices) * dense_bytes
    words = (*model.embedding.parameters(), *model.softmax.parameters())
    return Plan(
        num_devices=num_devices,
        num_experts=num_experts,
        tokens=tokens,
        dense_parameters=dense,
        expert_parameters=everything - dense,
        parameter_bytes=local_bytes,
        gradient_bytes=local_bytes,
        optimizer_bytes=4 * averages,
        activation_bytes=activation_bytes,
        exchange_bytes=exchanged,
        reduce_bytes=reduced,
        flops=flops,
        expert_intensity=2 * expert / ((d_input + d_output) * row_itemsize),
        device_intensity=device.flops / device.link,
        compute_seconds=limit(Work(flops, bytes_moved), device.flops, device.memory_bandwidth),
        optimizer_seconds=(3 * local_bytes + 2 * 4 * averages) / device.memory_bandwidth,
        network_seconds=(exchanged + reduced) / device.link,
        flops_seconds=flops / device.flops,
        expert_flops=float((token_flops.experts + again) * tokens),
        expert_rows=batch * num_devices * k / num_experts,
        imbalance=share * num_devices / num_experts,
        vocabulary_bytes=2 * (1 - 1 / num_devices) * sum(p.nbytes for p in words),
    )


def _averages_saved(config: Config, model: LanguageModel, share: int) -> int:
    """Counts the moments that FactoredAdam does not store, on a device with `share` experts."""
    saved = 0
    if config.optimizer.experts == "factored_adam":
        for weight in split_parameters(model).experts:  # of MoE and dense layers
            number = share if len(weight) == config.model.moe.num_experts else len(weight)
            saved += number * (2 * weight[0].numel() - sum(weight[0].shape))
    if config.optimizer.embedding == "factored_adam":
        for matrix in (model.embedding.weight, model.softmax.weight):
            saved += 2 * matrix.numel() - sum(matrix.shape)
        saved += model.softmax.bias.numel()
    return saved


def _kept_of_token(config: Config, model: LanguageModel, group: int, travelling: int) -> int:
    """Counts the elements saved for backward of a token."""
    moe, d_model = config.model.moe, config.model.d_model
    logits = moe.num_groups + moe.k * group if moe.num_groups else moe.num_experts
    dropouts = len(model.layers) + 1 if config.model.dropout else 0
    kept = (2 + dropouts) * d_model  # 2: embedding, softmax
    for layer in model.layers:
        if isinstance(layer, MoE):
            hidden = sum(weight.shape[2] for weight in list(layer.experts.parameters())[:-1])
            # x, sigmoid(y); noise, noise_stddev, noisy and clean logits
            kept += 2 * d_model + 4 * logits + travelling
            kept += 0 if moe.recompute else moe.experts_per_token * hidden
        else:
            kept += _kept(layer)
    return kept


def _kept(layer: nn.Module) -> int:
    """Counts the elements that a dense layer saves for backward of a token."""
    if isinstance(layer, LSTM):
        lstm = layer.lstm  # torch on the CPU saves 4 gates before and after, and their products
        projected = lstm.proj_size if layer.projection is None else lstm.hidden_size
        return lstm.input_size + 16 * lstm.hidden_size + projected
    assert isinstance(layer, FeedForwardExperts)
    widths = [weight.shape[2] for weight in layer.weights]
    return layer.weights[0].shape[1] + sum(widths) + widths[-1]
