"""Memory of a long run: it does not grow while the number of tokens changes."""

import resource
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch

from moe_ext import HierarchicalMoE, MoE
from moe_ext.distributed import ExpertParallel, clip_grad_norm_, parallelize

STEPS = 2000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Both(torch.nn.Module):
    """A flat and a hierarchical layer."""

    def __init__(self, group):
        super().__init__()
        options = {"hidden_sizes": (256,), "recompute": True}
        parallel = ExpertParallel(group, exchange="tokens", num_chunks=2)
        self.flat = MoE(64, 16, 2, parallel=parallel, **options)
        self.groups = HierarchicalMoE(64, 4, 8, 2, process_group=group, **options)

    def forward(self, x):
        y, aux = self.flat(x)
        z, more = self.groups(x + y)
        return z, aux.loss + more.loss


def train(group, rank):
    """Returns the mean resident set of this rank in each quarter of the steps."""
    draw = torch.Generator().manual_seed(rank)
    model = parallelize(Both(group), group)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    quarters = [[], [], [], []]
    for step in range(STEPS):
        num_tokens = int(torch.randint(0, 2048, (), generator=draw))
        y, loss = model(torch.randn(num_tokens, 64, generator=draw))
        (y.square().sum() / 2048 + loss).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        quarters[4 * step // STEPS].append(resident_bytes())
    return [mean(quarter) for quarter in quarters]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")
def test_memory_does_not_grow(workers):
    for quarters in workers.run(2, train, seconds=900):
        assert quarters[3] <= 1.02 * quarters[1], quarters
