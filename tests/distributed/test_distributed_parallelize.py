"""Models with sharded experts: `parallelize`, clipping, loss scaling and frozen parts."""

import gc
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from assertions import assert_exact, assert_same_bits
from one_process import D, RowExperts, mesh_of, rank_weight, train
from pairwise import pairwise
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from workers import TIMEOUT, on_ranks

from moe_ext import (
    BalancedGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    MoE,
    SharedExpert,
    TopKGate,
    update_gates,
)
from moe_ext.distributed import (
    Checkpoints,
    ExpertParallel,
    ExpertPlacement,
    GradScaler,
    Ranks,
    clip_grad_norm_,
    distribute_experts,
    expert_parameters,
    full_state_dict,
    load_full_state_dict,
    parallelize,
)
from moe_ext.gates import SoftmaxGate
from moe_ext.optim import FactoredAdam, split_parameters


def assert_same_on_all_ranks(value, group):
    for peer in Ranks(group).gather_objects(value):
        assert_same_bits(peer, value)


class ThreeLayers(nn.Module):
    """Two dense layers, one with a single row, and three MoE layers, sharded in different ways."""

    def __init__(self, first=None, second=None, recompute=False):
        super().__init__()
        torch.manual_seed(4)
        self.dense, self.row = nn.Linear(D, D), nn.Linear(D, 1)
        options = {"w_load": 0.0, "recompute": recompute}
        shared = {"gate": TopKGate(D, 5, 2), "shared_expert": SharedExpert(D, [4])}
        self.first = MoE(D, 5, 2, process_group=first, **shared, **options)
        options |= {"process_group": second}
        gate = BalancedGate(D, 6, 1)
        nn.init.normal_(gate.w_gate, std=0.3)
        self.second = MoE(D, 6, 1, gate=gate, hidden_sizes=(5, 4), activation="reglu", **options)
        gate = HierarchicalBalancedGate(D, 3, 2, (2, 1))
        nn.init.normal_(gate.w_gate, std=0.3)
        nn.init.normal_(gate.w_gate_secondary, std=0.3)
        self.third = MoE(D, 6, 2, gate=gate, **options)
        self.double()

    def forward(self, x):
        h, first = self.first(self.dense(x))
        y, second = self.second(x + torch.tanh(h))
        z, third = self.third(y)
        return y + z + self.row(x), first.loss + second.loss + third.loss


OPTIMIZERS = {
    "sgd": (1, lambda params: torch.optim.SGD(params, lr=0.5)),
    "adam": (3, lambda params: torch.optim.Adam(params, lr=0.01)),
}
LAYOUTS = {  # how the dense parameters are distributed, and the tokens of each rank
    "two": ("ddp", [5, 7]),
    "three": ("ddp", [4, 0, 8]),
    "four": ("ddp", [3, 2, 0, 7]),
    "fsdp": ("fsdp", [5, 7]),
    "mesh": ("mesh", [3, 2, 0, 7]),
}


def trained(group, rank, layout, optimizer, recompute, norm_type):
    """Returns the parameters after training, the bounds of the sharded ones, and the norms."""
    dense, counts = LAYOUTS[layout]
    ranks = mesh_of(2, 2) if dense == "mesh" and group else group
    model = ThreeLayers(group, ranks, recompute)  # on a mesh, the last experts are replicated
    wrapped = model
    if group is not None:
        wrapped = parallelize(model, ranks, dense="fsdp" if dense == "fsdp" else "ddp")
    steps, make = OPTIMIZERS[optimizer]
    norms = train(wrapped, make(model.parameters()), counts, rank, steps, norm_type)
    params = {name: p.detach() for name, p in model.named_parameters()}
    params = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in params.items()}
    bounds = {name: entry.bounds for name, entry in expert_parameters(model).items()}
    return params, bounds, norms


@pytest.mark.guarantee("Sharding does not change the result")
@pairwise(
    layout=LAYOUTS, optimizer=OPTIMIZERS, recompute=[False, True], norm_type=[2.0, 1.0, math.inf]
)
def test_training_equals_one_process(workers, layout, optimizer, recompute, norm_type):
    """The parameters, and the norms by which the gradients are clipped."""
    expected, _, norms = trained(None, None, layout, optimizer, False, norm_type)
    _, counts = LAYOUTS[layout]
    parts = workers.run(len(counts), trained, layout, optimizer, recompute, norm_type)
    for params, bounds, norms_here in parts:
        for norm, wanted, first in zip(norms_here, norms, parts[0][2], strict=True):
            assert_exact(norm, wanted)
            assert_same_bits(norm, first)  # all ranks decide alike
        for name, value in expected.items():
            first, last, _ = bounds.get(name, (0, None, None))
            assert_exact(params[name], value[first:last])


# Clipping


@on_ranks(2)
def test_clipping_if_experts_of_a_rank_have_no_parameters(group, rank):
    experts = [nn.Identity()] * 2 if rank == 0 else [nn.Linear(D, D) for _ in range(2)]
    layer = MoE(D, 4, 2, experts=experts, process_group=group)
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    gate_bytes, expert_bytes = 2 * D * 4, 2 * (D * D + D)
    norm = torch.tensor((gate_bytes + expert_bytes) ** 0.5)
    torch.testing.assert_close(clip_grad_norm_(layer, 1.0), norm)


@on_ranks(2)
def test_clipping_a_stage_without_parameters(group, rank):
    stage = nn.ReLU() if rank == 0 else nn.Linear(D, D, bias=False)
    for param in stage.parameters():
        param.grad = torch.ones_like(param)
    assert clip_grad_norm_(stage, 1.0, stages=group) == D
    assert clip_grad_norm_(nn.ReLU(), 1.0) == 0


@on_ranks(2)
def test_clipping_refuses_infinity_everywhere(group, rank):
    layer = MoE(D, 2, 1, process_group=group)
    for param in layer.parameters():
        param.grad = torch.zeros_like(param)
    layer.experts.weights[0].grad[0, 0, 0] = [1.0, math.inf][rank]
    with pytest.raises(RuntimeError, match="norm of order 2.0 must be finite, got inf"):
        clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(layer, 1.0) == math.inf  # on all ranks, which can skip the step
    for norm_type in (0, "two", None, math.nan):
        message = f"^clip_grad_norm_: norm_type must be a number above 0, got {norm_type}"
        with pytest.raises(ValueError, match=message.replace("got two", "got 'two'")):
            clip_grad_norm_(layer, 1.0, norm_type)
    for max_norm in (-1.0, math.nan, "1"):
        with pytest.raises(ValueError, match="^clip_grad_norm_: max_norm must be a number, at l"):
            clip_grad_norm_(layer, max_norm)
    with pytest.raises(TypeError, match="^clip_grad_norm_: model must be an nn.Module .*generator"):
        clip_grad_norm_(layer.parameters(), 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@on_ranks(2)
def test_clipping_other_types_and_ranks_without_experts(group, rank, dtype):
    """One expert is sharded over two ranks; the largest float16 number is 65,504."""
    layer = MoE(D, 1, 1, hidden_sizes=(5,), expert_dtype=dtype, process_group=group)
    for param in layer.experts.parameters():
        param.grad = torch.zeros_like(param)
    grad = layer.experts.weights[0].grad
    if rank == 0:
        grad[0, 0, :2] = torch.tensor([3000.0, 4000.0])
    assert clip_grad_norm_(layer, 1e9, math.inf) == 4000
    assert clip_grad_norm_(layer, 1.0) == 5000
    if rank == 0:
        clipped = torch.tensor([0.6, 0.8])
        torch.testing.assert_close(grad[0, 0, :2].float(), clipped, rtol=1e-3, atol=0)
    else:
        assert grad.numel() == 0


# Loss scaling


def scaled_step(group, rank, bad_rank, as_mesh=False, idle_rank=None):
    layer = MoE(D, 2, 1, process_group=group)
    if as_mesh:
        group = DeviceMesh.from_group(group, "cpu")
    scaler = GradScaler("cpu", process_group=group, init_scale=8.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.experts.weights[0].detach().clone()
    if rank != idle_rank:
        for param in layer.parameters():
            param.grad = torch.full_like(param, 8.0)
    if rank == bad_rank:
        layer.gate.w_gate.grad[0, 0] = math.nan
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return before - layer.experts.weights[0].detach(), scaler.get_scale()


@pytest.mark.parametrize(
    "bad_rank, as_mesh, idle_rank",
    [(None, False, None), (0, True, None), (1, False, None), (1, False, 0)],
)
def test_an_overflow_anywhere_skips_the_step_everywhere(workers, bad_rank, as_mesh, idle_rank):
    """Also if a rank has no gradients."""
    alone = scaled_step(None, 0, bad_rank and 0)
    for change, scale in [alone, *workers.run(2, scaled_step, bad_rank, as_mesh, idle_rank)]:
        torch.testing.assert_close(change, torch.full_like(change, float(bad_rank is None)))
        assert scale == (8 if bad_rank is None else 4)


# Parameters without gradients


class NoGradient(nn.Linear):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("exchange", ["rows", "tokens"])
@pytest.mark.parametrize("num_chunks", [1, 2])
@on_ranks(2)
def test_experts_of_a_rank_without_gradient(group, rank, num_chunks, exchange):
    """The experts of rank 0 have no gradient, not even one for the rows that they receive."""
    experts = [NoGradient(D, D) if rank == 0 else nn.Linear(D, D) for _ in range(2)]
    parallel = ExpertParallel(group, exchange=exchange, num_chunks=num_chunks)
    model = parallelize(MoE(D, 4, 2, experts=experts, parallel=parallel), group)
    x = rank_weight(rank) * torch.randn(6, D)
    y, aux = model(x.requires_grad_())
    (y.square().sum() + aux.loss).backward()
    assert x.grad is not None and x.grad.isfinite().all()


class PartlyUnused(nn.Module):
    """DistributedDataParallel averages `unused` first, alone, as soon as its gradient is known."""

    def __init__(self, group):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.moe = MoE(D, 4, 2, process_group=group)
        self.large = nn.Linear(D, 1 << 17)  # fills the last bucket, of one MiB
        self.unused = nn.Linear(D, D)

    def forward(self, x, uses_all):
        x = self.first(x)
        if uses_all:
            x = x + self.unused(x)
        y, aux = self.moe(x)
        return self.large(y).mean(), aux.loss


@on_ranks(2)
def test_a_parameter_that_one_rank_does_not_use(group, rank):
    """The gradient of rank 1 is averaged before its experts send theirs, that of rank 0 later."""
    model = parallelize(PartlyUnused(group), group, find_unused_parameters=True)
    for _ in range(2):
        y, loss = model(torch.randn(4, D), rank == 0)
        (y + loss).backward()
    for name, param in model.named_parameters():
        if "experts" not in name and param.grad is not None:
            assert_same_on_all_ranks(param.grad, group)


@on_ranks(2)
def test_the_group_of_parallelize_has_the_timeout_of_the_ranks(group, rank):
    model = parallelize(MoE(D, 4, 2, process_group=group), group)
    assert isinstance(model, DistributedDataParallel) and model.process_group is not group
    timeouts = [
        group_._get_backend(torch.device("cpu")).options._timeout
        for group_ in (group, model.process_group)
    ]
    assert timeouts[0] == timeouts[1] == TIMEOUT


class UsedWithRows(nn.Linear):
    """Has no gradient without rows."""

    def forward(self, x):
        return super().forward(x) if len(x) else x


@on_ranks(2)
def test_gradients_of_replicas_that_one_rank_has_not_used(group, rank):
    """Each replica uses another expert; the gradients are those of a single process."""
    mesh = mesh_of(2, 1)
    gate = SoftmaxGate(D, 2)
    gate.k = 1
    gate.forward = lambda x, ranks=None: gate.make_routing(
        x.new_ones(len(x), 1), torch.full((len(x), 1), rank), ranks=ranks
    )
    experts = [UsedWithRows(D, D) for _ in range(2)]
    layer = MoE(D, 2, 1, gate=gate, experts=experts, process_group=mesh)
    model = parallelize(layer, mesh, find_unused_parameters=True)
    y, _ = model(torch.ones(3, D))
    y.sum().backward()
    for expert in layer.experts.experts:
        assert_exact(expert.bias.grad, torch.full((D,), 1.5))


def step_on(model, layer, rank):
    """Runs a step and returns the gradient of the first matrix of the experts."""
    y, aux = model(rank_weight(rank) * torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    return layer.experts.weight_0.grad


@on_ranks(2)
def test_gradients_of_replicas_after_an_error(group, rank):
    """Averages the gradients of replicas also after a backward pass that raised an error."""
    mesh = mesh_of(2, 1)
    layer = MoE(D, 4, 2, process_group=mesh)
    model = parallelize(layer, mesh)

    def fail(grad):
        raise RuntimeError("fails on purpose")

    failing = torch.randn(4, D, requires_grad=True)
    failing.register_hook(fail)
    y, aux = layer(failing)
    with pytest.raises(RuntimeError, match="fails on purpose"):
        y.square().sum().backward()
    model.zero_grad()
    assert_same_on_all_ranks(step_on(model, layer, rank), group)


@on_ranks(2)
def test_parts_of_a_model_are_frozen(group, rank):
    """Freezes the experts of one rank, then the gate, then the replicated experts."""
    experts = [nn.Linear(D, D).requires_grad_(rank > 0) for _ in range(2)]
    layer = MoE(D, 4, 2, experts=experts, process_group=group)
    y, aux = parallelize(layer, group)(torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    assert all((expert.weight.grad is not None) == (rank > 0) for expert in experts)
    layer = MoE(D, 4, 2, process_group=group)
    nn.init.normal_(layer.gate.requires_grad_(False).w_gate)
    assert parallelize(layer, group) is layer
    step_on(layer, layer, rank)
    mesh = mesh_of(2, 1)
    layer = MoE(D, 4, 2, process_group=mesh)
    layer.experts.requires_grad_(False)
    step_on(parallelize(layer, mesh), layer, rank)
    assert_same_on_all_ranks(layer.gate.w_gate.grad, group)


@on_ranks(2)
def test_experts_that_are_trained_later(group, rank):
    """Trains replicas of experts that are frozen while the model is prepared."""
    mesh = mesh_of(2, 1)
    layer = MoE(D, 4, 2, process_group=mesh)
    layer.experts.requires_grad_(False)
    model = parallelize(layer, mesh)
    layer.experts.requires_grad_(True)
    assert_same_on_all_ranks(step_on(model, layer, rank), group)


@on_ranks(2)
@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_a_model_that_nobody_holds_is_freed(group, rank, dense):
    """Its memory, and its process groups, each of which has a thread."""
    mesh = mesh_of(2, 1)
    layer = MoE(D, 4, 2, process_group=mesh)
    model = parallelize(layer, mesh, dense=dense)
    step_on(model, layer, rank)
    left = weakref.ref(layer)
    del layer, model
    gc.collect()
    assert left() is None


# What `parallelize` takes


class Blocks(nn.Module):
    """Two layers, in the wrapper of activation checkpointing at several places."""

    def __init__(self, group, wrap):
        super().__init__()
        torch.manual_seed(0 if group is None else dist.get_rank(group))
        experts = [nn.Linear(D, D) for _ in range(4 if group is None else 2)]
        layers = [
            MoE(D, 4, 2, process_group=group),
            MoE(D, 4, 2, experts=experts, process_group=group),
        ]
        if wrap == "layer":
            layers = map(checkpoint_wrapper, layers)
        self.layers = nn.ModuleList(layers)
        if wrap == "experts":
            for layer in self.layers:
                layer.experts = checkpoint_wrapper(layer.experts)
        if wrap == "expert":
            modules = self.layers[1].experts.experts
            for number, expert in enumerate(modules):
                modules[number] = checkpoint_wrapper(expert)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x


@pytest.mark.parametrize("wrap", ["layer", "experts", "expert"])
@on_ranks(2)
def test_layers_in_the_wrapper_of_activation_checkpointing(group, rank, wrap):
    """`parallelize` finds the experts: each rank keeps its own values."""
    model = Blocks(group, wrap)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, group)
    expert_names = [name for name in before if "experts" in name]
    assert len(expert_names) == len(expert_parameters(model)) == 2 + 4
    for name in expert_names:
        assert_same_bits(model.state_dict()[name], before[name])


def gradients_of_blocks(group, rank, wrap):
    model = Blocks(group, "")
    for layer in model.layers:
        nn.init.normal_(layer.gate.w_gate, generator=torch.Generator().manual_seed(5))
    model.eval()
    whole = checkpoint_wrapper(model) if wrap else model
    parallel = parallelize(whole, group, find_unused_parameters=True)
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(rank))
    parallel(x).square().sum().backward()
    return [param.grad for param in model.parameters() if param.grad is not None]


def test_gradients_of_a_model_in_the_wrapper_of_activation_checkpointing(workers):
    """DistributedDataParallel does not average the gradients of the experts."""
    wrapped, plain = (workers.run(2, gradients_of_blocks, wrap) for wrap in (True, False))
    for wrapped_grad, expected in zip(wrapped, plain, strict=True):
        for grad, value in zip(wrapped_grad, expected, strict=True):
            assert_same_bits(grad, value)


@on_ranks(4)
def test_what_parallelize_refuses(group, rank):
    def layer(ranks, **options):
        return MoE(D, 4, 2, process_group=ranks, **options)

    with pytest.raises(ValueError, match="parallelize: dense must .*got 'dp'"):
        parallelize(layer(group), group, dense="dp")
    with pytest.raises(
        ValueError, match=rf"experts\.weight must have one row for .*1.*, got \({D}"
    ):
        parallelize(layer(group, experts=RowExperts(1)), group)
    with pytest.raises(ValueError, match=r"^parallelize: process_group must have the ranks \[0, 1"):
        parallelize(layer(group), None)
    mixed = nn.ModuleList([layer(group), nn.Linear(D, D).bfloat16()])
    with pytest.raises(ValueError, match=r"^parallelize: model must have dense parameters of one"):
        parallelize(mixed, group, dense="fsdp")
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    dist.barrier()  # no rank closes its group while another still connects to it
    with pytest.raises(ValueError, match=r"process_group must have .*, got \[0, 1, 2, 3\]$"):
        parallelize(layer(half[rank // 2]), group)


@on_ranks(4)
def test_torch_wrappers_around_sharded_experts_are_refused(group, rank):
    """DistributedDataParallel would overwrite the experts; fully_shard would mix those of ranks."""
    layer = MoE(D, 4, 2, process_group=group)
    before = [param.detach().clone() for param in layer.experts.parameters()]
    refused = r"module must have no experts .*\(use .*parallelize\), got '0.experts.weight_0, "
    with pytest.raises(ValueError, match=refused):
        DistributedDataParallel(nn.Sequential(layer), process_group=group)
    for param, value in zip(layer.experts.parameters(), before, strict=True):
        assert_same_bits(param.detach(), value)
    parallelize(nn.Sequential(layer), group)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))
    copies = mesh["copies"].get_group()
    DistributedDataParallel(MoE(D, 4, 2, process_group=mesh), process_group=copies)
    every_rank = {"mesh": init_device_mesh("cpu", (4,))}
    refused = (
        r"^MoE: experts.weight_0 must be whole on this rank, .*\(use parallelize\), got 'DTensor'"
    )
    layer = MoE(D, 4, 2, process_group=group)
    with pytest.raises(ValueError, match=refused):
        fully_shard(nn.Sequential(layer), **every_rank)
    with pytest.raises(ValueError, match=refused):
        clip_grad_norm_(layer, 1.0)
    layer = MoE(D, 4, 2, process_group=group)
    fully_shard(layer.experts, **every_rank)  # is noticed in the first forward pass
    with pytest.raises(ValueError, match=refused):
        layer(torch.randn(3, D))
    layer = HierarchicalMoE(D, 4, 2, 1, process_group=group)
    with pytest.raises(ValueError, match=r"^MoE: gate\.w_\w*secondary must be whole on this rank"):
        fully_shard(layer, ignored_params={*layer.experts.parameters()}, **every_rank)
    fully_shard(MoE(D, 4, 2), **every_rank)(torch.randn(3, D))  # the experts are replicas
    replicas = fully_shard(MoE(D, 4, 2, process_group=mesh), mesh=mesh["copies"])
    replicas(torch.randn(3, D))


@on_ranks(4)
def test_a_group_without_this_rank_is_refused(group, rank):
    half = dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", [0, 1])
    layer = MoE(D, 4, 2)
    gate = MoE(D, 4, 2, gate=TopKGate(D, 4, 2, bias_update_rate=0.1))
    for name, use in {
        "ExpertParallel: process_group": lambda some: MoE(D, 4, 2, process_group=some),
        "parallelize: process_group": lambda some: parallelize(layer, some),
        "Checkpoints: process_group": lambda some: Checkpoints("unused", some),
        "full_state_dict: process_group": lambda some: full_state_dict(layer, some),
        "load_full_state_dict: process_group": lambda some: load_full_state_dict(layer, {}, some),
        "GradScaler: process_group": lambda some: GradScaler("cpu", process_group=some),
        "update_gates: process_group": lambda some: update_gates(gate, some),
        "Ranks: group": Ranks,
    }.items():
        for some in (half, mesh) if name != "Ranks: group" else (half,):
            if rank >= 2:
                message = f"^{name} must contain this rank, got a group without rank {rank}; "
                with pytest.raises(ValueError, match=message):
                    use(some)
        with pytest.raises(TypeError, match=f"^{name} must be a ProcessGroup.* or None, got int"):
            use(3)
    dist.barrier()


class Scaled(nn.Linear):
    """An expert with a non-persistent buffer."""

    def __init__(self, number):
        super().__init__(D, D)
        self.register_buffer("scale", torch.tensor(float(number)), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


@pairwise(num_experts=[4, 5], dense=["ddp", "fsdp"])
@on_ranks(2)
def test_experts_keep_all_their_buffers(group, rank, num_experts, dense):
    numbers = [*ExpertPlacement(num_experts, 2).experts_of(rank)]
    experts = [Scaled(number) for number in numbers]
    layer = MoE(D, num_experts, 2, experts=experts, process_group=group)
    model = parallelize(layer, group, dense=dense)
    y, aux = model(torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    assert [float(expert.scale) for expert in experts] == numbers


@pairwise(kind=["modules", "dtensors"], dense=["ddp", "fsdp"])
@on_ranks(4)
def test_replicas_begin_with_the_first_ones_buffers(group, rank, kind, dense):
    mesh = mesh_of(2, 2)
    experts = [Scaled(rank), Scaled(rank)] if kind == "modules" else None
    layer = MoE(D, 4, 2, experts=experts, process_group=mesh)
    if kind == "dtensors":
        layer.experts.register_buffer("scale", torch.full((2,), float(rank)))
        distribute_experts(layer, mesh)
    parallelize(layer, mesh, dense=dense)
    buffers = [*layer.experts.buffers()]
    assert buffers
    for buffer in buffers:
        whole = buffer.to_local() if isinstance(buffer, DTensor) else buffer
        assert (whole == rank % 2).all()


@on_ranks(2)
def test_the_weights_of_a_shared_expert_are_divided_by_rows(group, rank):
    layer = MoE(4, 2, 1, process_group=group, shared_expert=SharedExpert(4, [6]))  # even numbers
    parallelize(layer, group, dense="fsdp")
    weights = list(layer.shared_expert.parameters())
    assert all(0 < weight.to_local().numel() < weight.numel() for weight in weights)
    assert {id(p) for p in weights} <= {id(p) for p in split_parameters(layer).rest}
    with pytest.raises(TypeError, match=r"^FactoredAdam: params must be plain tensors, got a DTen"):
        FactoredAdam(layer.parameters())


@on_ranks(2)
def test_shards_begin_with_the_first_ranks_values(group, rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
    model[1].running_mean.fill_(rank + 1)
    own = [model[0].weight.detach().clone(), model[1].running_mean.clone()]
    parallelize(model, group, dense="fsdp")
    first = Ranks(group).gather_objects(own)[0]
    assert_same_bits(model[0].weight.full_tensor().detach(), first[0])
    assert_same_bits(model[1].running_mean, first[1])
