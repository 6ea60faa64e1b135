"""Memory and time of training a transformer with mixtures of experts on a mesh of accelerators.

The mesh has the dimensions of torchtitan: pipeline stages (pp), tensor parallelism (tp) and data
parallelism (dp). The experts of a stage are sharded over ep of its dp · tp devices, and over the
dp · tp / ep replicas of each shard (efsdp).

Weights have a bfloat16 copy, gradients float32, master weights and moments of Adam 12 bytes. Times
add up: no transfer overlaps with computation. Limits: stages are equally long, experts equally
chosen up to `imbalance`, links never congested, no step is lost, and data, optimizer and
checkpoints take no time. `GEMM` and `MOVES` are fitted to published throughputs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

from moe_ext.distributed import ExpertPlacement
from moe_lab.analysis.cluster import leaving
from moe_lab.analysis.devices import Accelerator


@dataclass(frozen=True)
class Transformer:
    """The sizes of a decoder with mixtures of gated experts (three matrices)."""

    layers: int
    d_model: int
    attention: float  # parameters of attention in a layer
    heads: int  # the widths of queries and values, added up over the heads
    num_experts: int
    k: int
    hidden: int
    vocabulary: int
    shared: int = 0  # hidden width of the shared expert of a mixture
    dense_layers: int = 0  # layers without a mixture
    dense_hidden: int = 0  # their hidden width

    @property
    def experts(self) -> float:
        """The parameters of all routed experts."""
        return (self.layers - self.dense_layers) * self.num_experts * 3 * self.d_model * self.hidden

    @property
    def dense(self) -> float:
        """The other parameters, with embedding and softmax."""
        return self.in_layers + 2 * self.vocabulary * self.d_model

    @property
    def in_layers(self) -> float:
        """The other parameters of the layers."""
        widths = 3 * self.shared + self.num_experts
        ffn = (self.layers - self.dense_layers) * widths + self.dense_layers * 3 * self.dense_hidden
        return self.layers * self.attention + self.d_model * ffn

    def flops(self, sequence: int) -> tuple[float, float]:
        """Forward operations of a token: outside the experts, with attention; and in them."""
        softmax = 2 * self.vocabulary * self.d_model
        attended = self.layers * sequence * self.heads  # half of the scores
        routed = 2 * self.experts * self.k / self.num_experts
        return 2 * self.in_layers + softmax + attended, routed


# Of config.json of the models. Attention of DeepSeek-V3 and Kimi-K2 is compressed (MLA).
TRANSFORMERS = {
    "gpt-oss-120b": Transformer(36, 2880, 26.5e6, 8192, 128, 4, 2880, 201088),
    "qwen3-235b": Transformer(94, 4096, 71.3e6, 16384, 128, 8, 1536, 151936),
    "deepseek-v3": Transformer(61, 7168, 187e6, 40960, 256, 8, 2048, 129280, 2048, 3, 18432),
    "kimi-k2": Transformer(61, 7168, 101e6, 20480, 384, 8, 2048, 163840, 2048, 1, 18432),
}


@dataclass(frozen=True)
class Mesh:
    pp: int
    tp: int
    dp: int
    ep: int
    sequences: int = 1  # in a micro-batch
    vp: int = 1  # number of parts of the model that a stage interleaves
    # Whether replicas share weights and gradients too (FSDP), not only the optimizer state. They
    # are then gathered twice for each micro-batch.
    sharded: bool = False
    recompute: bool = False  # whether the backward pass recomputes each layer

    @property
    def efsdp(self) -> int:
        """The number of replicas of each shard of the experts."""
        return self.dp * self.tp // self.ep


@dataclass(frozen=True)
class Step:
    """The estimate of a step: bytes of an accelerator, and seconds by what takes them."""

    memory: float
    seconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


# Fitted to the throughputs in the performance summary of NVIDIA's Megatron-Bridge (25.11, all
# bfloat16 mixtures): the largest ratio of predicted and published is 1.29 (lab/tests/test_mesh.py).
GEMM = 0.65  # the share of the peak that long GEMMs reach
MOVES = 12  # how often each activation is read or written in a forward pass


def estimate(
    model: Transformer,
    device: Accelerator,
    mesh: Mesh,
    tokens: int,
    sequence: int = 4096,
    imbalance: float = 1.0,
) -> Step:
    """Estimates a training step.

    tokens: of the step, on all accelerators. sequence: the length of a sequence. imbalance: the
    rows of the busiest experts, divided by the mean.
    """
    pp, tp, dp, ep = mesh.pp, mesh.tp, mesh.dp, mesh.ep
    batch = mesh.sequences * sequence  # the tokens of a micro-batch on tp devices
    own_tokens = batch / tp
    micro_batches = tokens / (dp * batch)
    d, passes = model.d_model, 3 + mesh.recompute
    layers, mixtures = model.layers / pp, (model.layers - model.dense_layers) / pp

    # GEMMs read their weights while they do not compute, so few rows are slow.
    def gemms(flops: float, rows: float) -> float:
        peak = GEMM * device.flops
        return flops / peak * (1 + peak / device.memory_bandwidth / rows)

    dense_flops, expert_flops = (passes * own_tokens / pp * f for f in model.flops(sequence))
    rows = own_tokens * ep * model.k / model.num_experts
    saved = 2 * (4 * d + model.heads + model.k * (d + 3 * model.hidden) + 3 * model.shared)
    elementwise = MOVES * passes * own_tokens * layers * saved / device.memory_bandwidth

    # All-to-all: each token once to each domain, then once to each device.
    inside = min(ep, device.domain)
    copies = _copies(model.num_experts, model.k, ep)
    between = _copies(model.num_experts, model.k, math.ceil(ep / inside))
    sent = copies / device.domain_link + between / device.link
    slowest = device.latency if ep > inside else device.domain_latency
    transfers = mixtures * (4 + 2 * mesh.recompute) if ep > 1 else 0
    exchange = transfers * (imbalance * own_tokens * 2 * d * sent + slowest)

    # Attention and other matrices are split over tp: gather tokens before, scatter sums after.
    blocks = 2 * layers if model.shared or model.dense_layers else layers
    scattered = batch * 2 * d * (tp - 1) / tp / device.domain_link + device.domain_latency
    tensor = blocks * (4 + 2 * mesh.recompute) * scattered if tp > 1 else 0
    stages = 2 * mesh.vp * (own_tokens * 2 * d / device.link + device.latency) if pp > 1 else 0

    # Replicas: reduce-scatter of float32 gradients, gathers of bfloat16 weights.
    def replicated(parameters: float, size: int, members: int) -> float:
        fast, slow = device.domain_link, min(device.domain_link, members * device.link)
        link, latency = (fast, device.domain_latency) if size <= members else (slow, device.latency)
        times, bytes_ = (micro_batches, 8) if mesh.sharded else (1, 6)
        wait = math.log2(size) * latency
        return times * ((size - 1) / size * bytes_ * parameters / link + layers * wait)

    dense, experts = model.dense / (pp * tp), model.experts / (pp * ep)
    replicas = replicated(dense, dp, max(device.domain // tp, 1))
    replicas += replicated(experts, mesh.efsdp, max(device.domain // ep, 1))

    one = {
        "GEMMs, dense": gemms(dense_flops, batch),
        "GEMMs, experts": imbalance * gemms(expert_flops, rows),
        "elementwise": elementwise,
        "all-to-all": exchange,
        "tensor parallel": tensor,
        "stages": stages,
    }
    seconds = {name: micro_batches * value for name, value in one.items()}
    seconds["pipeline bubble"] = (pp - 1) / mesh.vp * sum(one.values())
    seconds["replicas"] = replicas

    by_dense, by_experts = (dp, mesh.efsdp) if mesh.sharded else (1, 1)
    state = 6 * dense / by_dense + 12 * dense / dp
    state += 6 * experts / by_experts + 12 * experts / mesh.efsdp
    gathered = 2 * (dense + experts) / layers if mesh.sharded else 0
    in_flight = pp if mesh.vp == 1 else pp + (pp - 1) / mesh.vp
    activations = own_tokens * layers * in_flight * (2 * d if mesh.recompute else saved)
    logits = 6 * own_tokens * model.vocabulary
    memory = state + gathered + activations + (own_tokens * saved if mesh.recompute else 0) + logits
    return Step(memory, seconds)


@cache
def _copies(num_experts: int, k: int, ranks: int) -> float:
    return leaving(ExpertPlacement(num_experts, ranks), k)[1]


def meshes(model: Transformer, device: Accelerator, number: int, batch: int) -> Iterator[Mesh]:
    """Lists the meshes of a number of accelerators, for a step of batch sequences."""
    sizes = [2**power for power in range(number.bit_length())]
    for pp, tp, ep in product(sizes, sizes, sizes):
        dp = number // (pp * tp)
        fits = pp * tp * dp == number and tp <= min(8, device.domain) and pp <= model.layers
        if not fits or (dp * tp) % ep or ep > model.num_experts or model.num_experts % ep:
            continue
        for sequences, sharded, recompute in product((1, 2, 4), (False, True), (False, True)):
            for vp in (1, 2, 4) if pp > 1 else (1,):
                if batch % (dp * sequences) == 0 and pp * vp <= model.layers:
                    yield Mesh(pp, tp, dp, ep, sequences, vp, sharded, recompute)
