"""Trains a small model on several ranks; continues from the newest intact checkpoint.

    torchrun --nproc-per-node=2 tests/soak/soak_training.py FOLDER --steps 100

Every second step writes a checkpoint to FOLDER, with the losses of all steps. SIGTERM ends the run
after a checkpoint. A rank that fails prints one line and ends with status 1.

Each rank has its own tokens and noise. With --kind, the ranks divide tokens and noise that do not
depend on their number, and the model is in float64. So runs on other numbers of ranks have the same
losses, up to rounding.
"""

import argparse
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from moe_ext import MoE
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    block,
    clip_grad_norm_,
    init_process_group,
    parallelize,
)

D = 16
NUM_TOKENS = 48  # of all ranks, with --kind
KINDS = "ddp", "mesh", "fsdp"


class Model(nn.Module):
    """Two layers of experts, one with noise in its gate."""

    def __init__(self, group):
        super().__init__()
        self.first = MoE(D, 6, 2, hidden_sizes=(D,), process_group=group)
        self.second = MoE(D, 5, 1, hidden_sizes=(D,), process_group=group, recompute=True)

    def forward(self, x):
        y, first = self.first(x)
        z, second = self.second(x + y)
        return z, first.loss + second.loss


def ranks_of_kind(kind, group):
    """Returns the group, or a mesh with two replicas of each expert for an even number of ranks."""
    if kind != "mesh":
        return group
    replicas = 1 + (group.size() + 1) % 2
    sizes = replicas, group.size() // replicas
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))


def share(values, group):
    """Returns the part of the values of all tokens that this rank has."""
    part = block(range(NUM_TOKENS), group.size(), group.rank())
    return values[part.start : part.stop]


def divide_noise(model, group, losses):
    """Gives each token the same noise on any number of ranks; losses has an item for each step."""

    def draw_noise(number, like):
        draw = torch.Generator().manual_seed(2 * len(losses) + number)
        return share(
            torch.randn(NUM_TOKENS, like.shape[1], dtype=like.dtype, generator=draw), group
        )

    for number, layer in enumerate((model.first, model.second)):
        layer.gate.draw_noise = partial(draw_noise, number)


def train(folder, steps, timeout, kind=None):
    group = init_process_group("gloo", timeout=timedelta(seconds=timeout))
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    torch.set_num_threads(1)
    torch.manual_seed(1)  # one seed on all ranks: the experts are those of a single rank
    ranks = ranks_of_kind(kind, group)
    plain = Model(ranks)
    losses = []
    if kind:
        divide_noise(plain.double(), group, losses)
    model = parallelize(plain, ranks, dense="fsdp" if kind == "fsdp" else "ddp")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)
    torch.manual_seed(group.rank())  # each rank draws noise of its own
    checkpoints = Checkpoints(folder, group, timeout=timedelta(seconds=timeout))
    if checkpoints.steps():
        _, losses[:], random_state = checkpoints.load(model, [optimizer], fallback=True)
        if random_state is not None:  # a rank that the saved run did not have
            torch.set_rng_state(random_state)
    while len(losses) < steps:
        # Step and rank determine the data, so that a restart does not change the data.
        draw = torch.Generator().manual_seed(2 * len(losses) + (0 if kind else group.rank()))
        if kind:
            x = share(torch.randn(NUM_TOKENS, D, dtype=torch.float64, generator=draw), group)
            weight = group.size() / NUM_TOKENS
        else:
            x = torch.randn(int(torch.randint(64, (), generator=draw)), D, generator=draw)
            weight = 1 / 64
        y, aux_loss = model(x)
        loss = weight * (y - x.sin()).square().sum() + aux_loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        together = torch.stack([loss.detach(), loss.new_tensor(len(stopping))])
        dist.all_reduce(together, group=group)
        losses.append(together[0].item() / (group.size() if kind else 1))
        last = len(losses) == steps or together[1] > 0
        if len(losses) % 2 == 0 or last:
            # An undisturbed run saves once in the background, once not.
            save = checkpoints.async_save if len(losses) % 4 == 0 else checkpoints.save
            state = torch.get_rng_state()
            save(len(losses), model, [optimizer], list(losses), rank_state=state)
        if last:
            break
        time.sleep(0.02)  # a fault also happens between two steps
    checkpoints.wait()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=60, help="seconds (%(default)s)")
    help = (
        "how the model is parallel; mesh: two replicas of each expert, on an even number of ranks"
    )
    parser.add_argument("--kind", choices=KINDS, help=help)
    options = parser.parse_args()
    try:
        train(options.folder, options.steps, options.timeout, options.kind)
    except (CheckpointError, RuntimeError, OSError) as error:
        print(f"error: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
