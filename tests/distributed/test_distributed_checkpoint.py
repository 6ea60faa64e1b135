"""Checkpoints of sharded experts: any number of ranks reads what any other number wrote."""

import numpy
import pytest
import torch
from assertions import assert_exact, assert_same_bits
from checkpoint_model import (
    D,
    Model,
    assert_same_contents,
    batch,
    compiled,
    contents,
    optimizers_of,
    size_of,
    train,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from workers import on_ranks

from moe_ext import MoE
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    Ranks,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)


def mesh_of_replicas():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))


def train_and_save(group, rank, folder, kind, steps, has_replicas=False):
    ranks = mesh_of_replicas() if has_replicas else group
    model = Model(ranks)
    optimizers = optimizers_of(kind, model)
    train(model, optimizers, ranks, rank, steps)
    Checkpoints(folder, ranks).save(steps[-1], model, optimizers, {"tokens": 24}, {"rank": rank})


def load_and_save(group, rank, source, target, kind, has_replicas=False):
    """Loads a checkpoint, saves it again, and returns the outputs of the custom expert layers."""
    ranks = mesh_of_replicas() if has_replicas else group
    model = Model(ranks, seed=rank + 2)
    optimizers = optimizers_of(kind, model)
    step, state, rank_state = Checkpoints(source, ranks).load(model, optimizers)
    assert (step, state) == (2, {"tokens": 24})
    Checkpoints(target, ranks).save(step, model, optimizers, state, rank_state)
    x = batch(9).chunk(size_of(ranks))[rank]
    with torch.no_grad():
        layers = model.flat, model.few, model.groups, model.stacked
        y = torch.cat([layer(x)[0] for layer in layers], dim=1)
    return y, rank_state


@pytest.mark.guarantee("Crashes do not corrupt checkpoints")
@pytest.mark.parametrize(
    "kind, worlds, has_replicas", [("adam", [2], True), ("factored", [1, 3], False)]
)
def test_saved_by_four_loaded_by_any(workers, tmp_path, kind, worlds, has_replicas):
    four = tmp_path / "4"
    workers.run(4, train_and_save, four, kind, [1, 2], has_replicas)
    expected = contents(four)
    alone = Model()
    optimizers = optimizers_of(kind, alone)
    train(alone, optimizers, None, 0, [1, 2])
    assert expected[0].keys() == alone.state_dict().keys()
    for name, value in alone.state_dict().items():
        assert_exact(expected[0][name], value)
    number_of_states = sum(len(s) for o in optimizers for s in o.state.values())
    assert len(expected[1]) == number_of_states

    y, _ = load_and_save(None, 0, four, tmp_path / "0", kind)
    assert_same_contents(contents(tmp_path / "0"), expected)
    for world in worlds:
        results = workers.run(world, load_and_save, four, tmp_path / f"{world}", kind)
        assert_same_contents(contents(tmp_path / f"{world}"), expected)
        assert_exact(torch.cat([part for part, _ in results]), y)
        assert [state["rank"] for _, state in results] == list(range(world))
    source, target = tmp_path / f"{world}", tmp_path / "back"
    results = workers.run(4, load_and_save, source, target, kind, has_replicas)
    assert_same_contents(contents(tmp_path / "back"), expected)
    assert_exact(torch.cat([part for part, _ in results]), y)
    ranks_before = [{"rank": rank} for rank in range(world)]
    assert [state for _, state in results] == ranks_before + [None] * (4 - world)


def continue_training(group, rank, folder, kind, steps):
    model = Model(group, seed=3)
    optimizers = optimizers_of(kind, model)
    Checkpoints(folder, group).load(model, optimizers)
    train(model, optimizers, group, rank, steps)
    return full_state_dict(model, group)


@pytest.mark.parametrize("kind, first, then", [("adam", 3, 2), ("factored", 2, 4), ("sgd", 4, 3)])
def test_two_and_two_steps_are_four(workers, tmp_path, kind, first, then):
    alone = Model()
    train(alone, optimizers_of(kind, alone), None, 0, [1, 2, 3, 4])
    workers.run(first, train_and_save, tmp_path, kind, [1, 2])
    states = workers.run(then, continue_training, tmp_path, kind, [3, 4])
    assert states[0].keys() == alone.state_dict().keys() and not any(states[1:])
    for name, value in alone.state_dict().items():
        assert_exact(states[0][name], value)


@on_ranks(2)
def test_buffers_that_differ_between_ranks(group, rank, tmp_path):
    """Ranks see other data. A run that was resumed has the statistics of one without a stop."""

    def make():
        torch.manual_seed(1)
        model = nn.ModuleList([nn.BatchNorm1d(D), MoE(D, 4, 2, process_group=group)])
        model.forward = lambda x: model[1](model[0](x))[0]
        return model, parallelize(model, group), torch.optim.Adam(model.parameters())

    def step(made, number):
        _, wrapped, optimizer = made
        torch.manual_seed(number)  # of the data and the noise
        wrapped(torch.randn(6, D)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run, resumed = make(), make()
    step(run, 2 + rank)
    own = Ranks(group).gather_objects(run[0][0].running_mean)
    assert not torch.equal(*own)
    checkpoints = Checkpoints(tmp_path, group)
    checkpoints.save(1, run[0], [run[2]])
    checkpoints.load(resumed[0], [resumed[2]])
    assert_same_bits(resumed[0][0].running_mean, own[0])
    for made in (run, resumed):
        step(made, 4 + rank)
    expected, got = (full_state_dict(model, group) for model, *_ in (run, resumed))
    for name in expected:
        assert_same_bits(got[name], expected[name])


def full_round_trip(group, rank, state, dense):
    model = Model(group, seed=rank + 4)
    wrapped = parallelize(model, group, dense=dense)
    load_full_state_dict(wrapped, state, group)
    wrong = {name: value for name, value in state.items() if "experts.2.last" not in name}
    wrong["flat.experts.weight_0"] = state["flat.experts.weight_0"][1:]
    wrong["other"] = torch.ones(())
    before = model.flat.experts.weights[1].clone()
    with pytest.raises(ValueError) as raised:
        load_full_state_dict(wrapped, {name: 0 * value for name, value in wrong.items()}, group)
    assert_same_bits(model.flat.experts.weights[1], before)
    return full_state_dict(wrapped, group), str(raised.value)


@pytest.mark.parametrize("world, dense", [(1, "ddp"), (2, "ddp"), (4, "ddp"), (3, "fsdp")])
def test_state_dict_of_one_process(workers, world, dense):
    state = Model().state_dict()
    (back, message), *remaining = workers.run(world, full_round_trip, state, dense)
    assert back.keys() == state.keys() and all(part == ({}, message) for part in remaining)
    for name in state:
        assert_same_bits(back[name], state[name])
    assert message == (
        "load_full_state_dict: state must have the names and shapes of the model, got "
        "flat.experts.weight_0: [4, 4, 6] instead of [5, 4, 6]; "
        "modules_layer.experts.experts.2.last.bias: no tensor instead of [4]; "
        "modules_layer.experts.experts.2.last.weight: no tensor instead of [4, 5]; "
        "other: [] instead of no tensor"
    )


def sharded_dense(group, rank, folder):
    model = parallelize(Model(group), group, dense="fsdp")
    optimizers = optimizers_of("sgd", model)
    y, loss = model(batch(1).chunk(group.size())[rank])
    (y.square().mean() + loss).backward()
    optimizers[0].step()
    checkpoints = Checkpoints(folder, group)
    checkpoints.save(1, model, optimizers)
    if group.size() == 4:
        checkpoints.async_save(2, model, optimizers)
        state = full_state_dict(model, group)
    else:
        state = full_state_dict(model, group)
        target = parallelize(Model(group, seed=8), group, dense="fsdp")
        target_optimizers = optimizers_of("sgd", target)
        checkpoints.load(target, target_optimizers)
        checkpoints.save(2, target, target_optimizers)
    checkpoints.wait()
    return state


@pytest.mark.parametrize("world", [2, 4])
def test_dense_parameters_sharded_too(workers, tmp_path, world):
    state = workers.run(world, sharded_dense, tmp_path)[0]
    expected = contents(tmp_path, 1)
    assert_same_contents([state], expected[:1])
    assert_same_contents(contents(tmp_path, 2), expected)


class Wrapped(nn.Module):
    """A model whose modules may be in wrappers; one has the name of DDP's attribute."""

    def __init__(self, group=None):
        super().__init__()
        torch.manual_seed(0)
        number = 4 if group is None else 2
        self.module = nn.Linear(D, D)
        self.flat = MoE(D, 4, 2, hidden_sizes=[3], process_group=group)
        experts = [nn.Linear(D, D) for _ in range(number)]
        self.modules_layer = MoE(D, 4, 2, experts=experts, process_group=group)


def wrap(model, group):
    model.module = DistributedDataParallel(compiled(model.module), process_group=group)
    model.flat = checkpoint_wrapper(compiled(model.flat))
    layer = model.modules_layer
    layer.gate = compiled(layer.gate)
    layer.experts.experts[1] = compiled(checkpoint_wrapper(layer.experts.experts[1]))
    layer.experts = compiled(checkpoint_wrapper(layer.experts))
    return compiled(model)


def check_plain_names(group, rank, folder):
    def adam_of(model):
        optimizer = torch.optim.Adam(model.parameters())
        for name, param in model.named_parameters():
            param.grad = torch.full_like(param, rank + 1 if "experts" in name else 1)
        optimizer.step()
        return optimizer

    def assert_same(model, optimizer, plain, plain_optimizer):
        for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same_bits(param.detach(), twin.detach())
            for key, value in optimizer.state[param].items():
                assert_same_bits(value, plain_optimizer.state[twin][key])

    model, plain = wrap(Wrapped(group), group), Wrapped(group)
    state = full_state_dict(model, group)
    assert state.keys() == full_state_dict(plain, group).keys()
    optimizer, plain_optimizer = adam_of(model), torch.optim.Adam(plain.parameters())
    Checkpoints(folder / "wrapped", group).save(1, model, [optimizer])
    Checkpoints(folder / "wrapped", group).load(plain, [plain_optimizer])
    assert_same(model, optimizer, plain, plain_optimizer)
    plain_optimizer = adam_of(plain)
    Checkpoints(folder / "plain", group).save(1, plain, [plain_optimizer])
    Checkpoints(folder / "plain", group).load(model, [optimizer])
    assert_same(model, optimizer, plain, plain_optimizer)
    state = Ranks(group).gather_objects(state)[0]
    for m in (model, plain):
        load_full_state_dict(m, state, group)
    assert_same(model, optimizer, plain, plain_optimizer)


def test_names_are_those_of_the_model_without_wrappers(workers, tmp_path):
    workers.run(2, check_plain_names, tmp_path)
    Checkpoints(tmp_path / "wrapped").load(Wrapped())


def test_numbers_of_numpy(tmp_path):
    """They become numbers of Python: a checkpoint is read without numpy."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=numpy.float64(0.5))
    checkpoints = Checkpoints(tmp_path, keep=numpy.int64(1))
    state = {"loss": numpy.float32(0.25), "rest": [numpy.int64(3), (numpy.True_, "text")]}
    for step, save in enumerate((checkpoints.save, checkpoints.async_save)):
        save(numpy.int64(step), model, [optimizer], state, numpy.int32(4))
        checkpoints.wait()
        assert checkpoints.steps() == [step]  # keep is 1
        loaded = checkpoints.load(model, [optimizer], step=numpy.uint8(step))
        assert repr(loaded.state) == "{'loss': 0.25, 'rest': [3, (True, 'text')]}"
        assert repr((loaded.step, loaded.rank_state)) == f"({step}, 4)"
        assert repr(optimizer.param_groups[0]["lr"]) == "0.5"
    assert isinstance(state["loss"], numpy.float32)  # nothing of the user's has changed
    with pytest.raises(CheckpointError, match="state must hold .*, got numpy.*reconstruct"):
        checkpoints.save(5, model, (), numpy.ones(2))
