"""Train on two ranks that share the experts, lose one of them, and continue from a checkpoint.

    torchrun --nproc-per-node=2 --max-restarts=1 examples/two_ranks.py

Rank 1 dies after step 13, and torch reports on stderr that rank 0 lost its connection. torchrun
starts both ranks again. They load the checkpoint of step 10 and continue. At the end both ranks
train from step 1 without a death, and the losses are bitwise identical. The script prints:

    rank 1: dies after step 13
    both ranks continue after step 10
    step 11: loss 0.330126, without the death 0.330126
    step 12: loss 0.321440, without the death 0.321440
    step 13: loss 0.313062, without the death 0.313062
    step 14: loss 0.305916, without the death 0.305916
    step 15: loss 0.288587, without the death 0.288587
    step 16: loss 0.290807, without the death 0.290807
    identical: True
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from moe_ext import MoE
from moe_ext.distributed import Checkpoints, clip_grad_norm_, init_process_group, parallelize

D_MODEL, STEPS, SAVE_EVERY, DEATH = 32, 16, 5, 13


class Model(nn.Module):
    """A linear layer, replicated on each rank, and eight experts, four on each rank."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.inner = nn.Linear(D_MODEL, D_MODEL)
        self.moe = MoE(D_MODEL, num_experts=8, k=2, process_group=group)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the output for x [T, D], and the balancing losses."""
        y, aux = self.moe(self.inner(x))
        return y, aux.loss


def train(folder: Path, group: ProcessGroup, dies: bool) -> dict[int, float]:
    """Trains from the newest checkpoint in folder to step STEPS; returns the loss of each step.

    If dies is true and there is no checkpoint, rank 1 ends after step DEATH.
    """
    rank = group.rank()
    torch.manual_seed(1)  # one seed on all ranks: the experts are those of a single rank
    model = parallelize(Model(group), group)  # averages the gradients of the replicas
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # each rank draws noise of its own
    checkpoints = Checkpoints(folder, group)
    start = 0
    if checkpoints.steps():
        start, _, random_state = checkpoints.load(model, [optimizer])
        torch.set_rng_state(random_state)
        dies = False
        if rank == 0:
            print(f"both ranks continue after step {start}", flush=True)
    losses = {}
    for step in range(start + 1, STEPS + 1):
        # Step and rank determine the data, so that a restart does not change the data.
        draw = torch.Generator().manual_seed(2 * step + rank)
        x = torch.randn(256, D_MODEL, generator=draw)
        y, aux_loss = model(x)
        loss = F.mse_loss(y, x.sin()) + aux_loss
        loss.backward()
        clip_grad_norm_(model, 1.0)  # uses the norm over the experts of all ranks
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        if step % SAVE_EVERY == 0:
            checkpoints.save(step, model, [optimizer], rank_state=torch.get_rng_state())
        if dies and rank == 1 and step == DEATH:
            print(f"rank {rank}: dies after step {step}", flush=True)
            os._exit(1)
    return losses


def main() -> None:
    """Runs the example."""
    group = init_process_group("gloo")
    if group is None:
        raise SystemExit(
            "start this with: torchrun --nproc-per-node=2 --max-restarts=1 examples/two_ranks.py"
        )
    folder = Path("runs/example-two-ranks")  # a folder that all ranks can read
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":  # not restarted: a new training
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()
    continued = train(folder, group, dies=True)
    shared = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    undisturbed = train(Path(str(shared[0])), group, dies=False)
    if group.rank() == 0:
        for step, loss in continued.items():
            print(f"step {step}: loss {loss:.6f}, without the death {undisturbed[step]:.6f}")
        print("identical:", all(undisturbed[step] == loss for step, loss in continued.items()))
        shutil.rmtree(folder)
        shutil.rmtree(str(shared[0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
