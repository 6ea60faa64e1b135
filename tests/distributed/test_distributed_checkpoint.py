"""Checkpoints of sharded experts: any number of ranks reads what any other number wrote."""

import contextlib
import dataclasses
import io
import itertools
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import tracemalloc
from fractions import Fraction

import numpy
import pytest
import torch
import torch.distributed as dist
from assertions import assert_exact, assert_same_bits
from one_process import files_in
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from workers import on_ranks

import moe_ext.distributed.checkpoint
from moe_ext import Experts, HierarchicalBalancedGate, HierarchicalMoE, MoE, SharedExpert, TopKGate
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    Ranks,
    _planners,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from moe_ext.distributed._checkpoint_folder import sums_of
from moe_ext.distributed._safe_files import read_metadata
from moe_ext.optim import FactoredAdagrad, FactoredAdam, split_parameters

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


@pytest.fixture
def saved(tmp_path):
    """Returns a small model, its checkpoints and the folder of the only one."""
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path / "there")
    checkpoints.save(1, model, (), {"tokens": 1}, {"rank": 0})
    return model, checkpoints, tmp_path / "there" / "step-00000001"


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def corrupted(group, rank, folder):
    model = Model(group, seed=7)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    checkpoints = Checkpoints(folder, group)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(model)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])
    with pytest.warns(UserWarning, match="step-00000002/.*; .*loading .*step-00000001 instead"):
        loaded = checkpoints.load(model, fallback=True)
    assert loaded.step == checkpoints.load(model, step=1).step == 1
    return str(raised.value)


@pytest.mark.guarantee("Crashes do not corrupt checkpoints")
def test_corrupted_files_are_named(workers, tmp_path):
    model = Model()
    optimizers = optimizers_of("factored", model)
    checkpoints = Checkpoints(tmp_path / "good")
    for step in (1, 2):
        train(model, optimizers, None, 0, [step])
        checkpoints.save(step, model, optimizers, {"tokens": step}, [step])
    names = {path.name for path in (tmp_path / "good/step-00000002").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "state.pt", "rank-0.pt", "SHA256SUMS"}
    subprocess.run(
        ["sha256sum", "--check", "--quiet", "SHA256SUMS"],
        cwd=tmp_path / "good/step-00000002",
        check=True,
    )
    for number, name in enumerate(sorted(names)):
        for how, corrupt in (("corrupted", flip_byte), ("No such file", os.unlink)):
            folder = tmp_path / f"{number} {how}"
            shutil.copytree(tmp_path / "good", folder)
            path = folder / "step-00000002" / name
            corrupt(path)
            message = corrupted(None, 0, folder)
            assert how in message and (str(path) in message or name == "SHA256SUMS")
            assert str(folder) in message
    *_, message = workers.run(3, corrupted, folder := tmp_path / "0 corrupted")
    assert f"{folder}/step-00000002/.metadata is corrupted" in message and "(rank " in message


def test_sums_cut_short_are_noticed(saved):
    model, checkpoints, folder = saved
    sums = folder / "SHA256SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        sums.write_text("".join(lines[:count]))
        with pytest.raises(CheckpointError, match="SHA256SUMS is corrupted: it has no checksum of"):
            checkpoints.load(model)


def test_a_flipped_bit_in_the_sums_is_noticed(saved):
    """Also if the file is no longer UTF-8, or the bit is in a name or a line end."""
    model, checkpoints, folder = saved
    sums = folder / "SHA256SUMS"
    content = sums.read_bytes()
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= (1, 32, 128)[position % 3]
        sums.write_bytes(flipped)
        with pytest.raises(CheckpointError, match="is corrupted: it"):
            checkpoints.load(model)
    sums.write_bytes(content)
    (folder.parent / "latest").write_bytes(b"\xb9")
    assert checkpoints.load(model).step == 1


@on_ranks(2)
def test_what_one_rank_refuses_changes_no_rank(group, rank, tmp_path):
    model, checkpoints = Model(group), Checkpoints(tmp_path, group)
    adam = torch.optim.Adam(model.parameters())
    checkpoints.save(1, model, [adam])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    changed = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = adam if rank == 0 else torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match=r"the saved optimizers must be .* \(rank 1\)$"):
        checkpoints.load(model, [optimizer])
    for name, value in model.state_dict().items():
        assert_same_bits(value, changed[name])
    for step, rule in ((-1, "at least 0, got -1"), (3, r"equal on all ranks, got \[2, 3\]")):
        with pytest.raises(ValueError, match=f"^Checkpoints: step must be {rule}"):
            checkpoints.save(step if rank == 1 else 2, model)
        with pytest.raises(ValueError, match=f"^Checkpoints: step must be {rule}"):
            checkpoints.load(model, step=step if rank == 1 else 2)
    assert checkpoints.load(model, [adam]).step == 1
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name])


def test_checkpoints_of_an_abandoned_run_do_not_come_back(tmp_path):
    model, checkpoints = nn.Linear(1, 1), Checkpoints(tmp_path, keep=9)
    for step in range(1, 6):
        checkpoints.save(step, model)
    checkpoints.load(step=3)  # only looks at the other state
    checkpoints.load(model, step=2)
    assert checkpoints.steps() == [1, 2, 3, 4, 5]
    checkpoints.save(6, model)
    assert checkpoints.steps() == [1, 2, 6]
    checkpoints.save(7, model)
    assert checkpoints.steps() == [1, 2, 6, 7]


@on_ranks(2)
def test_a_new_run_does_not_delete_later_checkpoints(group, rank, tmp_path):
    model = nn.Linear(1, 1)
    Checkpoints(tmp_path, group).save(100, model)
    dist.barrier()
    checkpoints = Checkpoints(tmp_path, group)
    checkpoints.load()  # only looks at the other state
    message = (
        rf"step must be at least 100, the newest step in {tmp_path}, unless .*, got 50 \(rank 0"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(50, model)
    checkpoints.async_save(60, model)
    with pytest.raises(CheckpointError, match="got 60"):
        checkpoints.wait()
    assert checkpoints.steps() == [100]
    checkpoints.load(model)
    checkpoints.save(50, model)  # goes back
    assert checkpoints.steps() == [50]


def test_a_damaged_latest_hides_no_checkpoint(tmp_path):
    model, checkpoints = nn.Linear(1, 1), Checkpoints(tmp_path)
    for step in (1, 3):
        checkpoints.save(step, model)
    latest = tmp_path / "latest"
    content = latest.read_bytes()
    for number in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[number // 8] ^= 1 << number % 8
        latest.write_bytes(flipped)
        assert checkpoints.steps() == [1, 3]
    latest.write_text("step-00000001\n")  # of an earlier version
    assert checkpoints.steps() == [1]


def without_its_group(group, rank, folder):
    """Saves and loads sharded experts without their process group."""
    model, alone = Model(group), Checkpoints(folder / f"of-{rank}")
    message = r"process_group must have the ranks \[0, 1\] of the layers .*, got None"
    for call in (
        lambda: alone.save(1, model),
        lambda: alone.load(model),
    ):
        with pytest.raises(CheckpointError, match=message):
            call()
    with pytest.raises(ValueError, match=message):
        full_state_dict(model, None)
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(model, Model().state_dict(), None)
    if rank == 0:  # writes a partial checkpoint anyway
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moe_ext.distributed.checkpoint, "require_ranks", lambda *_: None)
            with pytest.raises(CheckpointError, match=r"a part of model\.experts\.bias_0, model"):
                Checkpoints(folder / "part").save(1, model.flat)
            patch.setattr(_planners, "require", lambda *_: None)
            Checkpoints(folder / "part").save(1, model.flat)


def test_a_part_of_the_experts_is_no_checkpoint(workers, tmp_path):
    for rank in range(2):
        Checkpoints(tmp_path / f"of-{rank}").save(0, nn.Linear(1, 1))
    workers.run(2, without_its_group, tmp_path)
    with pytest.raises(CheckpointError, match=r"does not have all elements of .*experts\."):
        Checkpoints(tmp_path / "part").load(Model().flat)


@on_ranks(2)
def test_experts_that_one_rank_froze(group, rank, tmp_path):
    layer = MoE(D, 4, 2, process_group=group)
    layer.experts.requires_grad_(rank == 0)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.randn(5, D))[0].sum().backward()
    optimizer.step()
    match = "a part of optimizer.experts.weight_0.exp_avg, "
    with pytest.raises(CheckpointError, match=match):
        Checkpoints(tmp_path / "run", group).save(1, layer, [optimizer])


def test_what_does_not_fit_is_named(tmp_path):
    model = Model()
    optimizers = optimizers_of("factored", model)
    train(model, optimizers, None, 0, [1])
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="must contain a checkpoint, got none"):
        checkpoints.load(model)
    checkpoints.save(1, model, optimizers)
    with pytest.raises(CheckpointError, match="must contain step 2, got 1"):
        checkpoints.load(model, step=2)
    with pytest.raises(ValueError, match="^Checkpoints.load: model must be given with optimizers"):
        checkpoints.load(optimizers=optimizers)
    with pytest.raises(ValueError, match="^Checkpoints: step must be below 1e.18, got 1000000"):
        checkpoints.save(10**18, model)

    for number, experts in (
        (4, r"\[5, 4, 6\] instead of \[4, 4, 6\]"),
        (6, "no tensor instead of"),
    ):
        changed = Model(num_experts=number)
        before = changed.dense.weight.clone()
        with pytest.raises(CheckpointError, match=f"state must have the names .*, got .*{experts}"):
            checkpoints.load(changed)
        assert_same_bits(changed.dense.weight, before)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.load(model, optimizers_of("adam", model))
    assert str(raised.value) == (
        f"loading {tmp_path}/step-00000001: the saved optimizers must be ['Adam with 1 group(s)'], "
        "got ['FactoredAdam with 1 group(s)', 'Adam with 2 group(s)']"
    )
    with pytest.raises(
        CheckpointError, match="params must belong to the model, got a parameter of"
    ):
        checkpoints.save(2, model.dense, optimizers)
    assert checkpoints.steps() == [1]
    for keep, rule in ((0, "at least 1"), (None, "a whole number")):
        with pytest.raises(ValueError, match=f"keep must be {rule}, got {keep}"):
            Checkpoints(tmp_path, keep=keep)


def numbers_of(model, optimizer):
    states = [state for param_state in optimizer.state.values() for state in param_state.values()]
    return [*model.state_dict().values(), *states]


def parts(kind_of_experts, kind_of_rest, **options):
    """Returns a function that makes an optimizer for the experts and one for the rest."""

    def make(model):
        split = split_parameters(model)
        return [kind_of_experts(split.experts, **options), kind_of_rest(split.rest)]

    return make


def one_group(kind, **options):
    return lambda model: [kind(model.parameters(), **options)]


def split_groups(*names):
    def make(model):
        split = split_parameters(model)
        return [FactoredAdam([{"params": getattr(split, name)} for name in names])]

    return make


ADAM, SGD, FACTORED = torch.optim.Adam, torch.optim.SGD, FactoredAdam
FIRST, SECOND = "group 0 of optimizer 0", "group 0 of optimizer 1"
OTHER_OPTIMIZERS = {
    "changed places": (
        parts(FACTORED, FACTORED),
        lambda model: parts(FACTORED, FACTORED)(model)[::-1],
        f"experts.weight_0: FactoredAdam (factored), {FIRST} instead of FactoredAdam (factored), "
        f"{SECOND}",
    ),
    "other class": (
        parts(FACTORED, ADAM),
        lambda model: parts(ADAM, FACTORED)(model)[::-1],
        f"experts.weight_0: FactoredAdam (factored), {FIRST} instead of Adam, {SECOND}",
    ),
    "groups": (
        split_groups("experts", "rest"),
        split_groups("rest", "experts"),
        "experts.weight_0: FactoredAdam (factored), group 0 of optimizer 0 instead of "
        "FactoredAdam (factored), group 1 of optimizer 0",
    ),
    "fewer": (
        split_groups("experts"),
        one_group(FACTORED),
        f"gate.w_gate: no optimizer instead of FactoredAdam (factored), {FIRST}",
    ),
    "more": (
        one_group(FACTORED),
        split_groups("experts"),
        f"gate.w_gate: FactoredAdam (factored), {FIRST} instead of no optimizer",
    ),
    "amsgrad": (
        one_group(ADAM),
        one_group(ADAM, amsgrad=True),
        f"gate.w_gate: Adam, {FIRST} instead of Adam (amsgrad), {FIRST}",
    ),
    "momentum": (
        one_group(SGD, momentum=0.9),
        one_group(SGD),
        f"gate.w_gate: SGD (momentum), {FIRST} instead of SGD, {FIRST}",
    ),
    "centered": (
        one_group(torch.optim.RMSprop),
        one_group(torch.optim.RMSprop, centered=True),
        f"gate.w_gate: RMSprop, {FIRST} instead of RMSprop (centered), {FIRST}",
    ),
    "factored": (
        one_group(FactoredAdagrad, factored=False),
        one_group(FactoredAdagrad),
        f"gate.w_gate: FactoredAdagrad, {FIRST} instead of FactoredAdagrad (factored), {FIRST}",
    ),
}


@pytest.mark.parametrize("case", OTHER_OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(tmp_path, case):
    make_saved, make_here, message = OTHER_OPTIMIZERS[case]

    def trained(make):
        model = MoE(D, 4, 2, hidden_sizes=[3])
        optimizers = make(model)
        model(torch.randn(6, D))[0].sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return model, optimizers

    Checkpoints(tmp_path).save(1, *trained(make_saved))
    model, optimizers = trained(make_here)
    before = [value.clone() for optimizer in optimizers for value in numbers_of(model, optimizer)]
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoints(tmp_path).load(model, optimizers)
    after = [value for optimizer in optimizers for value in numbers_of(model, optimizer)]
    for value, unchanged in zip(after, before, strict=True):
        assert_same_bits(value, unchanged)


def save_shared_expert(group, rank, folder):
    layer = MoE(D, 4, 2, shared_expert=SharedExpert(D, [3]), process_group=group)
    model = parallelize(layer, group, dense="fsdp")  # its shared expert is in Adam
    Checkpoints(folder, group).save(1, model, parts(FACTORED, ADAM)(model))


def test_a_shared_expert_of_fsdp_in_another_optimizer(workers, tmp_path):
    workers.run(2, save_shared_expert, tmp_path)
    layer = MoE(D, 4, 2, shared_expert=SharedExpert(D, [3]))
    message = (
        f"got shared_expert.expert.weight_0: Adam, {SECOND} instead of FactoredAdam (factored), "
        f"{FIRST}; shared_expert.expert.weight_1: "
    )
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoints(tmp_path).load(layer, parts(FACTORED, ADAM)(layer))


def test_options_of_the_computation_stay(tmp_path):
    """Another machine may have written the checkpoint, for example without a GPU."""
    layer = MoE(D, 4, 2)
    Checkpoints(tmp_path).save(1, layer, one_group(FACTORED, lr=0.25)(layer))
    lr = torch.tensor(1.0)
    (optimizer,) = one_group(FACTORED, lr=lr, capturable=True)(layer)
    Checkpoints(tmp_path).load(layer, [optimizer])
    group = optimizer.param_groups[0]
    assert group["capturable"] and isinstance(group["lr"], torch.Tensor) and group["lr"] == 0.25
    Checkpoints(tmp_path).save(2, layer, [optimizer])
    (optimizer,) = one_group(FACTORED)(layer)
    Checkpoints(tmp_path).load(layer, [optimizer])
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], float)


# Names


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


def compiled(module):
    return torch.compile(module, backend="eager")


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


def test_a_newer_torch_is_named(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "99.0")
        checkpoints.save(1, model, (), "state")

    def read_metadata(folder):
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(moe_ext.distributed.checkpoint, "read_metadata", read_metadata)
    message = "torch .* cannot read a checkpoint written by torch 99.0: too .*; use torch 99.0"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(model)
    assert checkpoints.load().state == "state"


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def signed(folder):
    """Makes the checksums of a checkpoint valid again, as an attacker would."""
    names = [path.name for path in folder.iterdir() if path.name != "SHA256SUMS"]
    sums = sums_of(folder, names)
    (folder / "SHA256SUMS").write_text("".join(f"{sums[name]}  {name}\n" for name in names))


@pytest.mark.parametrize("cls", [_MEM_FORMAT_ENCODING, os])
def test_metadata_may_use_getattr_only_for_memory_formats(cls, monkeypatch, saved):
    """Python 3.11.0 to 3.11.3 write a member of an enumeration as getattr(class, name)."""
    folder = saved[-1]
    metadata = read_metadata(folder)
    reduced = getattr, (_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda *_: reduced)
    content = pickle.dumps(metadata, protocol=3)  # names as texts
    assert b"getattr" in content
    if cls is os:
        named = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
        content = content.replace(named, b"ctorch\nSize\n")
    (folder / ".metadata").write_bytes(content)
    if cls is os:
        with pytest.raises(ValueError, match="must not name an attribute of"):
            read_metadata(folder)
    else:
        assert read_metadata(folder) == metadata


def write_metadata(folder, metadata):
    content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(content)
    signed(folder)


def code_in(name):
    """Replaces a file, or what the checkpoint holds for a tensor or a number, by code."""

    def tamper(folder, ran):
        if name.startswith("."):
            return write_metadata(folder, Runs(ran))
        if name.endswith(".pt"):
            torch.save(Runs(ran), folder / name)
            return signed(folder)
        metadata = read_metadata(folder)
        places = metadata.storage_data
        (index,) = (index for index in places if index.fqn.split(".")[-1] == name)
        path = folder / places[index].relative_path
        begin = path.stat().st_size
        with path.open("ab") as file:
            torch.save(Runs(ran), content := io.BytesIO())
            file.write(content.getvalue())
        length = path.stat().st_size - begin
        places[index] = dataclasses.replace(places[index], offset=begin, length=length)
        return write_metadata(folder, metadata)

    return tamper


def path_in_metadata(path):
    def tamper(folder, ran):
        metadata = read_metadata(folder)
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(place, relative_path=path)
        write_metadata(folder, metadata)

    return tamper


def path_in_sums(path):
    def tamper(folder, ran):
        sums = (folder / "SHA256SUMS").read_text()
        (folder / "SHA256SUMS").write_text(f"{sums}{sums.partition(' ')[0]}  {path}\n")

    return tamper


def link(name):
    def tamper(folder, ran):
        (folder / name).rename(folder.parent / "other")
        (folder / name).symlink_to(folder.parent / "other")

    return tamper


CHANGES_A_CLASS = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n}X\x01\0\0\0aNsb."
ASKS_FOR_MEMORY = pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + (2**28).to_bytes(8, "little") + b"."
OUTSIDE = ["../../other", "/tmp/other", "..", "a/../../../other"]
TAMPERED = [
    *((code_in(name), "mkdir") for name in (".metadata", "state.pt", "rank-0.pt")),
    *((code_in(name), "mkdir") for name in ("weight", "step")),
    (lambda folder, _: write_metadata(folder, CHANGES_A_CLASS), "must not change a class"),
    (lambda folder, _: write_metadata(folder, ASKS_FOR_MEMORY), "must hold the metadata of a"),
    *((path_in_metadata(path), r"\.metadata must .*: it must name files") for path in OUTSIDE),
    *((path_in_sums(path), "SHA256SUMS is corrupted: it must name files") for path in OUTSIDE),
    *(
        (link(name), f"{name} must be a regular file, got a link")
        for name in (".metadata", "state.pt", "__0_0.distcp")
    ),
]


@pytest.mark.parametrize("tamper, message", TAMPERED)
def test_hostile_checkpoints(tmp_path, tamper, message):
    """No file runs code, changes a class, asks for memory, or names a file of another folder."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())  # its step is a number
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path / "there")
    checkpoints.save(1, model, [optimizer], {"tokens": 1}, {"rank": 0})
    tamper(tmp_path / "there" / "step-00000001", tmp_path / "ran")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.load(model, [optimizer])
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "ran").exists() and not hasattr(Metadata, "a")


def test_a_state_of_another_class_is_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    message = "{} must hold tensors, numbers, texts and containers of these, got .*Fraction"
    model = nn.Linear(2, 2)
    for states in ((Fraction(1, 2), None), (None, [Fraction(1, 2)])):
        name = "state" if states[0] else "rank_state"
        for save in (checkpoints.save, checkpoints.async_save):
            with pytest.raises(CheckpointError, match=message.format(name)):
                save(1, model, (), *states)
    assert checkpoints.steps() == []
    with torch.serialization.safe_globals([Fraction]):
        checkpoints.save(1, model, (), {"share": Fraction(1, 2)})
        assert checkpoints.load().state == {"share": Fraction(1, 2)}
    with pytest.raises(CheckpointError, match="state.pt cannot be read: it must hold .*Fraction"):
        checkpoints.load()


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


def test_optimizers_must_be_a_list(tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    adam = torch.optim.Adam(model.parameters())
    for wrong, got in ((adam, "Adam"), ({"adam": adam}, "dict of str"), (None, "NoneType")):
        message = f"^Checkpoints: optimizers must be a list of torch.optim.Optimizer, got {got}$"
        for save in (checkpoints.save, checkpoints.async_save):
            with pytest.raises(TypeError, match=message):
                save(1, model, wrong)
        with pytest.raises(TypeError, match=message):
            checkpoints.load(model, wrong)
    assert checkpoints.steps() == []


def test_state_of_an_optimizer_that_has_no_parameter(tmp_path):
    model, checkpoints = nn.Linear(2, 2), Checkpoints(tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    checkpoints.save(1, model, [optimizer])
    optimizer.state["global"] = {"norm": 1.0}
    message = r": SGD: state must have parameters as keys \(.*\), got \['global'\]$"
    with pytest.raises(CheckpointError, match=message):
        checkpoints.save(2, model, [optimizer])
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(model, [optimizer])


def test_which_checkpoints_there_are(tmp_path):
    model = nn.Linear(2, 2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    entries = lambda: files_in(tmp_path)  # noqa: E731
    assert checkpoints.steps() == []
    for step in (0, 1):
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model)
    assert checkpoints.load(model, step=0).step == 0 == model.weight[0, 0]
    for step in (2, 3):
        nn.init.constant_(model.weight, step)
        checkpoints.save(step, model)
    assert entries() == ["latest", "step-00000002", "step-00000003"]
    assert (tmp_path / "latest").read_text() == "step-00000003\nstep-00000003\n"

    nn.init.constant_(model.weight, 30)
    checkpoints.save(3, model)  # replaces step 3
    checkpoints.load(model)
    assert model.weight[0, 0] == 30 and checkpoints.steps() == [2, 3]

    # A crash leaves an unpublished folder, a replaced one and a partly deleted one.
    shutil.copytree(tmp_path / "step-00000003", tmp_path / ".step-00000004")
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000004")
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000003.old")
    (tmp_path / ".step-00000001.deleted").mkdir()
    (tmp_path / ".latest.abcd").touch()
    (tmp_path / "notes.txt").touch()
    assert checkpoints.load(model).step == 3
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(3, model)
    assert entries() == ["latest", "notes.txt", "step-00000002", "step-00000003"]


def test_saved_in_the_background(tmp_path):
    model = Model()
    optimizers = optimizers_of("adam", model)
    state = {"random": torch.get_rng_state()}
    now, later = Checkpoints(tmp_path / "now"), Checkpoints(tmp_path / "later")
    train(model, optimizers, None, 0, [1, 2])
    now.save(2, model, optimizers, state)
    later.async_save(2, model, optimizers, state)
    state["random"].zero_()
    train(model, optimizers, None, 0, [3])  # while the thread writes
    later.async_save(3, model, optimizers)
    later.wait()
    assert later.steps() == [2, 3]
    assert_same_contents(contents(tmp_path / "later"), contents(tmp_path / "now"))
    assert torch.equal(later.load(step=2).state["random"], torch.get_rng_state())


@on_ranks(4)
def test_a_rank_that_cannot_write_fails_all(group, rank, tmp_path):
    """Rank 1 cannot write more than 1,000 bytes to a file."""
    model = Model(group)
    checkpoints = Checkpoints(tmp_path, group)
    checkpoints.async_save(1, model, (), {"tokens": 1})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = []
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            checkpoints.save(2, model)
        errors.append(str(raised.value))
        checkpoints.async_save(3, model)
        with pytest.raises(CheckpointError) as raised:
            checkpoints.async_save(4, model)
        errors.append(str(raised.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if rank == 0:
        assert not any(name[0] == "." for name in files_in(tmp_path))
    assert checkpoints.load(model).state == {"tokens": 1}
    checkpoints.save(5, model)
    assert checkpoints.steps() == [1, 5]
    assert Ranks(group).gather_objects(errors) == [errors] * 4
    for step, error in zip((2, 3), errors, strict=True):
        assert f"saving step {step} in {tmp_path}: " in error and "(rank 1)" in error
        assert "File too large" in error


class Crash(BaseException):
    pass


def crash_after(patch, number):
    """Raises `Crash` at every change of files and folders after the first `number` changes."""
    calls = itertools.count()

    def counted(change):
        def call(*args, **options):
            if next(calls) >= number:
                raise Crash
            return change(*args, **options)

        return call

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        patch.setattr(os, name, counted(getattr(os, name)))


@pytest.mark.guarantee("Crashes do not corrupt checkpoints")
@pytest.mark.parametrize("step", [1, 2], ids=["replaced", "next"])
def test_a_crash_between_any_changes_of_the_folder(tmp_path, step):
    model = nn.Linear(2, 2)
    for number in itertools.count():
        checkpoints = Checkpoints(tmp_path / str(number), keep=1)
        nn.init.constant_(model.weight, 1)
        checkpoints.save(1, model)
        nn.init.constant_(model.weight, 2)
        finished = False
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Crash):
            crash_after(patch, number)
            checkpoints.save(step, model)
            finished = True
        loaded = checkpoints.load(model).step, model.weight[0, 0]
        assert loaded == (step, 2) or (not finished and loaded == (1, 1))
        checkpoints.save(3, model)
        assert files_in(tmp_path / str(number)) == ["latest", "step-00000003"]
        if finished:
            break
    assert number > 15


FAILS_TO_SAVE = """
import sys, torch
from moe_ext.distributed import Checkpoints

Checkpoints(sys.argv[1]).async_save(1, torch.nn.Linear(2, 2))
"""


def test_the_error_of_an_unawaited_save_is_printed_at_exit(tmp_path):
    (folder := tmp_path / "no folder").touch()
    command = [sys.executable, "-c", FAILS_TO_SAVE, folder]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, env=environ)
    assert f"CheckpointError: saving step 1 in {folder}" in done.stderr


# Checkpoints of earlier versions


def layer_with_biases(group=None):
    return MoE(D, 5, 2, hidden_sizes=(3,), bias=True, process_group=group).double()


def former_name(name):
    return name.replace("weight_", "weights.").replace("bias_", "biases.")


class Former(nn.Module):
    """A layer with the parameter names from before version 0.1."""

    def __init__(self, layer):
        super().__init__()
        self.gate, self.experts = layer.gate, nn.Module()
        self.experts.weights = nn.ParameterList(weight.detach() for weight in layer.experts.weights)
        self.experts.biases = nn.ParameterList(bias.detach() for bias in layer.experts.biases)


def read_former(group, rank, folder):
    """Loads weights and optimizer; returns the weights and the moments of all ranks."""
    layer = layer_with_biases(group)
    optimizer = torch.optim.Adam(layer.parameters())
    Checkpoints(folder, group).load(layer, [optimizer])
    state = full_state_dict(layer, group)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(optimizer.state[param]["exp_avg"])
    return state, full_state_dict(layer, group)


def test_checkpoints_without_the_names_of_groups(tmp_path, monkeypatch):
    """Earlier versions saved no names of groups, and names with the prefix of torch.compile."""
    state = moe_ext.distributed._state
    layer = nn.ModuleDict({"moe": compiled(layer_with_biases())})
    optimizer = torch.optim.Adam(layer.parameters(), amsgrad=True)
    for param in layer.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(state, "plain_names", lambda model, names: {name: name for name in names})
        patch.setattr(
            moe_ext.distributed.checkpoint,
            "merged_options",
            lambda options, ranks: [
                (kind, [{k: v for k, v in group.items() if k != "param_names"} for group in groups])
                for kind, groups in options
            ],
        )
        Checkpoints(tmp_path).save(1, layer, [optimizer])
    assert "_orig_mod" in next(iter(contents(tmp_path, 1)[0]))
    loaded = nn.ModuleDict({"moe": layer_with_biases()})
    adam = torch.optim.Adam(loaded.parameters(), amsgrad=True)
    Checkpoints(tmp_path).load(loaded, [adam])
    for value, wanted in zip(numbers_of(loaded, adam), numbers_of(layer, optimizer), strict=True):
        assert_same_bits(value, wanted)
    with pytest.raises(CheckpointError, match=r"Adam \(amsgrad\), .* instead of Adam, group 0"):
        Checkpoints(tmp_path).load(loaded, [torch.optim.Adam(loaded.parameters())])


@pytest.mark.parametrize("world", [1, 2])
def test_checkpoints_of_former_versions(workers, tmp_path, world):
    layer = layer_with_biases()
    former = Former(layer)
    optimizer = torch.optim.Adam(former.parameters())
    for param in former.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    Checkpoints(tmp_path).save(1, former, [optimizer])
    state, moments = workers.run(world, read_former, tmp_path)[0]
    params = dict(former.named_parameters())
    for name in layer.state_dict():
        param = params[former_name(name)]
        assert_same_bits(state[name], param.detach())
        assert_same_bits(moments[name], optimizer.state[param]["exp_avg"])
    load_full_state_dict(layer, former.state_dict(), None)
    for name, value in layer.state_dict().items():
        assert_same_bits(value, state[name])
