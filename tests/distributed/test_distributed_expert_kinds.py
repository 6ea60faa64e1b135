"""Packed experts and experts with adapters on several ranks: each rank has those of its experts."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from assertions import assert_all_same_bits, assert_same_bits
from layers import D, layer_of
from moe_ext.distributed.ranks import Ranks  # its former place
from one_process import (
    RANKS,
    assert_checkpoints_load,
    assert_equals_one_process,
    assert_step_of_fully_sharded,
    call,
    draw_parameters,
    mesh_of,
    sharing,
    tokens_of,
    train,
)
from pairwise import pairwise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workers import on_ranks

from moe_ext import MoE, QuantizedExperts, SharedExpert, TopKGate, add_lora, count_parameters
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    expert_parameters,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from moe_ext.lora import disable_lora, lora_state_dict

FORMATS = ["int8", "fp8"]  # which take any number of inputs
PACKED, ADAPTERS, PACKED_ADAPTERS = "packed", "adapters", "adapters of packed"
KINDS = [PACKED, ADAPTERS, PACKED_ADAPTERS]


def make(process_group=None, kind=PACKED, formats=FORMATS, **options):
    """Makes a layer with experts of a kind; it is the same on every rank.

    Packed experts have a trained bias, the others two active adapters.
    """
    torch.manual_seed(1)
    options = {"hidden_sizes": (7,), "bias": True} | options
    layer = layer_of(TopKGate(D, 5, 2), **sharing(process_group, options))
    draw_parameters(layer, but="experts.")
    if kind != ADAPTERS:
        layer.experts = QuantizedExperts.from_experts(layer.experts, formats)
    if kind == PACKED:
        layer.experts.bias_0.requires_grad_()
        return layer
    add_lora(layer, 2, 3, train_rest=True, dtype=torch.float64)
    layer.experts.add_adapter("second", 3, 2, layers=[1], dtype=torch.float64)
    layer.experts.set_adapter("default", "second")
    return draw_parameters(layer, 0.4, but=("gate.", "experts.base.", "shared_expert."))


def simple(kind, group, num_experts=4, k=2):
    """Makes a layer with default values of its experts and adapters."""
    layer = MoE(D, num_experts, k, hidden_sizes=[7], process_group=group)
    if kind in (PACKED, PACKED_ADAPTERS):
        layer.experts = QuantizedExperts.from_experts(layer.experts, "int8")
    if kind in (ADAPTERS, PACKED_ADAPTERS):
        add_lora(layer, 2, 2)
    return layer


@pytest.mark.guarantee("Sharding does not change the result")
@pairwise(
    kind=KINDS,
    ranks=["1", "2", "3", "2 x 2"],
    exchange=["rows", "tokens"],
    num_chunks=[1, 2],
    recompute=[False, True],
)
def test_equals_one_process(workers, kind, ranks, exchange, num_chunks, recompute):
    shared = {"exchange": exchange, "num_chunks": num_chunks, "recompute": recompute}
    x = tokens_of({"1": [9], "2": [13], "3": [10], "2 x 2": [15]}[ranks])
    make_layer = partial(make, kind=kind)
    assert_equals_one_process(workers, ranks, make_layer, call, x, exchange == "rows", **shared)


@on_ranks(3)
def test_new_adapters_are_those_of_one_process(group, rank):
    """For ranks with equal RNG state; the experts of QuantizedExperts know their places too."""
    for kind in ("float", PACKED):
        states, entries = [], {}
        for ranks in (group, None):
            torch.manual_seed(1)
            layer = simple(kind, ranks, num_experts=5)
            torch.manual_seed(2)
            add_lora(layer, 2, 2)
            states.append(lora_state_dict(layer))
            entries = entries or expert_parameters(layer)
        first, last, _ = next(iter(entries.values())).bounds
        for name, value in states[0].items():
            assert_same_bits(value, states[1][name][first:last])


class Model(nn.Module):
    """A dense layer, then experts and a shared expert; rest: not only one adapter is trained."""

    def __init__(self, group=None, kind=PACKED, rest=True, formats=FORMATS):
        super().__init__()
        options = {"w_importance": 0.0, "w_load": 0.0, "shared_expert": SharedExpert(D, [4])}
        self.layer = make(group, kind, formats, **options)
        torch.manual_seed(2)
        self.dense = nn.Linear(D, D, dtype=torch.float64)
        if not rest:
            self.requires_grad_(False)
            self.layer.experts.set_adapter("default")

    def forward(self, x):
        y, aux = self.layer(self.dense(x))
        return y, aux.loss


def trained(group, rank, dense, kind, rest):
    """Returns the state of one process after three steps, and the norms of the gradients."""
    model = Model(group, kind, rest)
    wrapped = model if group is None else parallelize(model, group, dense=dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    norms = train(wrapped, optimizer, RANKS["2"], rank)
    return full_state_dict(wrapped, group), norms


@pytest.mark.parametrize(
    "dense, kind, rest",
    [("ddp", PACKED, True), ("fsdp", PACKED, True), ("ddp", PACKED_ADAPTERS, True)]
    + [("fsdp", ADAPTERS, True), ("ddp", ADAPTERS, False), ("fsdp", PACKED_ADAPTERS, False)],
)
def test_training_equals_one_process(workers, dense, kind, rest):
    """Frozen parameters do not change."""
    expected, norms = trained(None, None, dense, kind, rest)
    (state, actual), (_, peer) = workers.run(2, trained, dense, kind, rest)
    assert actual == peer
    torch.testing.assert_close(torch.stack(actual), torch.stack(norms), rtol=1e-9, atol=0)
    before = Model(None, kind, rest)
    assert state.keys() == expected.keys() == before.state_dict().keys()
    for name, param in before.named_parameters():
        if param.requires_grad:
            torch.testing.assert_close(state[name], expected[name], rtol=1e-9, atol=1e-9)
            assert not torch.equal(expected[name], param), name
        else:
            assert_same_bits(state[name], param.detach())
            assert_same_bits(expected[name], param.detach())


# Checkpoints


@pytest.mark.parametrize(
    "kind, worlds",
    [(PACKED, (2, 3)), (PACKED, (3, 1)), (PACKED_ADAPTERS, (3, 1)), (PACKED_ADAPTERS, (1, 2))],
)
def test_checkpoints(workers, tmp_path, kind, worlds):
    """Any number of ranks can load them."""
    assert_checkpoints_load(workers, worlds, partial(Model, kind=kind), tmp_path)


@pytest.mark.parametrize("kind", [PACKED, PACKED_ADAPTERS])
@on_ranks(2)
def test_states_of_one_process(group, rank, kind):
    model, expected = Model(group, kind), Model(None, kind).state_dict()
    state = Ranks(group).gather_objects(full_state_dict(model, group))[0]
    assert state.keys() == expected.keys()
    assert_all_same_bits([state[name] for name in expected], expected.values())
    for param in model.parameters():
        param.detach().zero_()
    load_full_state_dict(model, state, group)
    assert_all_same_bits(model.state_dict().values(), Model(group, kind).state_dict().values())


@on_ranks(2)
def test_states_of_another_format_are_refused(group, rank, tmp_path):
    """The panels of int8 and fp8 have the same shapes here."""
    wanted, model = Model(group, formats=["int8", "int8"]), Model(group)
    shapes, expected = ([w.panels.shape for w in m.layer.experts.weights] for m in (model, wanted))
    assert shapes == expected
    Checkpoints(tmp_path, group).save(1, wanted)
    before = copy.deepcopy(model.state_dict())
    message = r"weight_1_fp8_5x7_g128_float32_blocks: no tensor instead of \[5, 1, "
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path, group).load(model)
    state = Ranks(group).gather_objects(full_state_dict(wanted, group))[0]
    with pytest.raises(ValueError, match=message):
        load_full_state_dict(model, state, group)
    assert_all_same_bits(model.state_dict().values(), before.values())


# Experts that every rank has


@pytest.mark.parametrize("kind", [PACKED, PACKED_ADAPTERS])
@on_ranks(2)
def test_fully_shard(group, rank, kind):
    """Each rank stores its share of the experts, with their adapters."""
    layer = make(kind=kind)
    twin = copy.deepcopy(layer)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    for param in layer.experts.parameters():
        assert isinstance(param, DTensor) and len(param.to_local()) == (3, 2)[rank]
    x = tokens_of(RANKS["2"]).split(RANKS["2"])[rank]
    with torch.no_grad(), disable_lora(layer), disable_lora(twin):
        assert_same_bits(layer(x)[0], twin(x)[0])
    assert_step_of_fully_sharded(layer, twin, x, group)
    if kind == PACKED_ADAPTERS:
        rule = "must be plain tensors; add adapters before fully_shard"
        with pytest.raises(ValueError, match=rule):
            layer.experts.add_adapter("third", 2, 2)


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
@on_ranks(2)
def test_a_model_with_experts_on_every_rank(group, rank, dense):
    """Panels have another dtype than the parameters that `parallelize` shards."""
    model = nn.Sequential(make(), make(group))
    expected = copy.deepcopy([weight.panels for weight in model[0].experts.weights])
    parallelize(model, group, dense=dense)
    for weight, panels in zip(model[0].experts.weights, expected, strict=True):
        whole = weight.panels.full_tensor() if dense == "fsdp" else weight.panels
        assert_same_bits(whole, panels)


@on_ranks(2)
def test_distributed_data_parallel(group, rank):
    layer = make()
    wrapped = nn.parallel.DistributedDataParallel(layer)
    x = tokens_of(RANKS["2"]).split(RANKS["2"])[rank]
    y, aux = wrapped(x)
    assert_same_bits(y, make()(x)[0])
    (y.square().sum() + aux.loss).backward()
    assert layer.gate.w_gate.grad.isfinite().all()


@pairwise(kind=["float", *KINDS], num_experts=[1, 3])
@on_ranks(2)
def test_parameters_are_counted_on_every_rank(group, rank, kind, num_experts):
    """The second of two ranks may have no experts; it takes part in the backward pass."""
    layer, whole = (simple(kind, ranks, num_experts, k=1) for ranks in (group, None))
    assert count_parameters(layer) == count_parameters(whole)
    names = [entry.name for entry in expert_parameters(layer).values()]
    assert names == [name for name, _ in whole.named_parameters() if name.startswith("experts.")]
    if kind != PACKED:  # whose gate has no gradient with k = 1
        layer(torch.randn(4, D))[0].sum().backward()


@on_ranks(2)
def test_a_shared_a_is_refused(group, rank):
    """Each rank would have its own A."""
    layer = simple("float", group)
    add_lora(layer, 2, 2, shared_a=True)
    message = (
        r"experts.adapters.default.a_0 must have one row for each of this rank's experts \(2\)"
    )
    for function in (parallelize, full_state_dict):
        with pytest.raises(ValueError, match=message):
            function(layer, group)


@pytest.mark.parametrize("kind", [PACKED, ADAPTERS])
@on_ranks(4)
def test_replicas_have_the_experts_of_the_first(group, rank, kind):
    torch.manual_seed(rank // 2)
    mesh = mesh_of(2, 2)
    layer = simple(kind, mesh)
    parallelize(layer, mesh)
    values = Ranks(group).gather_objects([param.detach() for param in layer.experts.parameters()])
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
