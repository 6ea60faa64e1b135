"""A model with all kinds of layers, its training, and the contents of its checkpoints."""

import torch
from assertions import assert_same_bits
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from moe_ext import Experts, HierarchicalBalancedGate, HierarchicalMoE, MoE, TopKGate
from moe_ext.distributed import parallelize
from moe_ext.optim import FactoredAdam, split_parameters

D = 4


class Expert(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.first, self.last = nn.Linear(D, hidden), nn.Linear(hidden, D)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale


class Stacked(Experts):
    """Custom experts: one module holds all experts of a rank."""

    def __init__(self, numbers):
        super().__init__(len(numbers), D)
        scale = torch.linspace(0.5, 2, 8)[list(numbers)]
        self.scale = nn.Parameter(scale[:, None].repeat(1, D))
        self.register_buffer("shift", scale / 3)

    def forward(self, rows, offsets):
        counts = offsets.diff()
        shift = self.shift.repeat_interleave(counts)[:, None]
        return rows * self.scale.repeat_interleave(counts, dim=0) + shift


class Model(nn.Module):
    """A model with all kinds of layers; no number of ranks divides its experts evenly."""

    def __init__(self, group=None, seed=1, num_experts=5):
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(D, D)
        options = {"hidden_sizes": (3,), "activation": "swiglu", "bias": True}
        self.flat = self._layer(num_experts, group, **options)
        self.few = self._layer(2, group, hidden_sizes=(3,))
        self.groups = HierarchicalMoE(D, 3, 2, 2, hidden_sizes=(3,), process_group=group)
        self.balanced_groups = self._layer(
            6, group, gate=HierarchicalBalancedGate(D, 3, 2, (2, 1)), hidden_sizes=(3,)
        )
        modules = [Expert(hidden) for hidden in range(3, 3 + num_experts)]
        owned = range(num_experts) if group is None else self.flat.sharding.local_experts
        self.modules_layer = self._layer(
            num_experts, group, experts=modules[owned.start : owned.stop]
        )
        self.stacked = self._layer(num_experts, group, experts=Stacked(owned))
        groups = self.groups.gate.groups
        for name, param in self.named_parameters():
            if name.endswith("_secondary"):  # of this rank's groups
                whole = nn.init.normal_(torch.empty(3, *param.shape[1:]))
                param.data.copy_(whole[groups.start : groups.stop])
            elif ".gate." in name:
                nn.init.normal_(param)
            param.requires_grad_("noise" not in name)
        self.double().eval()  # evaluation mode: no noise
        self.balanced_groups.train()  # trains its thresholds

    def _layer(self, num_experts, group, gate=None, **options):
        gate = gate or TopKGate(D, num_experts, 2)
        return MoE(D, num_experts, 2, gate=gate, w_load=0.0, process_group=group, **options)

    def forward(self, x):
        x, loss = self.dense(x), 0
        groups = self.groups, self.balanced_groups
        for layer in (self.flat, self.few, *groups, self.modules_layer, self.stacked):
            y, aux = layer(x)
            x, loss = x + y, loss + aux.loss
        return x, loss


def optimizers_of(kind, model):
    if kind == "adam":
        return [torch.optim.Adam(model.parameters(), lr=0.01, fused=True)]
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]
    split = split_parameters(model)
    dense = [{"params": split.rest[:3], "lr": 0.02}, {"params": split.rest[3:]}]
    return [FactoredAdam(split.experts, lr=0.01), torch.optim.Adam(dense, lr=0.01)]


def batch(number):
    return torch.randn(12, D, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def size_of(ranks):
    """Returns the number of ranks of a process group, of a mesh, or of one process."""
    return 1 if ranks is None else ranks.size()


def train(model, optimizers, ranks, rank, steps, dense="ddp"):
    wrapped = model if ranks is None else parallelize(model, ranks, dense=dense)
    for step in steps:
        y, loss = wrapped(batch(step).chunk(size_of(ranks))[rank])
        (y.square().mean() + loss).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return wrapped


def contents(folder, step=2):
    """Reads all tensors of a checkpoint with torch's own functions."""
    whole = folder / "whole.pt"
    dcp_to_torch_save(folder / f"step-{step:08d}", whole)
    state = torch.load(whole)
    return state["model"], {
        f"{name} {key}": value
        for name, values in state["optimizer"].items()
        for key, value in values.items()
    }


def assert_same_contents(actual, expected):
    for values, wanted in zip(actual, expected, strict=True):
        assert values.keys() == wanted.keys()
        for name in values:
            assert_same_bits(values[name], wanted[name])


def numbers_of(model, optimizer):
    states = [state for param_state in optimizer.state.values() for state in param_state.values()]
    return [*model.state_dict().values(), *states]


def compiled(module):
    return torch.compile(module, backend="eager")
