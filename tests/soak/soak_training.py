"""Trains a small model on several ranks; continues from the newest intact checkpoint.

    torchrun --nproc-per-node=2 tests/soak/soak_training.py FOLDER --steps 100

Every second step writes a checkpoint to FOLDER, with the losses of all steps. SIGTERM ends the run
after a checkpoint. A rank that fails prints one line and ends with status 1.
"""

import argparse
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from moe_ext import MoE
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    clip_grad_norm_,
    init_process_group,
    parallelize,
)

D = 16


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


def train(folder, steps, timeout):
    group = init_process_group("gloo", timeout=timedelta(seconds=timeout))
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    torch.set_num_threads(1)
    torch.manual_seed(1)  # one seed on all ranks: the experts are those of a single rank
    model = parallelize(Model(group), group)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(group.rank())  # each rank draws noise of its own
    checkpoints = Checkpoints(folder, group, timeout=timedelta(seconds=timeout))
    losses = []
    if checkpoints.steps():
        _, losses, random_state = checkpoints.load(model, [optimizer], fallback=True)
        torch.set_rng_state(random_state)
    while len(losses) < steps:
        # Step and rank determine the data, so that a restart does not change the data.
        draw = torch.Generator().manual_seed(2 * len(losses) + group.rank())
        x = torch.randn(int(torch.randint(64, (), generator=draw)), D, generator=draw)
        y, aux_loss = model(x)
        loss = (y - x.sin()).square().sum() / 64 + aux_loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        together = torch.stack([loss.detach(), torch.tensor(float(len(stopping)))])
        dist.all_reduce(together, group=group)
        losses.append(together[0].item())
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
    options = parser.parse_args()
    try:
        train(options.folder, options.steps, options.timeout)
    except (CheckpointError, RuntimeError, OSError) as error:
        print(f"error: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
