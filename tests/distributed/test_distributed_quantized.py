"""QuantizedExperts on several ranks: each rank has the panels of its experts."""

import copy

import pytest
import torch
from assertions import assert_all_same_bits, assert_exact, assert_same_bits
from layers import D, layer_of
from moe_ext.distributed.ranks import Ranks
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

from moe_ext import MoE, QuantizedExperts, SharedExpert, TopKGate, count_parameters
from moe_ext.distributed import (
    CheckpointError,
    Checkpoints,
    expert_parameters,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)

FORMATS = ["int8", "fp8"]  # which take any number of inputs


def make(process_group=None, formats=FORMATS, **options):
    """Makes a layer with quantized experts and trained biases; it is the same on every rank."""
    torch.manual_seed(1)
    options = {"hidden_sizes": (7,), "bias": True} | options
    layer = layer_of(TopKGate(D, 5, 2), **sharing(process_group, options))
    draw_parameters(layer, but="experts.")
    layer.experts = QuantizedExperts.from_experts(layer.experts, formats)
    layer.experts.bias_0.requires_grad_()
    return layer


def call(layer, x, part):
    return layer(x)


@pytest.mark.guarantee("Sharding does not change the result")
@pairwise(
    ranks=["1", "2", "3", "2 x 2"],
    exchange=["rows", "tokens"],
    num_chunks=[1, 2],
    recompute=[False, True],
)
def test_equals_one_process(workers, ranks, exchange, num_chunks, recompute):
    shared = {"exchange": exchange, "num_chunks": num_chunks, "recompute": recompute}
    x = tokens_of({"1": [9], "2": [13], "3": [10], "2 x 2": [15]}[ranks])
    assert_equals_one_process(workers, ranks, make, call, x, exchange == "rows", **shared)


class Model(nn.Module):
    """A dense layer, then experts and a shared expert."""

    def __init__(self, group=None, formats=FORMATS):
        super().__init__()
        weights = {"w_importance": 0.0, "w_load": 0.0}
        self.layer = make(group, formats, shared_expert=SharedExpert(D, [4]), **weights)
        torch.manual_seed(2)
        self.dense = nn.Linear(D, D, dtype=torch.float64)

    def forward(self, x):
        return self.layer(self.dense(x))[0]


def train(group, rank, dense):
    """Returns the state of one process after three steps, and the norms of the gradients."""
    model = Model(group)
    wrapped = model if group is None else parallelize(model, group, dense=dense)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    return train_three_steps(wrapped, optimizer, group, rank)


@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_training_equals_one_process(workers, dense):
    """The panels do not change."""
    expected, norms = train(None, 0, dense)
    (state, losses), (_, peer_losses) = workers.run(2, train, dense)
    assert losses == peer_losses
    assert_exact(torch.stack(losses), torch.stack(norms))
    before = Model().state_dict()
    assert state.keys() == expected.keys() == before.keys()
    for name, value in expected.items():
        assert_exact(state[name], value)
        if value.dtype == torch.uint8:
            assert_same_bits(state[name], before[name])
        else:
            assert torch.equal(value, before[name]) == (name == "layer.experts.bias_1")


# Checkpoints


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (1, 2)])
def test_checkpoints(workers, tmp_path, worlds):
    """Any number of ranks can load them."""
    assert_checkpoints_load(workers, worlds, Model, tmp_path)


@on_ranks(2)
def test_states_of_another_format_are_refused(group, rank, tmp_path):
    """The panels of int8 and fp8 have the same shapes here."""
    wanted, model = Model(group, ["int8", "int8"]), Model(group)
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


@on_ranks(2)
def test_fully_shard_divides_the_panels(group, rank):
    """Each rank stores the panels of its share of the experts."""
    layer = make()
    twin = copy.deepcopy(layer)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    for weight in layer.experts.weights:
        assert isinstance(weight.panels, DTensor)
        assert len(weight.panels.to_local()) == (3, 2)[rank]
    x = tokens_of(RANKS["2"]).split(RANKS["2"])[rank]
    assert_step_of_fully_sharded(layer, twin, x, group)


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


@pytest.mark.parametrize("num_experts", [1, 3])
@on_ranks(2)
def test_parameters_are_counted_on_every_rank(group, rank, num_experts):
    """The second of two ranks may have no experts."""
    sizes = (D, num_experts, 1)
    expected = count_parameters(MoE(*sizes, hidden_sizes=[7]))
    layer = MoE(*sizes, hidden_sizes=[7], process_group=group)
    assert count_parameters(layer) == expected
    layer.experts = QuantizedExperts.from_experts(layer.experts, "int8")
    assert count_parameters(layer) == expected
    names = [entry.name for entry in expert_parameters(layer).values()]
    assert names == ["experts.weight_0_int8_7x5_g5_float32", "experts.weight_1_int8_5x7_g7_float32"]


@on_ranks(4)
def test_replicas_have_the_panels_of_the_first(group, rank):
    torch.manual_seed(rank // 2)
    mesh = mesh_of(2, 2)
    layer = MoE(D, 4, 2, hidden_sizes=[7], process_group=mesh)
    layer.experts = QuantizedExperts.from_experts(layer.experts, "int8")
    parallelize(layer, mesh)
    panels = Ranks(group).gather_objects(
        [weight.panels.detach() for weight in layer.experts.weights]
    )
    assert_all_same_bits(panels[rank], panels[rank % 2])
