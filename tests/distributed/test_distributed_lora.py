"""LoRAExperts on several ranks: each rank has the adapters of its experts."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from assertions import assert_all_same_bits, assert_same_bits
from layers import D, layer_of
from one_process import (
    RANKS,
    assert_checkpoints_load,
    assert_equals_one_process,
    assert_step_of_fully_sharded,
    draw_parameters,
    mesh_of,
    sharing,
    tokens_of,
    train_three_steps,
)
from pairwise import pairwise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workers import on_ranks

from moe_ext import MoE, QuantizedExperts, SharedExpert, TopKGate, add_lora, count_parameters
from moe_ext.distributed import (
    expert_parameters,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from moe_ext.lora import disable_lora, lora_experts, lora_state_dict
from moe_ext.ranks import Ranks


def make(process_group=None, packed=False, **options):
    """Makes a layer with two active adapters of its experts; it is the same on every rank."""
    torch.manual_seed(1)
    options = {"hidden_sizes": (7,), "bias": True} | options
    layer = layer_of(TopKGate(D, 5, 2), **sharing(process_group, options))
    draw_parameters(layer, but="experts.")
    if packed:
        layer.experts = QuantizedExperts.from_experts(layer.experts, ["int8", "fp8"])
    add_lora(layer, 2, 3, train_rest=True, dtype=torch.float64)
    [experts] = [e for path, e in lora_experts(layer).items() if path == "experts"]
    experts.add_adapter("second", 3, 2, layers=[1], dtype=torch.float64)
    experts.set_adapter("default", "second")
    draw_parameters(layer, 0.4, but=("gate.", "experts.base.", "shared_expert."))
    return layer


def call(layer, x, part):
    return layer(x)


@pytest.mark.guarantee("Sharding does not change the result")
@pairwise(
    ranks=["1", "2", "3", "2 x 2"],
    exchange=["rows", "tokens"],
    num_chunks=[1, 2],
    recompute=[False, True],
    packed=[False, True],
)
def test_equals_one_process(workers, ranks, exchange, num_chunks, recompute, packed):
    shared = {"exchange": exchange, "num_chunks": num_chunks, "recompute": recompute}
    x = tokens_of({"1": [9], "2": [13], "3": [10], "2 x 2": [15]}[ranks])
    make_layer = partial(make, packed=packed)
    assert_equals_one_process(workers, ranks, make_layer, call, x, exchange == "rows", **shared)


@on_ranks(3)
def test_new_adapters_are_those_of_one_process(group, rank):
    """For ranks with equal RNG state; the experts of QuantizedExperts know their places too."""
    for packed in (False, True):
        states, entries = [], {}
        for ranks in (group, None):
            torch.manual_seed(1)
            layer = MoE(D, 5, 2, hidden_sizes=[7], process_group=ranks)
            if packed:
                layer.experts = QuantizedExperts.from_experts(layer.experts, "int8")
            torch.manual_seed(2)
            add_lora(layer, 2, 2)
            states.append(lora_state_dict(layer))
            entries = entries or expert_parameters(layer)
        first, last, _ = next(iter(entries.values())).bounds
        for name, value in states[0].items():
            assert_same_bits(value, states[1][name][first:last])


class Model(nn.Module):
    """A dense layer, then experts with adapters and a shared expert."""

    def __init__(self, group=None, packed=True, rest=True):
        super().__init__()
        weights = {"w_importance": 0.0, "w_load": 0.0}
        self.layer = make(group, packed, shared_expert=SharedExpert(D, [4]), **weights)
        torch.manual_seed(2)
        self.dense = nn.Linear(D, D, dtype=torch.float64)
        if not rest:
            self.requires_grad_(False)
            self.layer.experts.set_adapter("default")

    def forward(self, x):
        return self.layer(self.dense(x))[0]


def train(group, rank, dense, packed, rest):
    """Returns the state of one process after three steps, and the norms of the gradients."""
    model = Model(group, packed, rest)
    wrapped = model if group is None else parallelize(model, group, dense=dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return train_three_steps(wrapped, optimizer, group, rank)


@pytest.mark.parametrize(
    "dense, packed, rest",
    [("ddp", True, True), ("fsdp", False, True), ("ddp", False, False), ("fsdp", True, False)],
)
def test_training_equals_one_process(workers, dense, packed, rest):
    """The base of the experts does not change; with rest = False, only an adapter is trained."""
    expected, norms = train(None, 0, dense, packed, rest)
    (state, losses), (_, peer_losses) = workers.run(2, train, dense, packed, rest)
    assert losses == peer_losses
    torch.testing.assert_close(torch.stack(losses), torch.stack(norms), rtol=1e-9, atol=0)
    before = Model(None, packed, rest).state_dict()
    assert state.keys() == expected.keys() == before.keys()
    for name, value in expected.items():
        if ".base." in name:
            assert_same_bits(state[name], before[name])
        else:
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)
            trained = "experts.adapters.default" in name or rest
            assert torch.equal(value, before[name]) != trained, name


# Checkpoints


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2)])
def test_checkpoints(workers, tmp_path, worlds):
    """Any number of ranks can load them."""
    assert_checkpoints_load(workers, worlds, Model, tmp_path)


@on_ranks(2)
def test_states_of_one_process(group, rank):
    model, expected = Model(group), Model().state_dict()
    state = Ranks(group).gather_objects(full_state_dict(model, group))[0]
    assert state.keys() == expected.keys()
    assert_all_same_bits([state[name] for name in expected], expected.values())
    for param in model.parameters():
        param.detach().zero_()
    load_full_state_dict(model, state, group)
    assert_all_same_bits(model.state_dict().values(), Model(group).state_dict().values())


# Experts that every rank has


@on_ranks(2)
def test_fully_shard(group, rank):
    """Each rank stores the base and the adapters of its share of the experts."""
    layer = make(packed=True)
    twin = copy.deepcopy(layer)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    adapter = layer.experts.adapters["default"]
    assert isinstance(adapter.a_0, DTensor) and len(adapter.a_0.to_local()) == (3, 2)[rank]
    x = tokens_of(RANKS["2"]).split(RANKS["2"])[rank]
    with torch.no_grad(), disable_lora(layer), disable_lora(twin):
        assert_same_bits(layer(x)[0], twin(x)[0])
    assert_step_of_fully_sharded(layer, twin, x, group)
    with pytest.raises(ValueError, match="must be plain tensors; add adapters before fully_shard"):
        layer.experts.add_adapter("third", 2, 2)


@pytest.mark.parametrize("num_experts", [1, 3])
@on_ranks(2)
def test_parameters_are_counted_on_every_rank(group, rank, num_experts):
    """The second of two ranks may have no experts."""
    layer, whole = (
        MoE(D, num_experts, 1, hidden_sizes=[7], process_group=ranks) for ranks in (group, None)
    )
    for m in (layer, whole):
        add_lora(m, 2, 2)
    assert count_parameters(layer) == count_parameters(whole)
    y, _ = layer(torch.randn(4, D))
    y.sum().backward()  # a rank without experts takes part
    names = [entry.name for entry in expert_parameters(layer).values()]
    assert names == [name for name, _ in whole.named_parameters() if name.startswith("experts.")]


@on_ranks(2)
def test_a_shared_a_is_refused(group, rank):
    """Each rank would have its own A."""
    layer = MoE(D, 4, 2, hidden_sizes=[7], process_group=group)
    add_lora(layer, 2, 2, shared_a=True)
    message = (
        r"experts.adapters.default.a_0 must have one row for each of this rank's experts \(2\)"
    )
    for function in (parallelize, full_state_dict):
        with pytest.raises(ValueError, match=message):
            function(layer, group)


@on_ranks(4)
def test_replicas_have_the_adapters_of_the_first(group, rank):
    torch.manual_seed(rank // 2)
    mesh = mesh_of(2, 2)
    layer = MoE(D, 4, 2, hidden_sizes=[7], process_group=mesh)
    add_lora(layer, 2, 2)
    parallelize(layer, mesh)
    values = Ranks(group).gather_objects(list(lora_state_dict(layer).values()))
    assert_all_same_bits(values[rank], values[rank % 2])


@on_ranks(2)
def test_files_of_peft(group, rank, tmp_path):
    """Each rank reads the matrices of its experts."""
    peft = pytest.importorskip("moe_ext.integrations.peft")
    torch.manual_seed(1)
    whole = MoE(D, 5, 2, hidden_sizes=[7], activation="swiglu")
    add_lora(whole, 2, 2)
    for param in whole.experts.adapters.parameters():
        nn.init.normal_(param.data)
    if rank == 0:
        peft.save_adapter(whole, tmp_path)
    dist.barrier(group)
    layer = MoE(D, 5, 2, hidden_sizes=[7], activation="swiglu", process_group=group)
    peft.load_adapter(layer, tmp_path)
    state = Ranks(group).gather_objects(full_state_dict(layer, group))[0]
    for name, value in lora_state_dict(whole).items():
        assert_same_bits(state[name], value)
    with pytest.raises(ValueError, match="save_adapter: model must have all experts on one rank"):
        peft.save_adapter(layer, tmp_path)
