"""Steps of a layer on several ranks, compared with the same step of a single process."""

import math
from functools import partial

import torch
import torch.distributed as dist
from assertions import assert_exact, assert_same_bits
from layers import D
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from moe_ext import Experts, Gate, count_parameters
from moe_ext.distributed import (
    Checkpoints,
    ExpertParallel,
    Ranks,
    clip_grad_norm_,
    expert_parameters,
    full_state_dict,
)
from moe_ext.gates import HierarchicalGate

# The numbers of tokens of each rank; in the last one, two replicas of the experts have two shards.
RANKS = {"1": [9], "2": [5, 8], "3": [4, 0, 6], "2 x 2": [3, 7, 0, 5]}
COUNTS = RANKS | {"4": [3, 7, 0, 5]}  # four ranks with one set of experts


class RowExperts(Experts):
    """Experts with a parameter that does not have one row for each expert."""

    def __init__(self, num_experts):
        super().__init__(num_experts, D)
        self.weight = nn.Parameter(torch.ones(D, D))


def mesh_of(copies, shares):
    return init_device_mesh("cpu", (copies, shares), mesh_dim_names=("copies", "shares"))


def sharing(process_group, options):
    """Moves the options of `ExpertParallel` out of the layer's options."""
    names = {"balance", "exchange", "num_chunks", "placement", "ranks_per_node"} & options.keys()
    rest = {k: v for k, v in options.items() if k not in names}
    if process_group is None:
        return rest
    parallel = ExpertParallel(process_group, **{name: options[name] for name in names})
    return rest | {"parallel": parallel}


def draw_parameters(layer, std=1.0, but=()):
    """Returns the layer in float64, with random parameters; ranks draw shards of the same tensors.

    but: the beginning of the names of parameters that do not change.
    """
    layer = layer.double()
    draw = torch.Generator().manual_seed(2)
    sharded = expert_parameters(layer)
    for name, param in layer.named_parameters():
        if not name.startswith(but):
            first, last, total = sharded[name].bounds if name in sharded else (0, None, len(param))
            whole = param.new_empty(total, *param.shape[1:])
            param.data.copy_(nn.init.normal_(whole, std=std, generator=draw)[first:last])
    return layer


def tokens_of(counts, *shape):
    """Draws the tokens [T, *shape, D] of all ranks."""
    draw = torch.Generator().manual_seed(3)
    return torch.randn(sum(counts), *shape, D, dtype=torch.float64, generator=draw)


def rank_weight(rank):
    return 1 + rank / 2


def fix_noise(layer, part, total):
    """Replaces the gates' noise by tables with a row for each token, of which a rank reads a part.

    A hierarchical gate draws for its two levels in turn; the second has a row for each group.
    """
    calls = iter(range(100))

    def draw_noise(gate, like):
        call = next(calls)
        second = isinstance(gate, HierarchicalGate) and call % 2 == 1
        rows = gate.k_of_levels[0] if second else 1
        draw = torch.Generator().manual_seed(call)
        noise = torch.randn(total, rows, like.shape[1], dtype=like.dtype, generator=draw)
        return noise[part].flatten(0, 1)

    for module in layer.modules():
        if isinstance(module, Gate):
            module.draw_noise = partial(draw_noise, module)


def average_gradients(layer, group):
    """Averages the gradients of dense parameters over all ranks, those of experts over replicas."""
    sharded = expert_parameters(layer)
    for name, param in layer.named_parameters():
        ranks = sharded[name].layout.replicas if name in sharded else Ranks(group)
        if param.grad is not None and ranks.size > 1:
            dist.all_reduce(param.grad, group=ranks.group)
            param.grad /= ranks.size


def step(group, rank, ranks, make, call, x, noise=True):
    """Returns what a rank computes; group None: what a process with the tokens of all ranks does.

    make: returns the layer for a process group, a mesh or None.
    call: takes the layer, a rank's tokens and their slice of all tokens; returns (y, aux).
    """
    counts = COUNTS[ranks]
    total, first = sum(counts), sum(counts[:rank])
    part = slice(0, total) if group is None else slice(first, first + counts[rank])
    layer = make(mesh_of(2, 2) if ranks == "2 x 2" and group is not None else group)
    if noise:
        fix_noise(layer, part, total)
    x = x[part].clone().requires_grad_()
    y, aux = call(layer, x, part)
    shape = total, *y.shape[1:]
    weight = torch.linspace(-1, 1, math.prod(shape), dtype=y.dtype).view(shape)
    values = (y * weight[part]).split(counts if group is None else [len(y)])
    weights = map(rank_weight, range(len(counts)) if group is None else [rank])
    losses = [w * (own.sum() + aux.loss) for w, own in zip(weights, values, strict=True)]
    (sum(losses) / len(losses)).backward()
    average_gradients(layer, group)
    entries = expert_parameters(layer)
    rows, grads = {}, {}  # by the name in the model of a single process
    for name, param in layer.named_parameters():
        entry = entries.get(name)
        whole = name if entry is None else entry.name
        grads[whole] = param.grad
        rows[whole] = slice(*entry.bounds[:2]) if entry and entry.bounds else slice(None)
    aux = tree_map_only(torch.Tensor, torch.Tensor.detach, aux)
    return {"y": y.detach(), "x": x.grad, "aux": aux, "grads": grads, "rows": rows}


def call(layer, x, part):
    """Calls a layer; the `call` of most layers."""
    return layer(x)


def assert_equals_one_process(workers, ranks, make, call, x, same_bits=False, **shared):
    """Compares outputs, losses, statistics and every gradient of a step.

    shared: options of the layer on ranks only. same_bits: the outputs are bitwise identical.
    """
    number = len(COUNTS[ranks])
    one = step(None, 0, ranks, make, call, x)
    parts = workers.run(number, step, ranks, partial(make, **shared), call, x)
    expected, auxes = one["aux"], [part["aux"] for part in parts]
    assert_outputs = assert_same_bits if same_bits else assert_exact
    assert_outputs(torch.cat([part["y"] for part in parts]), one["y"])
    assert_exact(torch.cat([part["x"] for part in parts]) / number, one["x"])
    assert_exact(torch.cat([aux.gates for aux in auxes]), expected.gates)
    assert torch.equal(torch.cat([aux.expert_index for aux in auxes]), expected.expert_index)
    assert torch.equal(sum(aux.tokens_per_expert for aux in auxes), expected.tokens_per_expert)
    if expected.kept is not None:
        assert torch.equal(torch.cat([aux.kept for aux in auxes]), expected.kept)
    for aux in auxes:
        for name in ("loss", "importance", "load"):
            assert_exact(getattr(aux, name), getattr(expected, name))
        for name in ("losses", "gate_metrics"):
            values, wanted = getattr(aux, name), getattr(expected, name)
            assert values.keys() == wanted.keys()
            for key, value in wanted.items():
                assert_exact(values[key], value)
    assert set().union(*(part["grads"] for part in parts)) == one["grads"].keys()
    for part in parts:
        for name, grad in part["grads"].items():
            wanted = one["grads"][name]
            assert (grad is None) == (wanted is None), name
            if grad is not None:
                assert_exact(grad, wanted[part["rows"][name]])
    return expected


def backward(model, counts, rank=None, step=0):
    """Runs the backward pass of a rank's tokens; rank None: of one process with all tokens.

    The model returns outputs and a loss. Each rank gives its outputs another weight.
    """
    draw = torch.Generator().manual_seed(3 + step)
    x = torch.randn(sum(counts), D, dtype=torch.float64, generator=draw)
    y, loss = model(x if rank is None else x.split(counts)[rank])
    parts = y.split(counts) if rank is None else [y]
    ranks = range(len(counts)) if rank is None else [rank]
    losses = [
        rank_weight(r) * (part.square().sum() + loss) for r, part in zip(ranks, parts, strict=True)
    ]
    (sum(losses) / len(losses)).backward()


def train(wrapped, optimizer, counts, rank=None, steps=3, norm_type=2.0):
    """Trains on the tokens of a rank, or in one process on all; returns the gradients' norms."""
    norms = []
    for step in range(steps):
        backward(wrapped, counts, rank, step)
        if rank is None:
            norm = nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0, norm_type)
        else:
            norm = clip_grad_norm_(wrapped, 1.0, norm_type)
        norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def files_in(folder):
    """Returns the names in the folder of all checkpoints, without the lock."""
    return sorted({path.name for path in folder.iterdir()} - {".lock"})


def save(group, rank, make, folder):
    Checkpoints(folder, group).save(1, make(group))


def load(group, rank, make, folder):
    model = make(group)
    for param in model.parameters():
        param.detach().zero_()
    Checkpoints(folder, group).load(model)
    return full_state_dict(model, group)


def assert_checkpoints_load(workers, worlds, make, folder):
    """Compares a checkpoint of worlds[0] ranks, loaded by worlds[1] ranks, with one process."""
    workers.run(worlds[0], save, make, folder)
    state, expected = workers.run(worlds[1], load, make, folder)[0], make().state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(state[name], value)


def assert_step_of_fully_sharded(layer, twin, x, group):
    """Compares the output, the gradients and the count of parameters with a layer that is whole."""
    (y, aux), (expected, expected_aux) = layer(x), twin(x)
    assert_same_bits(y, expected)
    (y.square().sum() + aux.loss).backward()
    (expected.square().sum() + expected_aux.loss).backward()
    for (name, param), twin_param in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert (param.grad is None) == (twin_param.grad is None), name
        if twin_param.grad is not None:
            dist.all_reduce(twin_param.grad, group=group)
            assert_exact(param.grad.full_tensor(), twin_param.grad / 2)
    assert count_parameters(layer) == count_parameters(twin)
