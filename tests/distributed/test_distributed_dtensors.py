"""Experts as DTensors: the tools of torch give what one process gives."""

import copy

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from one_process import D, backward, mesh_of
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_ as clip_of_torch
from workers import on_ranks

from moe_ext import (
    Experts,
    HierarchicalBalancedGate,
    LoRAExperts,
    MoE,
    MoELSTM,
    QuantizedExperts,
    SharedExpert,
    TopKGate,
    count_parameters,
)
from moe_ext.distributed import (
    Checkpoints,
    ExpertParallel,
    ExpertParallelStyle,
    clip_grad_norm_,
    distribute_experts,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)


class Block(nn.Module):
    """A mixture after a dense layer."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Linear(D, D), layer

    def forward(self, x):
        y, aux = self.layer(self.first(x))
        return x + y, aux.loss


class Model(nn.Module):
    """A flat mixture, and a hierarchical one whose ranks share the secondary gates."""

    def __init__(self, ranks=None, seed=1, device="cpu"):
        super().__init__()
        torch.manual_seed(seed)
        options = {"hidden_sizes": [6], "process_group": ranks}
        gate = HierarchicalBalancedGate(D, 4, 2, (2, 1))
        nn.init.normal_(gate.w_gate, std=0.3)
        nn.init.normal_(gate.w_gate_secondary, std=0.3)
        shared = SharedExpert(D, [4])
        flat = MoE(D, 4, 2, bias=True, gate=TopKGate(D, 4, 2), shared_expert=shared, **options)
        groups = MoE(D, 8, 2, gate=gate, **options)
        self.blocks = nn.ModuleList([Block(flat), Block(groups)])
        self.to(device, torch.float64)

    def forward(self, x):
        total = 0
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return x, total


COUNTS = [3, 2, 0, 7]  # the tokens of four ranks


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_state(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert_exact(whole(state[name]), value)


def assert_gradients(model, alone):
    for (name, param), twin in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (param.grad is None) == (twin.grad is None), name
        if twin.grad is not None:
            assert_exact(whole(param.grad), twin.grad)


def by_blocks(model, ranks):
    return parallelize(model, ranks, dense="fsdp", blocks=model.blocks)


def train_two_steps(model, wrapped, rank):
    """Trains a model and its twin of one process; compares gradients, norms and states."""
    alone = Model()
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (model, alone)]
    for _ in range(2):
        backward(wrapped, COUNTS, rank)
        backward(alone, COUNTS)
        assert_gradients(model, alone)
        assert_exact(clip_grad_norm_(model, 1.0), clip_of_torch(alone.parameters(), 1.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(wrapped, options=options)
    if rank == 0:
        assert_state(state, alone.state_dict())
    assert_state(model.state_dict(), alone.state_dict())
    return alone, optimizers


@pytest.mark.parametrize("blocks", [False, True])
@on_ranks(4)
def test_training_with_replicas(group, rank, blocks):
    """By blocks, each block is gathered alone, with the experts that its ranks do not share."""
    mesh = mesh_of(2, 2)
    model = Model(mesh)
    wrapped = (
        by_blocks(model, mesh) if blocks else parallelize(distribute_experts(model, mesh), mesh)
    )
    experts = model.blocks[0].layer.experts
    assert experts._parameters["weight_0"].shape == (4, D, 6)
    assert experts._parameters["weight_0"].to_local().shape == (2, D, 3 if blocks else 6)
    assert blocks or experts.weight_0.shape == (2, D, 6)
    assert count_parameters(model) == count_parameters(Model())
    train_two_steps(model, wrapped, rank)


@on_ranks(4)
def test_the_user_shards_the_model(group, rank):
    """By fully_shard, as torch's documentation shows it for expert parallelism."""
    mesh = mesh_of(2, 2)
    model = distribute_experts(Model(mesh), mesh)
    for block in model.blocks[:1]:
        fully_shard(block.layer.experts, mesh=mesh["copies"])
        fully_shard(block, mesh=mesh._flatten())
    del model.blocks[1]
    alone = Model()
    del alone.blocks[1]
    backward(model, COUNTS, rank)
    backward(alone, COUNTS)
    assert_gradients(model, alone)
    experts = model.blocks[0].layer.experts
    expected = clip_of_torch(alone.blocks[0].layer.experts.parameters(), 1e9)
    assert_exact(whole(clip_of_torch(experts.parameters(), 1e9)), expected)
    with pytest.raises(RuntimeError, match="must have the same mesh"):
        clip_of_torch(model.parameters(), 1e9)
    assert_exact(clip_grad_norm_(model, 1e9), clip_of_torch(alone.parameters(), 1e9))


@on_ranks(4)
def test_plain_checkpoints_of_torch(group, rank, tmp_path):
    """dcp.save and dcp.load know the experts of all ranks, also those of another sharding."""
    mesh = mesh_of(2, 2)
    expected = Model().state_dict()
    for name, ranks, prepare in (
        ("shards", group, distribute_experts),
        ("replicas", mesh, distribute_experts),
        ("blocks", mesh, by_blocks),
    ):
        model = prepare(Model(ranks), ranks)
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / name)
        for saved in sorted(tmp_path.iterdir()):
            for param in model.parameters():
                nn.init.zeros_(param.detach())
            state = model.state_dict()
            dcp.load(state, checkpoint_id=saved)
            assert_state(state, expected)


@on_ranks(4)
def test_checkpoints_fit_plain_experts(group, rank, tmp_path):
    """Saves and loads experts that are DTensors or not, with their optimizers.

    Each way loads what the way before it saved.
    """
    mesh = mesh_of(2, 2)
    ways = {
        "plain": lambda: parallelize(Model(mesh), mesh),
        "dtensors": lambda: parallelize(distribute_experts(Model(mesh), mesh), mesh),
        "blocks": lambda: by_blocks(Model(mesh), mesh),
    }
    states = {}
    for name, make in ways.items():
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        backward(model, COUNTS, rank)
        optimizer.step()
        Checkpoints(tmp_path / name, mesh).save(1, model, [optimizer])
        optimizer.zero_grad()
        backward(model, COUNTS, rank)
        optimizer.step()
        states[name] = full_state_dict(model, mesh)
    for make, saved in zip(ways.values(), [*ways][-1:] + [*ways][:-1], strict=True):
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        for param in model.parameters():
            nn.init.zeros_(param.detach())
        Checkpoints(tmp_path / saved, mesh).load(model, [optimizer])
        backward(model, COUNTS, rank)
        optimizer.step()
        assert_state(full_state_dict(model, mesh), states["plain"])
        draw = Model(seed=5).state_dict()
        load_full_state_dict(model, draw, mesh)
        assert_state(full_state_dict(model, mesh), draw if rank == 0 else {})


@on_ranks(2)
def test_chunks_of_experts(group, rank):
    """`split` of the experts, which no forward pass of a module announces."""
    layer = MoE(D, 4, 2, parallel=ExpertParallel(group, num_chunks=2)).eval()  # without noise
    twin = copy.deepcopy(layer)
    distribute_experts(layer, group)
    x = torch.randn(5, D)
    (y, aux), (expected, expected_aux) = layer(x), twin(x)
    assert_same_bits(y, expected)
    (y.square().sum() + aux.loss).backward()
    (expected.square().sum() + expected_aux.loss).backward()
    for param, wanted in zip(layer.experts.parameters(), twin.experts.parameters(), strict=True):
        assert_same_bits(param.grad.to_local(), wanted.grad)


@on_ranks(2)
def test_one_block_is_whole_at_a_time(group, rank):
    """Hooks of FSDP count the gathered parameters in the forward and the backward pass."""
    mesh = mesh_of(2, 1)
    model = Model(mesh)
    sizes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    by_blocks(model, mesh)
    gathered, peaks = {}, []
    unshard, to_sharded = FSDPParamGroup.unshard, FSDPParamGroup._to_sharded

    def begin(unit, *args, **options):
        result = unshard(unit, *args, **options)
        gathered[unit] = sum(p.sharded_param.nbytes for p in unit.fsdp_params)
        peaks.append(sum(gathered.values()))
        return result

    def end(unit):
        gathered.pop(unit, None)
        return to_sharded(unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParamGroup, "unshard", begin)
        patch.setattr(FSDPParamGroup, "_to_sharded", end)
        backward(model, [3, 4], rank)
        assert len(peaks) >= 8 and not gathered
        assert 0.5 * max(sizes) < max(peaks) <= max(sizes)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([])  # torch's default: the next one
        backward(model, [3, 4], rank)
        assert max(peaks) > max(sizes)


@on_ranks(4)
def test_a_model_on_the_meta_device(group, rank, tmp_path):
    mesh = mesh_of(2, 2)

    def flat(**options):
        model = Model(mesh, **options)
        del model.blocks[1]  # which has thresholds
        return model

    saved = flat()
    Checkpoints(tmp_path, mesh).save(1, saved)
    model = by_blocks(flat(device="meta"), mesh)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    Checkpoints(tmp_path, mesh).load(model)
    expected = full_state_dict(saved, mesh)
    assert_state(full_state_dict(model, mesh), expected)
    backward(model, COUNTS, rank)
    with pytest.raises(RuntimeError, match="before fully_shard"):
        model.blocks[0].layer.experts.reset_parameters()
    with pytest.raises(ValueError, match=r"^parallelize: a parameter must not be on the meta dev"):
        by_blocks(Model(mesh, device="meta"), mesh)
    chunks = Block(MoE(D, 4, 2, parallel=ExpertParallel(mesh, num_chunks=2)))
    with pytest.raises(ValueError, match="^parallelize: num_chunks must be 1 for experts that are"):
        parallelize(chunks, mesh, dense="fsdp", blocks=[chunks])
    with pytest.raises(ValueError, match="^parallelize: blocks must be modules of the model, got"):
        parallelize(flat(), mesh, dense="fsdp", blocks=[nn.Linear(D, D)])
    with pytest.raises(ValueError, match='^parallelize: blocks must be left out with dense="ddp"'):
        parallelize(model, mesh, blocks=model.blocks)


class Odd(Experts):
    """Experts with a parameter that two replicas cannot divide."""

    def __init__(self, num_experts):
        super().__init__(num_experts, D)
        self.scale = nn.Parameter(torch.ones(num_experts, 1))


@on_ranks(4)
def test_a_refused_model_does_not_change(group, rank):
    mesh = mesh_of(2, 2)

    def refused(make, message):
        torch.manual_seed(rank)
        model = make()
        before = [param.detach().clone() for param in model.parameters()]
        blocks = [nn.Linear(D, D)] if "blocks" in message else [model]
        with pytest.raises(ValueError, match=f"^parallelize: {message}"):
            parallelize(model, mesh, dense="fsdp", blocks=blocks)
        assert not isinstance(model, FSDPModule)
        for param, value in zip(model.parameters(), before, strict=True):
            assert not param._post_accumulate_grad_hooks
            assert_same_bits(param.detach(), value)

    def block(num_chunks=1, num_experts=4):
        parallel = ExpertParallel(mesh, num_chunks=num_chunks)
        experts = Odd(num_experts // 2) if num_experts == 6 else None
        return Block(MoE(D, num_experts, 2, experts=experts, parallel=parallel))

    def half():
        model = block()
        model.first.bfloat16()
        return model

    refused(half, "model must have dense parameters of one dtype")
    refused(lambda: block(num_experts=6), "parameters of .* must have a size that the 2 replicas")
    refused(lambda: block(num_chunks=2), "num_chunks must be 1")
    refused(block, "blocks must be modules of the model")


@on_ranks(2)
def test_what_torch_cannot_share_is_refused(group, rank):
    layer = MoE(D, 4, 2, process_group=group)
    model = distribute_experts(nn.Sequential(layer), group)
    before = layer.experts.weight_0.detach().clone()
    with pytest.raises(ValueError, match=r"module must have no experts .*'0.experts.weight_0, "):
        DistributedDataParallel(model, process_group=group)
    assert_same_bits(layer.experts.weight_0, before)
    with pytest.raises(RuntimeError, match="^Cannot concatenate overlapping meshes: "):
        fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("all",)))
    layer = distribute_experts(MoE(D, 4, 2, process_group=group), group)
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        clip_of_torch(layer.parameters(), 1.0)
    copied = copy.deepcopy(distribute_experts(MoE(D, 4, 2, process_group=group), group))
    assert isinstance(copied.experts._parameters["weight_0"], DTensor)
    copied(torch.randn(3, D))
    copied.experts.reset_parameters()
    assert "4 x" not in repr(copied.experts)


@on_ranks(2)
def test_what_distribute_experts_refuses(group, rank):
    def prepare(experts=None, num_experts=4, **options):
        layer = MoE(D, num_experts, 2, process_group=group, experts=experts, **options)
        distribute_experts(layer, group)

    two_experts = MoE(D, 2, 1).experts
    packed = QuantizedExperts.from_experts(two_experts, "int8")
    for refused, wrong in {
        "experts must have parameters with one row for each expert, got 'ModuleExperts'": (
            lambda: prepare([nn.Linear(D, D) for _ in range(2)])
        ),
        r"experts\.weight_0_int8\S* of QuantizedExperts must be floating-point": (
            lambda: prepare(packed)
        ),
        r"num_experts = 6 must give the ranks \[3, 3\] experts": (
            lambda: prepare(num_experts=6, gate=HierarchicalBalancedGate(D, 3, 2, (2, 1)))
        ),
        "model must have no MoELSTM": (
            lambda: distribute_experts(MoELSTM(D, D, 4, 2, process_group=group), group)
        ),
        r"process_group must have the ranks \[0, 1\]": (
            lambda: distribute_experts(MoE(D, 4, 2, process_group=group), None)
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^distribute_experts: .*{refused}"):
            wrong()
    layer = MoE(D, 4, 2, process_group=group, experts=LoRAExperts(two_experts, rank=2, alpha=4))
    distribute_experts(layer, group)
    adapters = layer.experts.adapters["default"]._parameters
    assert all(param.shape[0] == 4 for param in adapters.values())
    layer(torch.randn(3, D))[0].sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in adapters.values())
    layer = distribute_experts(MoE(D, 4, 2, process_group=group), group)
    layer.experts = LoRAExperts(layer.experts, rank=2, alpha=4)
    refused = r"adapters.default.a_0 must be a DTensor \(add it before distribute_experts"
    with pytest.raises(ValueError, match=refused):
        full_state_dict(layer, group)


@on_ranks(4)
def test_the_style_shards_an_existing_model(group, rank):
    mesh = init_device_mesh("cpu", (4,))
    alone, model = Model(), Model(seed=1 + rank)  # the values of rank 0 count
    styles = {
        "blocks.0.layer": ExpertParallelStyle(ExpertParallel(None, exchange="tokens")),
        "blocks.1.layer": ExpertParallelStyle(),
    }
    parallelize_module(model, mesh, styles)
    assert model.blocks[0].layer.experts.weight_0.shape == (1, D, 6)
    train_two_steps(model, parallelize(model, mesh), rank)
    assert count_parameters(model) == count_parameters(alone)
    with pytest.raises(ValueError, match="^ExpertParallelStyle: parallel must have no process_gr"):
        ExpertParallelStyle(ExpertParallel(group))
    with pytest.raises(TypeError, match="^ExpertParallelStyle: parallel must be an ExpertParallel"):
        ExpertParallelStyle("tokens")
    style = ExpertParallelStyle()
    with pytest.raises(TypeError, match="^ExpertParallelStyle: module must be a MoE .*got Linear$"):
        parallelize_module(nn.Linear(D, D), mesh, style)
    with pytest.raises(ValueError, match="^ExpertParallelStyle: module must be made without a"):
        parallelize_module(MoE(D, 4, 2, process_group=group), mesh, style)
    layer = MoE(D, 5, 2)
    before = layer.experts.weight_0.detach().clone() + rank
    layer.experts.weight_0.data += rank
    with pytest.raises(ValueError, match="^ExpertParallelStyle: num_experts = 5 must give the"):
        parallelize_module(layer, mesh, style)
    assert layer.sharding is None
    assert_same_bits(layer.experts.weight_0, before)
