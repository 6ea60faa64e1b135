"""Stages of a pipeline with mixtures of experts (torch.distributed.pipelining)."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from assertions import assert_exact
from one_process import fix_noise
from pairwise import pairwise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from workers import on_ranks

from moe_ext import KeepAux, MoE
from moe_ext.distributed import CheckpointError, Checkpoints, clip_grad_norm_, parallelize

D, NUM_MODULES, MICRO_BATCHES, TOKENS, STEPS = 4, 8, 5, 3, 2
STAGES = "stages", "copies", "shards"


def make(index, mesh, replicas, first):
    """Makes a module of the whole model, with parameters that do not depend on the other modules.

    A layer draws the noise of the tokens from the first one on, of those of all replicas.
    """
    torch.manual_seed(index)
    if index % 2:
        return nn.Linear(D, D).double()
    layer = MoE(D, 4, 2, hidden_sizes=[3], process_group=mesh)
    nn.init.normal_(layer.gate.w_gate)
    fix_noise(layer.double(), slice(first, first + TOKENS), replicas * TOKENS)
    return KeepAux(layer, adds_loss=mesh is not None)


def part_of_model(indices, mesh=None, replicas=1, first=0):
    """Returns some modules of the whole model, under their names there."""
    return nn.Sequential(
        OrderedDict((str(index), make(index, mesh, replicas, first)) for index in indices)
    )


def batch(step, replicas):
    """Draws tokens and targets of a step, [2, replicas, micro-batches * TOKENS, D]."""
    draw = torch.Generator().manual_seed(step)
    size = (2, replicas, MICRO_BATCHES * TOKENS, D)
    return torch.randn(size, dtype=torch.float64, generator=draw)


def loss_of(y, target):
    return (y - target).square().mean()


def train_alone(replicas):
    """Returns the losses and norms of a process that has the whole model, and the model."""
    model = part_of_model(range(NUM_MODULES), None, 1, 0)
    for module in model[::2]:
        fix_noise(module, slice(0, replicas * TOKENS), replicas * TOKENS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        x, target = (
            values.unflatten(1, (MICRO_BATCHES, TOKENS)).transpose(0, 1).flatten(1, 2)
            for values in batch(step, replicas)
        )
        for micro_batch in range(MICRO_BATCHES):
            loss = loss_of(model(x[micro_batch]), target[micro_batch])
            losses.append(loss.item())
            balancing = sum(module.aux.loss for module in model[::2])
            ((loss + balancing) / MICRO_BATCHES).backward()
        norms.append(clip_grad_norm_(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def train_stage(group, rank, sizes, schedule, dense, folder):
    """Trains the stage of a rank, saves it, and returns the losses and norms."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=STAGES)
    layers = mesh["copies", "shards"]
    stages, replicas = mesh["stages"].get_group(), layers._flatten("replicas")
    stage, replica = mesh.get_local_rank("stages"), replicas.get_local_rank()
    per_stage = NUM_MODULES // sizes[0]
    indices = range(stage * per_stage, (stage + 1) * per_stage)
    model = part_of_model(indices, layers, replicas.size(), replica * TOKENS)
    wrapped = parallelize(model, layers, dense=dense)
    x, y = torch.empty(2, TOKENS, D, dtype=torch.float64, requires_grad=True).unbind()
    x = x if stage else x.detach()
    place = stage, sizes[0], torch.device("cpu")
    run = schedule(PipelineStage(wrapped, *place, x, y, group=stages), MICRO_BATCHES, loss_of)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        x, target = batch(step, replicas.size())
        if stage == 0:
            run.step(x[replica])
        elif stage == sizes[0] - 1:
            step_losses = []
            run.step(target=target[replica], losses=step_losses)
            losses += [loss.item() for loss in step_losses]
        else:
            run.step()
        norms.append(clip_grad_norm_(model, 0.1, stages=stages))
        optimizer.step()
        optimizer.zero_grad()
    Checkpoints(folder, group, stages=stages).save(1, wrapped, [optimizer])
    return losses, norms


@pairwise(
    sizes=[(4, 1, 1), (2, 2, 1), (2, 1, 2)],
    dense=["ddp", "fsdp"],
    schedule=[Schedule1F1B, ScheduleGPipe],
    allowed=lambda sizes, dense, **_: dense == "ddp" or sizes[0] == 2,
)
def test_a_pipeline_trains_as_one_process(workers, tmp_path, sizes, dense, schedule):
    stages, replicas = sizes[0], sizes[1] * sizes[2]
    losses, norms, model = train_alone(replicas)
    results = workers.run(stages * replicas, train_stage, sizes, schedule, dense, tmp_path)
    for _, actual in results:
        assert_exact(torch.stack(actual), torch.stack(norms))
    last_losses = torch.tensor([actual for actual, _ in results[-replicas:]], dtype=torch.float64)
    assert_exact(last_losses.mean(0), torch.tensor(losses, dtype=torch.float64))
    loaded = part_of_model(range(NUM_MODULES))
    Checkpoints(tmp_path).load(loaded)
    for actual, expected in zip(loaded.parameters(), model.parameters(), strict=True):
        assert_exact(actual, expected)


def save_alone(folder):
    model = part_of_model(range(NUM_MODULES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    model(torch.ones(TOKENS, D, dtype=torch.float64)).sum().backward()
    optimizer.step()
    Checkpoints(folder).save(3, model, [optimizer], "state")
    return model, optimizer


@on_ranks(2)
def test_stages_load_what_one_process_saved(group, rank, tmp_path):
    if rank == 0:
        save_alone(tmp_path)
    dist.barrier()
    model = part_of_model(range(rank * 4, rank * 4 + 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    saved = [value.clone() for value in model.parameters()]
    checkpoints = Checkpoints(tmp_path, group, stages=group)
    assert checkpoints.load(model, [optimizer])[:2] == (3, "state")
    assert optimizer.param_groups[0]["lr"] == 0.5
    for before, param in zip(saved, model.parameters(), strict=True):
        assert not torch.equal(before, param) and len(optimizer.state[param]) == 1
    with pytest.raises(CheckpointError, match=r"other names of tensors in each stage.*'0.layer."):
        checkpoints.save(4, part_of_model([0]))
    with pytest.raises(CheckpointError, match="names and shapes of the model"):
        Checkpoints(tmp_path, group).load(part_of_model([0, 1]))
    assert checkpoints.steps() == [3]


@on_ranks(2)
def test_the_ranks_of_stages(group, rank):
    layer = MoE(D, 4, 2, process_group=group)
    with pytest.raises(CheckpointError, match=r"process_group must have the ranks \[0, 1\]"):
        Checkpoints("unused", group, stages=group).save(1, layer)
    for function in (Checkpoints, clip_grad_norm_):
        with pytest.raises(TypeError, match=f"^{function.__name__}: stages must be a ProcessGroup"):
            function(layer, 1, stages=2) if function is clip_grad_norm_ else function("x", stages=2)
