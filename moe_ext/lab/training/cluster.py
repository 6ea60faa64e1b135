"""What a model takes of the devices that share its experts: memory, network, time (Sec. 3).

Every device has a copy of the dense parameters, a share of the experts and tokens of its own. The
counts of parameters, operations and bytes are exact, where tokens choose each expert as often; what
is kept for the backward pass is an estimate, and times are those of a device at its best.
"""

import math
from dataclasses import dataclass
from typing import get_args

import torch
from torch import nn

from moe_ext import FeedForwardExperts, MoE
from moe_ext.checks import require, require_at_least
from moe_ext.distributed import ExchangeUnit, ExpertPlacement
from moe_ext.lab.analysis.costs import training_flops
from moe_ext.lab.benchmarks.roofline import Work, limit
from moe_ext.lab.models import LanguageModel
from moe_ext.lab.models.lstm import LSTM
from moe_ext.lab.training.config import Config
from moe_ext.optim import split_parameters


@dataclass(frozen=True)
class Device:
    """One of the devices.

    Attributes:
        flops: floating-point operations a second, two a multiply-add.
        memory: bytes.
        memory_bandwidth: bytes a second.
        link: bytes a second to the other devices, and as many from them.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    link: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value > 0, f"Device: {name}", "be positive", value)


# Peaks by their makers, of float32 and of bfloat16; links between machines. The paper does not name
# its network: 10 Gb/s make the "thousands to one" of Sec. 3.2.
DEVICES = {
    "k40": Device(4.29e12, 12e9, 288e9, 1.25e9),
    "a100": Device(312e12, 80e9, 2.04e12, 25e9),
    "h200": Device(989e12, 141e9, 4.8e12, 50e9),
}


def exchange_bytes(
    rows: float,
    copies: float,
    d_input: int,
    d_output: int,
    itemsize: int,
    exchange: str,
    gate_itemsize: int = 4,
) -> tuple[float, float]:
    """Bytes that must leave processes in a layer's forward, and in its backward pass (Sec. 3.2).

    Forward, x goes out and y comes back; backward, their gradients the other way. With
    exchange="tokens" so do the gates, and with them goes an int64 index of the copy.

    Args:
        rows: (token, expert) pairs of which the expert is in another process.
        copies: (token, process) pairs of these.
        d_input, d_output: the experts' widths.
        itemsize: bytes of an element of x and y.
        exchange: see `moe_ext.distributed.exchange.Exchange`.
        gate_itemsize: bytes of a gate.
    """
    if exchange == "rows":
        both = rows * (d_input + d_output) * itemsize
        return both, both
    both = copies * (d_input + d_output) * itemsize
    return both + rows * (gate_itemsize + 8), both + rows * gate_itemsize


def leaving(placement: ExpertPlacement, k: int) -> tuple[float, float]:
    """Rows and copies of a token that leave its process, if all choices of experts are as likely.

    Args:
        placement: of the experts.
        k: experts of a token; of a hierarchical mixture, groups, in each of which it has k.
    """
    size, group = placement.num_ranks, placement.experts_per_group
    choices = placement.num_experts // group
    # Process q has none of the k choices in C(choices - its own, k) of C(choices, k) cases.
    reached = sum(
        1 - math.comb(choices - number // group, k) / math.comb(choices, k)
        for number in placement.counts
    )
    elsewhere = 1 - 1 / size  # the mean over the processes
    return (k if group == 1 else k**2) * elsewhere, reached * elsewhere


@dataclass(frozen=True)
class Plan:
    """A training step on so many devices. Memory is that of the device with most experts.

    Attributes:
        num_devices, num_experts: all of them.
        tokens: of a device, in one step.
        dense_parameters, expert_parameters: of the model, those that all devices have, embedding
            and softmax among them, and the others.
        parameter_bytes, gradient_bytes, optimizer_bytes: of a device.
        activation_bytes: what is kept for the backward pass of a batch, roughly.
        exchange_bytes: sent by a device in a step, to the experts and back.
        reduce_bytes: sent to average the dense gradients: 2 (d - 1) / d of them, in a ring.
        flops: of a device.
        expert_intensity: operations of the experts, forward, by bytes that their rows need on the
            wire where none is at home: with one hidden layer, its width · 2 / itemsize.
        device_intensity: flops by link. Where it is larger, sending takes longer than computing.
        compute_seconds: max(flops / peak, bytes / memory bandwidth), forward and backward: weights
            are read twice and their gradients written, and what is kept is written and read.
        optimizer_seconds: reading and writing weights, gradients and averages.
        network_seconds: all that is sent / link.
        flops_seconds: flops / peak alone.
    """

    num_devices: int
    num_experts: int
    tokens: int
    dense_parameters: int
    expert_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    exchange_bytes: float
    reduce_bytes: float
    flops: float
    expert_intensity: float
    device_intensity: float
    compute_seconds: float
    optimizer_seconds: float
    network_seconds: float
    flops_seconds: float

    @property
    def memory_bytes(self) -> int:
        """Of a device."""
        weights = self.parameter_bytes + self.gradient_bytes
        return weights + self.optimizer_bytes + self.activation_bytes

    def step_seconds(self, *, overlap: bool) -> float:
        """Computing, then sending: the sum; or at best at the same time: the maximum."""
        both = self.compute_seconds, self.network_seconds
        return (max(both) if overlap else sum(both)) + self.optimizer_seconds

    def efficiency(self, *, overlap: bool) -> float:
        """The same step without anything to send, by this one: as the paper's devices are added."""
        return (self.compute_seconds + self.optimizer_seconds) / self.step_seconds(overlap=overlap)

    def share_of_peak(self, *, overlap: bool) -> float:
        """flops / peak, by the step."""
        return self.flops_seconds / self.step_seconds(overlap=overlap)


def plan(
    config: Config,
    device: Device,
    num_devices: int,
    *,
    exchange: str = "rows",
    split_gates: bool = False,
) -> Plan:
    """A training step of `config` with its experts shared by `num_devices`.

    Args:
        config: with data.tokens_per_batch tokens on each device and data.vocab_size classes.
            Weights and gradients are of the types of the model's own, averages float32; with
            autocast, what is kept and sent is bfloat16.
        device: one of them.
        num_devices: d.
        exchange: see `moe_ext.distributed.exchange.Exchange`.
        split_gates: the secondary gates of a hierarchical mixture are where their groups are
            (Sec. 3.1); `HierarchicalMoE` has all of them in every process.

    Raises:
        ValueError: exchange or num_devices is out of range, or the layers have no MoE.
    """
    units = get_args(ExchangeUnit)
    require(exchange in units, "plan: exchange", f"be one of {', '.join(units)}", exchange)
    require_at_least(1, "plan", num_devices=num_devices)
    kinds = config.model.layers
    require(
        "moe" in kinds and "moe_lstm" not in kinds, "plan: layers", "have moe, not moe_lstm", kinds
    )
    with torch.device("meta"):
        model = LanguageModel(config.model, config.data.vocab_size)
    layers = [layer for layer in model.layers if isinstance(layer, MoE)]  # all alike
    moe = config.model.moe
    weights = list(layers[0].experts.parameters())
    d_input, d_output = weights[0].shape[1], weights[-1].shape[2]
    num_experts, k = moe.num_experts, moe.experts_per_token
    batch = config.data.tokens_per_batch
    batches = config.optimizer.accumulate
    itemsize = 2 if config.autocast else 4
    row_itemsize = min(itemsize, weights[0].itemsize)

    # Parameters and what the optimizers keep of them, in numbers.
    group = num_experts // moe.num_groups if moe.num_groups else 1
    placement = ExpertPlacement(num_experts, num_devices, group)
    share = max(placement.counts)
    expert = sum(weight[0].numel() for weight in weights)
    gate_parameters = layers[0].gate.named_parameters()
    secondary = sum(p.numel() for name, p in gate_parameters if name.endswith("_secondary"))
    beside = len(layers) * secondary // num_experts if split_gates else 0  # each expert's part
    everything = sum(p.numel() for p in model.parameters())
    dense = everything - len(layers) * num_experts * expert - num_experts * beside
    local = dense + share * (len(layers) * expert + beside)
    expert_bytes = len(layers) * expert * weights[0].itemsize + beside * 4
    dense_bytes = sum(p.nbytes for p in model.parameters()) - num_experts * expert_bytes
    local_bytes = dense_bytes + share * expert_bytes
    averages = 2 * local - _averages_saved(config, model, share)

    # Of each token: what goes through the experts is on the owner's side.
    rows, copies = leaving(placement, moe.k)
    sent = exchange_bytes(rows, copies, d_input, d_output, row_itemsize, exchange)
    travelling = k * (d_input + (d_output if exchange == "rows" else 0)) if num_devices > 1 else 0
    kept = _kept_of_token(config, model, group, travelling)
    flops_of_token = training_flops(model).total
    if moe.recompute:
        flops_of_token += 2 * len(layers) * k * sum(weight[0].numel() for weight in weights[:-1])

    tokens = batch * batches
    flops = float(flops_of_token * tokens)
    activation_bytes = itemsize * kept * batch
    bytes_moved = batches * (3 * local_bytes + 2 * activation_bytes)
    exchanged = len(layers) * sum(sent) * tokens
    reduced = 2 * (1 - 1 / num_devices) * dense_bytes
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
    )


def _averages_saved(config: Config, model: LanguageModel, share: int) -> int:
    """How many averages factored optimizers do without, of a device with that many experts."""
    saved = 0
    if config.optimizer.experts == "factored_adam":
        for weight in split_parameters(model).experts:  # of mixtures, and of dense layers
            number = share if len(weight) == config.model.moe.num_experts else len(weight)
            saved += number * (2 * weight[0].numel() - sum(weight[0].shape))
    if config.optimizer.embedding == "factored_adam":
        for matrix in (model.embedding.weight, model.softmax.weight):
            saved += 2 * matrix.numel() - sum(matrix.shape)
        saved += model.softmax.bias.numel()
    return saved


def _kept_of_token(config: Config, model: LanguageModel, group: int, travelling: int) -> int:
    """Numbers kept of a token for the backward pass.

    Args:
        config, model: the model.
        group: experts of a group.
        travelling: the numbers of a token's rows that come to a layer's experts, and go.
    """
    moe, d_model = config.model.moe, config.model.d_model
    logits = moe.num_groups + moe.k * group if moe.num_groups else moe.num_experts
    dropouts = len(model.layers) + 1 if config.model.dropout else 0
    kept = (2 + dropouts) * d_model  # 2: embedding, softmax
    for layer in model.layers:
        if isinstance(layer, MoE):
            hidden = sum(weight.shape[2] for weight in list(layer.experts.parameters())[:-1])
            # x, sigmoid(y); noise and its deviation, logits with and without it
            kept += 2 * d_model + 4 * logits + travelling
            kept += 0 if moe.recompute else moe.experts_per_token * hidden
        else:
            kept += _kept(layer)
    return kept


def _kept(layer: nn.Module) -> int:
    """Numbers that a dense layer keeps of a token for the backward pass."""
    if isinstance(layer, LSTM):
        lstm = layer.lstm  # as torch has it on the CPU: 4 gates before and after, their products
        projected = lstm.proj_size if layer.projection is None else lstm.hidden_size
        return lstm.input_size + 16 * lstm.hidden_size + projected
    assert isinstance(layer, FeedForwardExperts)
    widths = [weight.shape[2] for weight in layer.weights]
    return layer.weights[0].shape[1] + sum(widths) + widths[-1]
