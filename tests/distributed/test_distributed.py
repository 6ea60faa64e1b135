"""Experts sharded over ranks: the sharding does not change the result (Sec. 3)."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from assertions import assert_exact, assert_same_bits
from moe_lab.analysis import moe_ops
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    Experts,
    Gate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    MoE,
    MoELSTM,
    ReLUGate,
    SharedExpert,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
)
from moe_ext.distributed import (
    Checkpoints,
    ExpertParallel,
    ExpertPlacement,
    GradScaler,
    clip_grad_norm_,
    expert_parameters,
    full_state_dict,
    parallelize,
)
from moe_ext.distributed.ranks import Ranks
from moe_ext.gates import HierarchicalGate
from moe_ext.recurrent import exchanged_bytes, num_evaluations

D = 6


def sharing(process_group, options):
    """Moves the options of `ExpertParallel` out of the layer's options."""
    names = {"balance", "exchange", "num_chunks", "placement"} & options.keys()
    rest = {k: v for k, v in options.items() if k not in names}
    if process_group is None:
        return rest
    parallel = ExpertParallel(process_group, **{name: options[name] for name in names})
    return rest | {"parallel": parallel}


def gated(gate, **options):
    return MoE(D, gate.num_experts, gate.k, gate=gate, w_load=0.0, **options)


KINDS = {
    "flat": lambda **options: MoE(D, 5, 2, **options),
    "k=1": lambda **options: MoE(D, 5, 1, **options),
    "topk": lambda **options: gated(TopKGate(D, 7, 3), **options),
    "groups and bias": lambda **options: gated(
        TopKGate(
            D,
            8,
            3,
            score="sigmoid",
            renormalize=False,
            scale=2.5,
            num_groups=4,
            groups_per_token=2,
            logit_bias=True,
            bias_update_rate=0.1,
        ),
        **options,
    ),
    "softmax": lambda **options: MoE(D, 4, 4, gate=SoftmaxGate(D, 4), **options),
    "swiglu": lambda **options: MoE(D, 6, 2, activation="swiglu", bias=True, **options),
    "hierarchical": lambda **options: HierarchicalMoE(D, 3, 4, (2, 3), **options),
    "one group each": lambda **options: HierarchicalMoE(D, 4, 2, (1, 2), **options),
    "one expert each": lambda **options: HierarchicalMoE(D, 4, 1, (2, 1), **options),
    "balanced": lambda **options: gated(BalancedGate(D, 5, 2), **options),
    "hierarchical balanced": lambda **options: gated(
        HierarchicalBalancedGate(D, 3, 4, 2), **options
    ),
    "one balanced group each": lambda **options: gated(
        HierarchicalBalancedGate(D, 4, 3, (1, 2), detach_scores=False), **options
    ),
    "a single balanced group": lambda **options: gated(
        HierarchicalBalancedGate(D, 1, 4, (1, 2)), **options
    ),
    "losses": lambda **options: MoE(
        D, 5, 2, w_load=0.1, losses=[SwitchLoss(0.3), ZLoss(0.2)], **options
    ),
    "balanced losses": lambda **options: gated(
        BalancedGate(D, 5, 2), losses=[SwitchLoss(0.3), ZLoss(0.2)], **options
    ),
    "shared": lambda **options: MoE(
        D, 5, 2, shared_expert=SharedExpert(D, [4], gated=True), **options
    ),
    "expert choice": lambda **options: gated(ExpertChoiceGate(D, 5, 2), **options),
    "relu": lambda **options: gated(ReLUGate(D, 5, 2, l1_weight=0.3), **options),
    "few": lambda **options: MoE(D, 2, 2, **options),  # fewer experts than ranks
    "zero computation": lambda **options: MoE(
        D,
        4,
        3,
        num_identity_experts=2,
        num_null_experts=1,
        **options,
    ),
    "balanced zero computation": lambda **options: MoE(
        D, 4, 2, gate=BalancedGate(D, 6, 2), num_identity_experts=2, w_load=0.0, **options
    ),
    "capacity by position": lambda **options: MoE(
        D, 5, 2, capacity_factor=0.7, losses=[SwitchLoss(0.3)], **options
    ),
    "capacity by score": lambda **options: gated(
        TopKGate(D, 7, 3, renormalize=False), capacity_factor=0.7, drop="score", **options
    ),
    "capacity with ties": lambda **options: MoE(  # all gates are 1
        D, 2, 1, capacity_factor=0.7, drop="score", **options
    ),
    "capacity of some": lambda **options: MoE(
        D,
        4,
        2,
        num_identity_experts=1,
        num_null_experts=1,
        capacity_factor=0.5,
        drop="score",
        **options,
    ),
    "balanced capacity": lambda **options: gated(
        BalancedGate(D, 5, 2), capacity_factor=0.5, **options
    ),
}


def layer_of(kind, process_group=None, **options):
    """Makes a float64 layer with a random gate; it is the same on every rank."""
    torch.manual_seed(1)
    options = sharing(process_group, {"hidden_sizes": (7,)} | options)
    layer = KINDS[kind](**options)
    layer = layer.double()
    generator = torch.Generator().manual_seed(2)
    for name, param in layer.named_parameters():
        if name.endswith("_secondary"):
            whole = param.new_empty(layer.gate.num_groups, *param.shape[1:])
            torch.nn.init.normal_(whole, generator=generator)
            first = getattr(layer.gate, "groups", range(len(whole))).start
            param.data.copy_(whole[first : first + len(param)])
        elif not name.startswith("experts."):
            torch.nn.init.normal_(param, generator=generator)
    return layer


def fix_noise(layer, counts, rank=None, levels=2):
    """Replaces the gates' noise by a table with one row per token.

    A rank reads the rows of its own tokens.
    """
    first = sum(counts[:rank]) if rank is not None else 0
    number = counts[rank] if rank is not None else sum(counts)
    calls = iter(range(100))

    def draw_noise(like):
        call = next(calls)
        k_of_levels = getattr(getattr(layer, "gate", None), "k_of_levels", (2,))
        per_token = k_of_levels[0] if call % levels == 1 else 1  # second level: one row per group
        table = torch.Generator().manual_seed(call)
        noise = torch.randn(
            sum(counts) * per_token, like.shape[1], dtype=like.dtype, generator=table
        )
        return noise[first * per_token :][: number * per_token]

    for module in layer.modules():
        if isinstance(module, Gate):
            module.draw_noise = draw_noise


def tokens_of(counts):
    x = torch.randn(sum(counts), D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)
    return x, weight


def rank_weight(rank):
    return 1 + rank / 2


def step_of_process(group, rank, kind, counts, options, masked=False, mesh=False):
    """Returns y, aux and the gradients of one rank."""
    ranks = group
    if mesh:
        ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))
    layer = layer_of(kind, ranks, **options)
    fix_noise(layer, counts, rank)
    x, weight = (t.split(counts)[rank] for t in tokens_of(counts))
    x = x.clone().requires_grad_()
    if masked:  # a masked token after each token
        mask = torch.tensor([True, False]).expand(len(x), 2)
        y, aux = layer(torch.stack([x, torch.full_like(x, math.nan)], 1), mask)
        assert y[:, 1].count_nonzero() == 0
        y = y[:, 0]
    else:
        y, aux = layer(x)
    loss = rank_weight(rank) * ((y * weight).sum() + aux.loss)
    loss.backward()
    size = dist.get_world_size(group)
    grads = {}
    sharded = expert_parameters(layer)
    for name, param in layer.named_parameters():
        assert param.grad is not None, name
        if name not in sharded:
            dist.all_reduce(param.grad, group=group)
            param.grad /= size
        elif mesh:
            replicas = sharded[name].layout.replicas
            dist.all_reduce(param.grad, group=replicas.group)
            param.grad /= replicas.size
        grads[name] = param.grad
    return {
        "y": y.detach(),
        "x": x.grad,
        "grads": grads,
        "loss": aux.loss.detach(),
        "importance": aux.importance.detach(),
        "load": aux.load.detach(),
        "expert_index": aux.expert_index,
        "tokens_per_expert": aux.tokens_per_expert,
        "gates": aux.gates.detach(),
        "kept": aux.kept,
        "share_dropped": aux.gate_metrics.get("share_dropped"),
        "bounds": {name: entry.bounds for name, entry in sharded.items()},
    }


def step_of_all(kind, counts, options):
    layer = layer_of(kind, **options)
    fix_noise(layer, counts)
    x, weight = tokens_of(counts)
    x.requires_grad_()
    y, aux = layer(x)
    parts = (y * weight).split(counts)
    losses = [rank_weight(rank) * (part.sum() + aux.loss) for rank, part in enumerate(parts)]
    (sum(losses) / len(counts)).backward()
    return layer, x, y, aux


COUNTS = [[9], [5, 8], [4, 0, 6], [3, 7, 0, 5]]
HOW = {
    "rows": {"exchange": "rows", "placement": "experts"},
    "tokens": {"exchange": "tokens", "placement": "experts"},
    "groups": {"placement": "groups"},
}


@pytest.mark.guarantee("Sharding does not change the result")
@pytest.mark.equation("Sec. 3.1", "arXiv 2401.06066", "arXiv 2202.09368", "arXiv 2412.14711")
@pytest.mark.equation("arXiv 2101.03961", "arXiv 2410.07348", "arXiv 2509.01322")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "counts, num_chunks",
    [
        (COUNTS[0], 1),
        (COUNTS[2], 2),
        (COUNTS[3], 1),
        *(pytest.param(counts, 1, marks=pytest.mark.long) for counts in COUNTS[1:3]),
        *(pytest.param(counts, 2, marks=pytest.mark.long) for counts in (*COUNTS[:2], COUNTS[3])),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(workers, kind, counts, num_chunks, how):
    layer, x, y, aux = step_of_all(kind, counts, {})
    if how == "groups" and not isinstance(layer.gate, HierarchicalGate):
        pytest.skip("the gate has no secondary gates that ranks can share")
    options = HOW[how] | {"num_chunks": num_chunks}
    parts = workers.run(len(counts), step_of_process, kind, counts, options)
    if how == "rows":
        assert_same_bits(torch.cat([part["y"] for part in parts]), y)
    assert_equal_steps(parts, counts, layer, x, y, aux)


@pytest.mark.guarantee("Sharding does not change the result")
@pytest.mark.equation("Sec. 3.1")
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["", "recompute"])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "counts, mesh", [([5, 8], False), ([4, 0, 6], False), ([3, 7, 0, 5], True)]
)
@pytest.mark.parametrize(
    "kind", ["hierarchical", "hierarchical balanced", "a single balanced group"]
)
def test_groups_equal_one_process(workers, kind, counts, mesh, masked, num_chunks, options):
    layer, x, y, aux = step_of_all(kind, counts, options)
    options = options | {"num_chunks": num_chunks, "placement": "groups"}
    arguments = kind, counts, options, masked, mesh
    parts = workers.run(len(counts), step_of_process, *arguments)
    assert_equal_steps(parts, counts, layer, x, y, aux)


@pytest.mark.equation("arXiv 2101.03961", "arXiv 2410.07348")
@pytest.mark.parametrize("counts, mesh", [([4, 0, 6], False), ([3, 7, 0, 5], True)])
@pytest.mark.parametrize(
    "kind",
    ["balanced zero computation", "capacity by position", "capacity by score"]
    + ["capacity of some"],
)
def test_slots_without_a_row_equal_one_process(workers, kind, counts, mesh):
    """With masks, recomputation, chunks of tokens, and replicas of the experts."""
    layer, x, y, aux = step_of_all(kind, counts, {})
    options = {"exchange": "tokens", "num_chunks": 2, "recompute": True}
    parts = workers.run(len(counts), step_of_process, kind, counts, options, True, mesh)
    assert_equal_steps(parts, counts, layer, x, y, aux)


def local_capacity(group, rank, counts, drop):
    """Returns the kept slots of one rank's tokens, and the same without other ranks."""
    x = tokens_of(counts)[0].split(counts)[rank]
    kept = []
    for ranks, options in ((group, {"balance": "local"}), (None, {})):
        gate = TopKGate(D, 7, 3, renormalize=False)
        options = sharing(ranks, options | {"capacity_factor": 0.7, "drop": drop})
        layer = MoE(D, 7, 3, gate=gate, **options).double()
        torch.nn.init.normal_(gate.w_gate, generator=torch.Generator().manual_seed(2))
        aux = layer(x)[1]
        kept.append((aux.kept, aux.gate_metrics["share_dropped"]))
    return kept


class DroppingGate(HierarchicalNoisyTopKGate):
    def routing(self, *args):
        routing = super().routing(*args)
        return routing._replace(kept=torch.zeros_like(routing.gates, dtype=torch.bool))


def errors_of_groups(group, rank):
    """Returns the errors of layers whose groups are on other ranks than their tokens."""
    x, errors = torch.randn(4, D), []
    for gate in (HierarchicalNoisyTopKGate, DroppingGate):
        layer = gated(gate(D, 2, 3, 1), process_group=group)
        layer.capacity_factor = 1.5 if gate is HierarchicalNoisyTopKGate else None
        with pytest.raises(ValueError) as error:
            layer(x)
        errors.append(str(error.value))
    return errors


def test_groups_of_other_ranks_drop_nothing(workers):
    """A change of the attribute and a gate that drops are refused on all ranks."""
    for capacity, kept in workers.run(2, errors_of_groups):
        assert capacity == "MoE: capacity_factor must be None with a hierarchical gate, got 1.5"
        assert kept.startswith("MoE: gate must return Routing.kept = None with placement")


@pytest.mark.parametrize("drop", ["position", "score"])
def test_local_capacity_is_of_each_rank(workers, drop):
    for (kept, share), (expected, expected_share) in workers.run(2, local_capacity, [5, 8], drop):
        assert torch.equal(kept, expected) and not kept.all()
        assert share == expected_share


def balanced_steps(group, rank, counts, num_chunks, mesh, ties):
    """Returns the results of several passes of a balanced layer, and its thresholds.

    The secondary gate of the last group gives NaN in the first pass, so that no group may start.
    """
    ranks = group
    if mesh:
        ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))
    options = {} if group is None else {"num_chunks": num_chunks, "placement": "groups"}
    layer = layer_of("hierarchical balanced", ranks, **options)
    gate, x = layer.gate, tokens_of(counts)[0]
    if group is not None:
        x = x.split(counts)[rank]
    here = slice(gate.groups.start, gate.groups.stop)
    whole = torch.zeros(gate.num_groups, D, gate.experts_per_group, dtype=torch.float64)
    if not ties:
        torch.nn.init.normal_(whole, generator=torch.Generator().manual_seed(7))
    else:
        torch.nn.init.zeros_(gate.w_gate)
    broken = whole.clone()
    broken[-1] = math.nan
    torch.nn.init.zeros_(gate.threshold_secondary)
    moved = torch.randn(whole.shape[::2], generator=torch.Generator().manual_seed(8)) * 0.05

    found = []
    for name in ("broken", "start", "moved", "batchwise", "thresholds", "no tokens"):
        gate.w_gate_secondary.data.copy_((broken if name == "broken" else whole)[here])
        if name == "moved":
            gate.threshold_secondary.data.add_(moved[here])
        layer.train(name not in ("batchwise", "thresholds"))
        gate.batchwise = name == "batchwise"
        y, aux = layer(x if name != "no tokens" else x[:0])
        of_tokens = y.detach(), aux.gates.detach(), aux.expert_index, aux.token_offsets.diff()
        metrics = [
            aux.gate_metrics.get(key) for key in ("share_without_expert", "mask_disagreement")
        ]
        of_all = [aux.loss, aux.importance, aux.load, *metrics]
        of_all = [value.detach().double() for value in of_all if value is not None]
        state = gate.threshold_secondary.detach().clone(), bool(gate.initialized_secondary)
        found.append((of_tokens, of_all, *state))
    return found, here


@pytest.mark.equation("App. B", "App. F")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "counts, num_chunks, mesh",
    [([5, 8], 1, False), ([4, 0, 6], 2, False), ([0, 0, 5, 6], 1, False), ([3, 7, 0, 5], 2, True)],
)
def test_balanced_groups_equal_one_process(workers, counts, num_chunks, mesh, ties):
    """Masks and thresholds of the secondary gates cover the tokens of all ranks."""
    expected, _ = balanced_steps(None, 0, counts, 1, False, ties)
    assert [started for *_, started in expected] == [False] + 5 * [True]
    parts = workers.run(len(counts), balanced_steps, counts, num_chunks, mesh, ties)
    for step, (of_tokens, of_all, threshold, started) in enumerate(expected):
        found = [passes[step] for passes, _ in parts]
        y, gates, *decisions = map(torch.cat, zip(*(part[0] for part in found), strict=True))
        assert_exact(y, of_tokens[0], nan=True)
        assert_exact(gates, of_tokens[1], nan=True)
        for decision, wanted in zip(decisions, of_tokens[2:], strict=True):
            assert torch.equal(decision, wanted)
        for (_, values, threshold_here, started_here), (_, here) in zip(found, parts, strict=True):
            for value, wanted in zip(values, of_all, strict=True):
                assert_exact(value, wanted, nan=True)
            assert_exact(threshold_here, threshold[here])
            assert started_here == started
    assert ties or expected[4][0][3].unique().numel() > 2  # thresholds select differently many


def assert_equal_steps(parts, counts, layer, x, y, aux):
    """Compares the steps of all ranks with the step of a single process."""
    assert_exact(torch.cat([part["y"] for part in parts]), y)
    assert torch.equal(torch.cat([part["expert_index"] for part in parts]), aux.expert_index)
    assert_exact(torch.cat([part["gates"] for part in parts]), aux.gates)
    assert torch.equal(sum(part["tokens_per_expert"] for part in parts), aux.tokens_per_expert)
    if aux.kept is not None:
        assert torch.equal(torch.cat([part["kept"] for part in parts]), aux.kept)
        assert not aux.kept.all()
        for part in parts:
            assert part["share_dropped"] == aux.gate_metrics["share_dropped"]
    assert_exact(torch.cat([part["x"] for part in parts]) / len(counts), x.grad)
    for part in parts:
        assert_exact(part["loss"], aux.loss)
        assert_exact(part["importance"], aux.importance)
        assert_exact(part["load"], aux.load)
        assert part["grads"].keys() == dict(layer.named_parameters()).keys()
        for name, param in layer.named_parameters():
            first, last, _ = part["bounds"].get(name, (0, None, None))
            assert_exact(part["grads"][name], param.grad[first:last])


def losses_of_process(group, rank, counts, masked, options):
    """Returns aux.losses and the gradients of aux.loss; a rank has counts[rank] sequences."""
    losses = [SwitchLoss(0.3), SwitchLoss(0.2, per_sequence=True), ZLoss(0.1)]
    layer = layer_of("topk", group, losses=losses, **options)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), 7, D, dtype=torch.float64, generator=generator)
    mask = torch.rand(x.shape[:2], generator=generator) < 0.7
    mask[0] = False  # a sequence without real tokens
    if rank is not None:
        x, mask = (whole.split(counts)[rank] for whole in (x, mask))
    x.requires_grad_()
    y, aux = layer(x, mask if masked else None)
    (y.sum() * 0 + aux.loss).backward()  # all ranks run the backward pass of the exchange
    w_gate = layer.gate.w_gate.grad
    if group is not None:
        dist.all_reduce(w_gate, group=group)
        w_gate /= len(counts)
    x_grad = x.grad if group is None else x.grad / len(counts)
    return dict(aux.losses), aux.loss.detach(), w_gate, x_grad


@pytest.mark.equation("arXiv 2101.03961", "arXiv 2202.08906", "arXiv 2412.19437")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counts", [[4], [3, 2], [3, 0, 4]], ids=len)
def test_losses_equal_one_process(workers, counts, masked, recompute):
    """The losses of the batch and of each sequence, with their gradients."""
    options = {"recompute": recompute}
    values, loss, w_gate, x = losses_of_process(None, None, counts, masked, options)
    parts = workers.run(len(counts), losses_of_process, counts, masked, options)
    for part in parts:
        assert part[0].keys() == values.keys()
        for name, value in values.items():
            assert_exact(part[0][name], value)
        assert_exact(part[1], loss)
        assert_exact(part[2], w_gate)
    assert_exact(torch.cat([part[3] for part in parts]), x)


def replay_of_process(group, rank, kind, counts, masked, options):
    """Returns y, aux.loss and the gradients with given experts, in random order."""
    layer = layer_of(kind, group, losses=[SwitchLoss(0.3), ZLoss(0.1)], **options)
    fix_noise(layer, counts, rank)
    x, weight = tokens_of(counts)
    number = layer.gate.num_experts
    scores = torch.rand(len(x), number, generator=torch.Generator().manual_seed(6))
    index = scores.argsort(1)[:, : layer.k]
    if rank is not None:
        x, weight, index = (whole.split(counts)[rank] for whole in (x, weight, index))
    x = x.clone().requires_grad_()
    if masked:  # a masked token after each token
        mask = torch.tensor([True, False]).expand(len(x), 2)
        padded = torch.stack([index, torch.zeros_like(index)], 1)
        y, aux = layer(torch.stack([x, x], 1), mask, expert_index=padded)
        y = y[:, 0]
    else:
        y, aux = layer(x, expert_index=index)
    parts = 1 if group is None else len(counts)
    ((y * weight).sum() * parts + aux.loss).backward()
    sharded = expert_parameters(layer)
    for name, param in layer.named_parameters():
        if group is not None and name not in sharded:
            dist.all_reduce(param.grad, group=group)
            param.grad /= parts
    bounds = {name: entry.bounds for name, entry in sharded.items()}
    assert torch.equal(aux.expert_index.sort(1).values, index.sort(1).values)
    return y.detach(), aux.loss.detach(), grads_of(layer), bounds


@pytest.mark.parametrize("how", ["rows", "tokens"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counts", COUNTS[:3], ids=len)
@pytest.mark.parametrize("kind", ["flat", "topk", "zero computation", "capacity by score"])
def test_replay_equals_one_process(workers, kind, counts, masked, recompute, how):
    options = {"recompute": recompute}
    y, loss, grads, _ = replay_of_process(None, None, kind, counts, masked, options)
    options |= HOW[how]
    results = workers.run(len(counts), replay_of_process, kind, counts, masked, options)
    assert_exact(torch.cat([result[0] for result in results]), y)
    for _, found, actual, bounds in results:
        assert_exact(found, loss)
        assert actual.keys() == grads.keys()
        for name, expected in grads.items():
            first, last, _ = bounds.get(name, (0, None, None))
            assert_exact(actual[name], expected[first:last])


def local_losses(group, rank):
    """Returns the losses of ranks whose tokens all go to one expert, with balance="local"."""
    losses = [SwitchLoss(1.0), SwitchLoss(1.0, per_sequence=True)]
    parallel = ExpertParallel(group, balance="local" if rank is not None else "global")
    layer = MoE(1, 2, 1, gate=TopKGate(1, 2, 1), losses=losses, parallel=parallel)
    layer.gate.w_gate.data[0] = torch.tensor([9.0, -9.0])
    sign = torch.tensor([1.0, -1.0])[:, None, None] if rank is None else 1.0 - 2 * rank
    _, aux = layer(sign * torch.ones(2 if rank is None else 1, 3, 1))
    return [round(value.item(), 5) for value in aux.losses.values()]


def test_local_losses_are_of_each_rank(workers):
    """Two ranks in opposite imbalance are balanced together; each sequence is not."""
    assert local_losses(None, None) == [1, 2]
    assert workers.run(2, local_losses) == [[2, 2]] * 2


S = 4


def recurrent_layer(levels, process_group=None, **options):
    """Makes a recurrent layer; it is the same on every rank."""
    torch.manual_seed(1)
    if process_group is not None:
        names = {"balance", "exchange", "num_chunks"} & options.keys()
        given = {name: options.pop(name) for name in names}
        options["parallel"] = ExpertParallel(process_group, **given)
    if levels == 2:
        options["gate"] = HierarchicalNoisyTopKGate(D + 3, 3, 2, (2, 1))
    layer = MoELSTM(D, 3, 6, 2, **options).double()
    generator = torch.Generator().manual_seed(2)
    for name, param in layer.named_parameters():
        whole, rows = param, slice(None)
        if ".experts." in name:
            whole = param.new_empty(6, *param.shape[1:])
            sharding = layer.cell.moe.sharding
            if sharding is not None:
                rows = slice(sharding.local_experts.start, sharding.local_experts.stop)
        values = torch.nn.init.normal_(torch.empty_like(whole), generator=generator)
        param.data.copy_(values[rows])
    return layer


def sequences_of(counts, training):
    """Returns x [B, S, D] and the lengths. In training, all lengths are S: the noise is a table."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(counts), S, D, dtype=torch.float64, generator=generator)
    lengths = torch.randint(1, S + 1, (sum(counts),), generator=generator)
    return x, torch.full_like(lengths, S) if training else lengths


def recurrent_step(layer, x, lengths):
    """Returns the weighted sum of each sequence's outputs, and the report."""
    num_steps = max(lengths.tolist(), default=1)
    mask = torch.arange(num_steps) < lengths[:, None]
    weight = torch.linspace(-1, 1, S * 3, dtype=torch.float64).view(S, 3)
    y, (h, c), aux = layer(x[:, :num_steps], mask=None if layer.training else mask)
    last = (h + 0.5 * c).sum(1)
    return (y * weight[:num_steps]).sum((1, 2)) + last, aux


def recurrent_step_of_process(group, rank, levels, counts, training, options, mesh=False):
    ranks = group
    if mesh:
        ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))
    layer = recurrent_layer(levels, ranks, **options).train(training)
    if "memory_slots" not in options:
        fix_noise(layer, counts, rank, levels)
    x, lengths = (whole.split(counts)[rank] for whole in sequences_of(counts, training))
    x = x.clone().requires_grad_()
    torch.manual_seed(rank)
    values, aux = recurrent_step(layer, x, lengths)
    (rank_weight(rank) * (values.sum() + aux.loss)).backward()
    sharded = expert_parameters(layer)
    for name, param in layer.named_parameters():
        if param.grad is None:
            continue
        together = sharded[name].layout.replicas if name in sharded else Ranks(group)
        if together.size > 1:
            dist.all_reduce(param.grad, group=together.group)
            param.grad /= together.size
    bounds = {name: entry.bounds for name, entry in sharded.items()}
    return {
        "values": values.detach(),
        "x": x.grad,
        "loss": aux.loss.detach(),
        "load": aux.load.detach(),
        "gates": aux.gates.detach(),
        "tokens_per_expert": aux.tokens_per_expert,
        "grads": grads_of(layer),
        "bounds": bounds,
    }


def grads_of(layer):
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


RECURRENT = {
    "by bytes": {},
    "rows": {"gather_experts": False},
    "tokens": {"gather_experts": False, "exchange": "tokens", "num_chunks": 2},
    "gathered": {"gather_experts": True},
}


@pytest.mark.equation("Sec. 3.1")
@pytest.mark.parametrize("how", RECURRENT)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "counts, mesh", [([5, 8], False), ([4, 0, 6], False), ([3, 7, 0, 5], True)]
)
@pytest.mark.parametrize("levels", [1, 2])
def test_recurrent_mixture_equals_one_process(workers, levels, counts, mesh, training, how):
    """Importance and load cover all ranks, which may run different numbers of steps."""
    layer = recurrent_layer(levels).train(training)
    fix_noise(layer, counts, levels=levels)
    x, lengths = sequences_of(counts, training)
    x.requires_grad_()
    values, aux = recurrent_step(layer, x, lengths)
    parts = enumerate(values.split(counts))
    losses = [rank_weight(rank) * (part.sum() + aux.loss) for rank, part in parts]
    (sum(losses) / len(counts)).backward()
    arguments = levels, counts, training, RECURRENT[how], mesh
    results = workers.run(len(counts), recurrent_step_of_process, *arguments)
    assert_exact(torch.cat([result["values"] for result in results]), values)
    assert_exact(torch.cat([result["gates"] for result in results]), aux.gates)
    assert_exact(torch.cat([result["x"] for result in results]) / len(counts), x.grad)
    assert torch.equal(
        sum(result["tokens_per_expert"] for result in results), aux.tokens_per_expert
    )
    for result in results:
        assert_exact(result["loss"], aux.loss)
        assert_exact(result["load"], aux.load)
        assert result["grads"].keys() == grads_of(layer).keys()
        for name, expected in grads_of(layer).items():
            first, last, _ = result["bounds"].get(name, (0, None, None))
            assert_exact(result["grads"][name], expected[first:last])


@pytest.mark.parametrize("gather", [False, True])
def test_recurrent_mixture_with_memory_slots(workers, gather):
    """Recomputation runs the exchange again and draws the same noise."""
    steps = [
        workers.run(
            3,
            recurrent_step_of_process,
            2,
            [4, 0, 6],
            True,
            {"gather_experts": gather, "memory_slots": slots},
        )
        for slots in (None, 2)
    ]
    for plain, stored in zip(*steps, strict=True):
        assert_same_bits(plain["values"], stored["values"])
        for name, grad in plain["grads"].items():
            assert_same_bits(stored["grads"][name], grad)


def recurrent_step_with_frozen_experts(group, rank, gather):
    layer = MoELSTM(D, 4, 2, 2, process_group=group, gather_experts=gather)
    for entry in expert_parameters(layer).values():
        entry.param.requires_grad_(rank == 0)
    y, _, aux = layer(torch.randn(5, 7, D, requires_grad=True))
    (y.sum() + aux.loss).backward()
    return [entry.param.grad is not None for entry in expert_parameters(layer).values()]


@pytest.mark.parametrize("gather", [False, True])
def test_recurrent_experts_that_are_frozen_on_one_rank(workers, gather):
    trained, frozen = workers.run(2, recurrent_step_with_frozen_experts, gather)
    assert all(trained) and not any(frozen)


def bytes_of_recurrent_step(group, rank, slots, gather):
    """Returns the bytes of rows or weights that this rank sends, and those that are predicted."""
    layer = MoELSTM(
        D,
        4,
        2,
        2,
        gate=SoftmaxGate(D + 4, 2),  # each row goes to both ranks
        process_group=group,
        memory_slots=slots,
        gather_experts=gather,
    )
    sent = []
    all_to_all_single = dist.all_to_all_single

    def note(output, rows, received, counts, **options):
        if rows.is_floating_point():
            sent.append((sum(counts) - counts[rank]) * rows[:1].nbytes)
        return all_to_all_single(output, rows, received, counts, **options)

    x = torch.randn(5, 7 - rank, D, requires_grad=True)
    with patch.object(dist, "all_to_all_single", note):
        y, _, aux = layer(x)
        (y.sum() + aux.loss).backward()
    return sum(sent), exchanged_bytes(layer, 7, 5 * 7 + 5 * 6)


@pytest.mark.parametrize("gather", [False, True])
def test_recurrent_bytes(workers, gather):
    results = workers.run(2, bytes_of_recurrent_step, None, gather)
    assert sum(sent for sent, _ in results) == results[0][1][gather]


def test_recurrent_bytes_need_ranks():
    with pytest.raises(ValueError, match="exchanged_bytes: layer must share its experts"):
        exchanged_bytes(MoELSTM(D, D, 4, 2), 7, 7)


def test_recurrent_bytes_with_memory_slots(workers):
    (first, predicted), (second, _) = workers.run(2, bytes_of_recurrent_step, 2, False)
    # The prediction takes all time steps as equally long. Rank 1 has no rows in the last one, and
    # recomputation visits the last one least often.
    assert first + second == pytest.approx(predicted[0], rel=0.05)
    assert predicted[0] == bytes_of_steps(7, 2)


def bytes_of_steps(num_steps, slots):
    rows, copies_to_others, width, itemsize = 65 / num_steps, 1, D + 4 + 16, 4
    passes = num_evaluations(num_steps, slots) + 1 + num_steps
    return passes * rows * copies_to_others * width * itemsize


def test_recurrent_mixture_cannot_share_gates(workers):
    assert (
        workers.run(2, refused_placement)
        == ["MoELSTM: parallel.placement must be \"experts\" or None, got 'groups'"] * 2
    )


def refused_placement(group, rank):
    with pytest.raises(ValueError) as error:
        MoELSTM(D, 3, 6, 2, parallel=ExpertParallel(group, placement="groups"))
    return str(error.value)


def opposite_sequences(group, rank):
    """All steps of one rank go to one expert, all steps of the other rank to the other expert."""
    layer = MoELSTM(1, 1, 2, 1, w_importance=0.3, w_load=0.2, process_group=group).eval()
    with torch.no_grad():
        layer.cell.moe.gate.w_gate[0] = torch.tensor([9.0, -9.0])
    _, _, aux = layer(torch.full((1, S, 1), 1.0 - 2 * rank))
    return aux.importance.tolist(), aux.loss.item()


def test_recurrent_mixture_is_balanced_together(workers):
    alone = [opposite_sequences(None, rank) for rank in (0, 1)]
    assert [importance for importance, _ in alone] == [[4, 0], [0, 4]]
    assert [loss for _, loss in alone] == pytest.approx([0.5, 0.5])  # CV² of each rank is 1
    assert workers.run(2, opposite_sequences) == [([4, 4], 0)] * 2


def outputs_of_process(group, rank, kind, counts, dtype, options):
    """Returns y of one rank in evaluation mode.

    With kind "all to the first process", all logits tie.
    """
    torch.manual_seed(1)
    layer = MoE(D, 8, 2, hidden_sizes=(5,), **sharing(group, options)).to(dtype).eval()
    if kind == "spread":
        torch.nn.init.normal_(layer.gate.w_gate, generator=torch.Generator().manual_seed(2))
    x = tokens_of(counts)[0].to(dtype)
    x = x if rank is None else x.split(counts)[rank]
    mask = torch.arange(len(x)) % 3 != 1
    y, aux = layer(x, mask)
    return y.detach(), aux.tokens_per_expert


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["spread", "all to the first process"])
@pytest.mark.parametrize("exchange", ["rows", "tokens"])
def test_outputs_in_every_type(workers, kind, dtype, exchange):
    counts = [6, 0, 9, 3]  # multiples of 3: the mask of a rank is then part of the global mask
    y, tokens_per_expert = outputs_of_process(None, None, kind, counts, dtype, {})
    parts = workers.run(
        4, outputs_of_process, kind, counts, dtype, {"exchange": exchange, "num_chunks": 2}
    )
    together = torch.cat([part[0] for part in parts])
    if exchange == "rows":
        assert_same_bits(together, y)
    else:  # each part of a sum is rounded to the dtype that is sent
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(together, y, rtol=2 * eps, atol=2 * eps * float(y.abs().max()))
    assert torch.equal(sum(part[1] for part in parts), tokens_per_expert)
    if kind != "spread":
        assert tokens_per_expert.count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_memory_of_received_rows(dtype):
    """A freed buffer of 8 MiB is used again; small buffers come from torch's allocator."""
    x = torch.empty(3, 2, 1024, dtype=dtype)
    number = 2**23 // (2048 * dtype.itemsize)
    rows = torch.ops.moe_ext._empty_rows(x, number)
    assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((number, 2, 1024), dtype, True)
    address = rows.data_ptr()
    del rows
    assert torch.ops.moe_ext._empty_rows(x, number).data_ptr() == address
    assert torch.ops.moe_ext._empty_rows(x, 0).shape == (0, 2, 1024)
    assert torch.ops.moe_ext._empty_rows(x.to("meta"), 5).shape == (5, 2, 1024)


class ThreeLayers(nn.Module):
    """A dense layer and three MoE layers, which may be sharded in different ways."""

    def __init__(self, first=None, second=None, recompute=False):
        super().__init__()
        torch.manual_seed(4)
        self.dense = nn.Linear(D, D)
        self.first = MoE(
            D, 5, 2, gate=TopKGate(D, 5, 2), w_load=0.0, process_group=first, recompute=recompute
        )
        self.second = MoE(
            D,
            6,
            1,
            gate=BalancedGate(D, 6, 1),
            w_load=0.0,
            process_group=second,
            hidden_sizes=(5, 4),
            activation="reglu",
            recompute=recompute,
        )
        nn.init.normal_(self.second.gate.w_gate, std=0.3)
        gate = HierarchicalBalancedGate(D, 3, 2, (2, 1))
        nn.init.normal_(gate.w_gate, std=0.3)
        nn.init.normal_(gate.w_gate_secondary, std=0.3)
        self.third = gated(gate, process_group=second, recompute=recompute)
        self.double()

    def forward(self, x):
        h, first = self.first(self.dense(x))
        y, second = self.second(x + torch.tanh(h))
        z, third = self.third(y)
        return y + z, first.loss + second.loss + third.loss


def batches_of(counts, steps):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(sum(counts), D, dtype=torch.float64, generator=generator) for _ in range(steps)
    ]


def optimizer_of(name, model):
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train_process(group, rank, counts, optimizer, steps, layout, options):
    if layout == "mesh":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shares"))
        model = ThreeLayers(group, mesh, **options)  # the last layers' experts are replicated
        wrapped = parallelize(model, mesh)
    else:
        model = ThreeLayers(group, group, **options)
        wrapped = parallelize(model, group, dense=layout)
    optimizer = optimizer_of(optimizer, model)
    norms = []
    for batch in batches_of(counts, steps):
        y, loss = wrapped(batch.split(counts)[rank])
        (rank_weight(rank) * (y.square().sum() + loss)).backward()
        norms.append(clip_grad_norm_(wrapped, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    params = {name: p.detach() for name, p in model.named_parameters()}
    params = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in params.items()}
    bounds = {name: entry.bounds for name, entry in expert_parameters(model).items()}
    return params, bounds, norms


@pytest.mark.guarantee("Sharding does not change the result")
@pytest.mark.parametrize("optimizer, steps", [("sgd", 1), ("adam", 5)])
@pytest.mark.parametrize(
    "layout, counts",
    [
        ("ddp", [5, 7]),
        ("ddp", [4, 0, 8]),
        ("ddp", [3, 2, 0, 7]),
        ("fsdp", [5, 7]),
        ("mesh", [3, 2, 0, 7]),
    ],
)
@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=["", "recompute"])
def test_training_equals_one_process(workers, layout, counts, optimizer, steps, options):
    model = ThreeLayers()
    of_all = optimizer_of(optimizer, model)
    norms = []
    for batch in batches_of(counts, steps):
        y, loss = model(batch)
        losses = [
            rank_weight(rank) * (part.square().sum() + loss)
            for rank, part in enumerate(y.split(counts))
        ]
        (sum(losses) / len(counts)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        of_all.step()
        of_all.zero_grad()

    parts = workers.run(len(counts), train_process, counts, optimizer, steps, layout, options)
    for params, bounds, norms_here in parts:
        for norm, expected in zip(norms_here, norms, strict=True):
            assert_exact(norm, expected.detach())
        for name, expected in model.state_dict().items():
            if name not in params:
                continue  # buffer
            if name in bounds:
                first, last, _ = bounds[name]
                expected = expected[first:last]
            assert_exact(params[name], expected)


def clip_in_process(group, rank, norm_type):
    """Makes expert gradients with norms sqrt(20) and sqrt(100)."""
    layer = MoE(D, 2, 1, hidden_sizes=(5,), process_group=group).double()
    for param in layer.parameters():
        param.grad = torch.zeros_like(param)
    layer.experts.weights[0].grad[0, 0, :2] = torch.tensor([[2.0, 4.0], [6.0, 8.0]][rank])
    norm = clip_grad_norm_(layer, 1.0, norm_type)
    return norm, layer.experts.weights[0].grad


@pytest.mark.parametrize(
    "norm_type, expected", [(2.0, 10.954451150103322), (1.0, 20), (math.inf, 8)]
)
def test_clipping_by_the_norm_of_all(workers, norm_type, expected):
    for rank, (norm, grad) in enumerate(workers.run(2, clip_in_process, norm_type)):
        assert float(norm) == pytest.approx(expected, rel=1e-15)
        assert float(grad[0, 0, 0] * (norm + 1e-6)) == pytest.approx([2, 6][rank], rel=1e-14)


class NoGradient(nn.Linear):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class UsedWithRows(nn.Linear):
    """Has no gradient without rows."""

    def forward(self, x):
        return super().forward(x) if len(x) else x


def clip_one_rank(group, rank):
    experts = [nn.Identity()] * 2 if rank == 0 else [nn.Linear(D, D) for _ in range(2)]
    layer = MoE(D, 4, 2, experts=experts, process_group=group)
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    return clip_grad_norm_(layer, 1.0)


def test_clipping_if_experts_of_a_rank_have_no_parameters(workers):
    norms = workers.run(2, clip_one_rank)
    of_gate, of_experts = 2 * D * 4, 2 * (D * D + D)
    torch.testing.assert_close(norms, [torch.tensor((of_gate + of_experts) ** 0.5)] * 2)


def experts_without_gradient(group, rank, exchange, num_chunks):
    """The experts of rank 0 have no gradient, not even one for the rows that they receive."""
    experts = [NoGradient(D, D) if rank == 0 else nn.Linear(D, D) for _ in range(2)]
    parallel = ExpertParallel(group, exchange=exchange, num_chunks=num_chunks)
    model = parallelize(MoE(D, 4, 2, experts=experts, parallel=parallel), group)
    x = rank_weight(rank) * torch.randn(6, D)
    y, aux = model(x.requires_grad_())
    (y.square().sum() + aux.loss).backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("exchange", ["rows", "tokens"])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_experts_of_a_rank_without_gradient(workers, exchange, num_chunks):
    workers.run(2, experts_without_gradient, exchange, num_chunks)


def replicas_used_by_one(group, rank):
    """Each replica uses another expert; the gradients are those of a single process."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shares"))
    gate = SoftmaxGate(D, 2)
    gate.k = 1
    gate.forward = lambda x, ranks=None: gate.make_routing(
        x.new_ones(len(x), 1), torch.full((len(x), 1), rank), ranks=ranks
    )
    layer = MoE(
        D, 2, 1, gate=gate, experts=[UsedWithRows(D, D) for _ in range(2)], process_group=mesh
    )
    model = parallelize(layer, mesh, find_unused_parameters=True)
    y, _ = model(torch.ones(3, D))
    y.sum().backward()
    return [expert.bias.grad for expert in layer.experts.experts]


def test_gradients_of_replicas_that_one_rank_has_not_used(workers):
    for grads in workers.run(2, replicas_used_by_one):
        for grad in grads:
            assert_exact(grad, torch.full((D,), 1.5))


def after_a_failed_backward_pass(group, rank):
    """Averages the gradients of replicas also after a backward pass that raised an error."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shares"))
    layer = MoE(D, 4, 2, process_group=mesh)
    model = parallelize(layer, mesh)
    x = rank_weight(rank) * torch.randn(4, D)

    def fail(grad):
        raise RuntimeError("fails on purpose")

    failing = x.clone().requires_grad_()
    failing.register_hook(fail)
    y, aux = layer(failing)
    with pytest.raises(RuntimeError, match="fails on purpose"):
        y.square().sum().backward()
    model.zero_grad()
    y, aux = model(x)
    (y.square().sum() + aux.loss).backward()
    return layer.experts.weight_0.grad


def test_gradients_of_replicas_after_an_error(workers):
    assert_same_bits(*workers.run(2, after_a_failed_backward_pass))


class Blocks(nn.Module):
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
            of_modules = self.layers[1].experts.experts
            for number, expert in enumerate(of_modules):
                of_modules[number] = checkpoint_wrapper(expert)


def checkpointed(group, rank, wrap, folder):
    """Prepares, saves and loads layers in the wrapper of activation checkpointing."""
    model = Blocks(group, wrap)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, group)
    after = model.state_dict()
    of_experts = [name for name in before if "experts" in name]
    assert len(of_experts) == 2 + 4
    for name in of_experts:
        assert_same_bits(after[name], before[name])
    assert len(expert_parameters(model)) == len(of_experts)
    full = full_state_dict(model, group)
    Checkpoints(folder, group).save(1, model)
    loaded = Blocks(group, wrap)
    for param in loaded.parameters():
        nn.init.zeros_(param)
    Checkpoints(folder, group).load(loaded)
    for name, value in loaded.state_dict().items():
        assert_same_bits(value, after[name])
    return full


@pytest.mark.parametrize("wrap", ["", "layer", "experts", "expert"])
def test_layers_in_the_wrapper_of_activation_checkpointing(workers, tmp_path, wrap):
    full, _ = workers.run(2, checkpointed, wrap, tmp_path)
    alone = Blocks(None, "")
    Checkpoints(tmp_path).load(alone)
    assert alone.state_dict().keys() == full.keys()
    for name, value in alone.state_dict().items():
        assert_same_bits(value, full[name])


def with_other_ranks(group, rank):
    alone = MoE(D, 4, 2, process_group=group)
    with pytest.raises(ValueError, match=r"^parallelize: process_group must have the ranks \[0, 1"):
        parallelize(alone, None)
    mixed = nn.ModuleList([MoE(D, 4, 2, process_group=group), nn.Linear(D, D).bfloat16()])
    with pytest.raises(ValueError, match=r"^parallelize: model must have dense parameters of one"):
        parallelize(mixed, group, dense="fsdp")
    half = dist.new_group([0, 1]), dist.new_group([2, 3])
    dist.barrier()  # no rank closes its group while another still connects to it
    layer = MoE(D, 4, 2, process_group=half[rank // 2])
    with pytest.raises(ValueError, match=r"process_group must have .*, got \[0, 1, 2, 3\]$"):
        parallelize(layer, group)


def test_the_ranks_of_the_layers(workers):
    workers.run(4, with_other_ranks)


def clip_infinity(group, rank):
    layer = MoE(D, 2, 1, process_group=group)
    for param in layer.parameters():
        param.grad = torch.zeros_like(param)
    layer.experts.weights[0].grad[0, 0, 0] = [1.0, math.inf][rank]
    with pytest.raises(RuntimeError, match="norm of order 2.0 must be finite, got inf"):
        clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type must be above 0, got 0"):
        clip_grad_norm_(layer, 1.0, 0)
    for max_norm in (-1.0, math.nan, "1"):
        with pytest.raises(ValueError, match="^clip_grad_norm_: max_norm must be a number, at l"):
            clip_grad_norm_(layer, max_norm)


def test_clipping_refuses_infinity_everywhere(workers):
    workers.run(2, clip_infinity)


def clip_sharded(group, rank, norm_type):
    """Clips the gradients of a model whose dense weights, also those of one row, are sharded."""
    torch.manual_seed(0)
    options = dict(hidden_sizes=(5,), shared_expert=SharedExpert(D, [4]))
    model = nn.Sequential(nn.Linear(D, 1), MoE(D, 2, 1, process_group=group, **options))
    parallelize(model, group, dense="fsdp")
    shapes = {
        name: tuple(param.to_local().shape)
        for name, param in model.named_parameters()
        if "shared" in name
    }
    for param in model.parameters():
        param.grad = torch.full_like(param, 2)
    norm = clip_grad_norm_(model, 1.0, norm_type)
    count = sum(param.numel() for param in model.parameters())
    experts = sum(param.numel() for param in model[1].experts.parameters())
    return norm, count + experts, shapes


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_clipping_with_sharded_dense_weights(workers, norm_type):
    for norm, count, shapes in workers.run(2, clip_sharded, norm_type):
        scale = 1 if math.isinf(norm_type) else count ** (1 / norm_type)
        assert float(norm) == pytest.approx(2 * scale)
        assert {shape[1] for shape in shapes.values()} == {D // 2, 2}  # half of the rows


def clip_few(group, rank, dtype):
    """Shards one expert over two ranks; the largest float16 number is 65,504."""
    layer = MoE(D, 1, 1, hidden_sizes=(5,), expert_dtype=dtype, process_group=group)
    for param in layer.experts.parameters():
        param.grad = torch.zeros_like(param)
    if rank == 0:
        layer.experts.weights[0].grad[0, 0, :2] = torch.tensor([3000.0, 4000.0])
    norms = clip_grad_norm_(layer, 1e9, math.inf), clip_grad_norm_(layer, 1.0)
    return norms, layer.experts.weights[0].grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_clipping_other_types_and_processes_without_experts(workers, dtype):
    (norms, grad), (others, empty) = workers.run(2, clip_few, dtype)
    assert [float(norm) for norm in norms] == [float(norm) for norm in others] == [4000, 5000]
    torch.testing.assert_close(grad[0, 0, :2].float(), torch.tensor([0.6, 0.8]), rtol=1e-3, atol=0)
    assert empty.numel() == 0


def scaled_step(group, rank, bad_rank, as_mesh):
    layer = MoE(D, 2, 1, process_group=group)
    if as_mesh:
        group = DeviceMesh.from_group(group, "cpu")
    scaler = GradScaler("cpu", process_group=group, init_scale=8.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.experts.weights[0].detach().clone()
    for param in layer.parameters():
        param.grad = torch.full_like(param, 8.0)
    if rank == bad_rank:
        layer.gate.w_gate.grad[0, 0] = math.nan
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return before - layer.experts.weights[0].detach(), scaler.get_scale()


@pytest.mark.parametrize("bad_rank, as_mesh", [(None, False), (0, True), (1, False)])
def test_an_overflow_anywhere_skips_the_step_everywhere(workers, bad_rank, as_mesh):
    alone = scaled_step(None, 0, bad_rank and 0, as_mesh=False)
    for change, scale in [alone, *workers.run(2, scaled_step, bad_rank, as_mesh)]:
        torch.testing.assert_close(change, torch.full_like(change, float(bad_rank is None)))
        assert scale == (8 if bad_rank is None else 4)


def scaled_step_without_gradients(group, rank):
    """Rank 0 has no gradients; rank 1 has one that overflows."""
    layer = MoE(D, 2, 1, process_group=group)
    scaler = GradScaler("cpu", process_group=group, init_scale=8.0)
    optimizer = torch.optim.SGD(layer.experts.parameters(), lr=1.0)
    if rank == 1:
        layer.experts.weight_0.grad = torch.full_like(layer.experts.weight_0, math.inf)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_an_overflow_if_a_rank_has_no_gradients(workers):
    assert workers.run(2, scaled_step_without_gradients) == [4, 4]


@pytest.mark.parametrize(
    "num_experts, num_ranks, experts_per_group, counts",
    [(7, 3, 1, [3, 2, 2]), (2, 4, 1, [1, 1, 0, 0]), (12, 2, 4, [8, 4]), (5, 1, 1, [5])],
)
def test_placement(num_experts, num_ranks, experts_per_group, counts):
    placement = ExpertPlacement(num_experts, num_ranks, experts_per_group)
    assert placement.counts == counts
    owners = [placement.owner(expert) for expert in range(num_experts)]
    assert owners == sorted(owners)
    for rank in range(num_ranks):
        mine = [expert for expert in range(num_experts) if owners[expert] == rank]
        assert mine == list(placement.experts_of(rank))
    for wrong in (-1, num_experts):
        with pytest.raises(
            ValueError, match=rf"expert must be in \[0, {num_experts}\), got {wrong}"
        ):
            placement.owner(wrong)
    with pytest.raises(ValueError, match=rf"rank must be in \[0, {num_ranks}\), got -1"):
        placement.experts_of(-1)


def initial_values(group, rank, num_experts):
    torch.manual_seed(6)
    layer = MoE(D, num_experts, 1, process_group=group, bias=True)
    after = torch.rand(())
    counts = [num_experts] if group is None else layer.sharding.placement.counts
    return layer.experts.weights[0].detach(), counts, after


def test_experts_start_the_same_wherever_they_are(workers):
    whole, _, after = initial_values(None, 0, 7)
    assert len({float(matrix.detach().sum()) for matrix in whole}) == 7
    for world in (1, 2, 3, 4):
        parts = workers.run(world, initial_values, 7)
        assert_same_bits(torch.cat([part for part, _, _ in parts]), whole)
        assert parts[0][1] == ExpertPlacement(7, world).counts
        assert all(torch.equal(here, after) for _, _, here in parts)


def calls_of_process(group, rank):
    """Records the collectives of a step, forward and backward."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "broadcast"):
            original = getattr(dist, name)

            def call(*args, name=name, original=original, **options):
                calls.append(name)
                return original(*args, **options)

            patch.setattr(dist, name, call)
        model = parallelize(layer_of("flat", group), group)
        y, aux = model(tokens_of([9])[0].requires_grad_())
        (y.sum() + aux.loss).backward()
        clip_grad_norm_(model, 1.0)
    return calls


def test_one_process_communicates_nothing(workers):
    assert workers.run(1, calls_of_process) == [[]]
    assert "all_to_all_single" in workers.run(2, calls_of_process)[0]


class OfRows(Experts):
    """Experts with a parameter that does not have one row for each expert."""

    def __init__(self, num_experts):
        super().__init__(num_experts, D)
        self.weight = nn.Parameter(torch.ones(D, D))


class OwnForward(HierarchicalBalancedGate):
    """A gate that does more than its four steps."""

    def forward(self, x, ranks=None):
        return super().forward(2 * x, ranks)


def options_refused(group, rank):
    for options, shared, error, words in (
        ({"experts": [nn.Identity()] * 4}, {}, ValueError, "MoE: experts.num_experts .*1.*got 4"),
        ({"gate": nn.Identity()}, {}, TypeError, "MoE: gate must .*moe_ext.Gate, got Identity"),
        (
            {"experts": [nn.Identity()]},
            {"num_chunks": 2},
            ValueError,
            "MoE: num_experts .*8.*got 4",
        ),
        ({"experts": OfRows(1)}, {"num_chunks": 2}, ValueError, "ExpertParallel: num_chunks .*1"),
        (
            {"experts": [nn.Identity()], "gate": HierarchicalNoisyTopKGate(D, 4, 1, (2, 1))},
            {"num_chunks": 2},
            ValueError,
            "MoE: num_groups .*8.*one group .*got 4",
        ),
        (
            {"gate": BalancedGate(D, 4, 2)},
            {"balance": "local"},
            ValueError,
            "ExpertParallel: balance must be \"global\" .*got 'local'",
        ),
        (
            {"gate": OwnForward(D, 2, 2, (2, 1))},
            {"placement": "groups"},
            ValueError,
            'ExpertParallel: placement must be "experts" for OwnForward, which ranks cannot share',
        ),
        (
            {"gate": HierarchicalNoisyTopKGate(D, 2, 2, (2, 1))},
            {"placement": "groups", "balance": "local"},
            ValueError,
            'ExpertParallel: placement must be "experts" with balance="local", got \'groups\'',
        ),
        ({"process_group": group}, {}, ValueError, "MoE: parallel must be None"),
    ):
        with pytest.raises(error, match=words):
            MoE(D, 4, 2, parallel=ExpertParallel(group, **shared), **options)
    with pytest.raises(ValueError, match="parallelize: dense must .*got 'dp'"):
        parallelize(MoE(D, 4, 2, process_group=group), group, dense="dp")
    with pytest.raises(ValueError, match="moe_ops: layer must .*got 4"):
        moe_ops(MoE(D, 4, 2, process_group=group))
    with pytest.raises(
        ValueError, match=r"experts\.weight must have one row for each .*1.*, got \(6"
    ):
        parallelize(MoE(D, 4, 2, experts=OfRows(1), process_group=group), group)
    with pytest.raises(ValueError, match="process_group must be a mesh with mesh_dim_names"):
        MoE(D, 4, 2, process_group=init_device_mesh("cpu", (2, 2)))


def test_options_out_of_range(workers):
    for rank in workers.run(4, options_refused):
        assert rank is None


class Adapter(nn.Module):
    """Has only the forward of the module that it replaces, as adapters do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer

    def forward(self, *args, **options):
        return self.base_layer(*args, **options)


def parts_on_ranks(group, rank):
    """Checks that the layer does not modify its gate and calls whatever replaces its experts."""
    gate = TopKGate(D, 4, 2)
    before = dict(vars(gate))
    layer = MoE(D, 4, 2, gate=gate, w_load=0.0, process_group=group)
    x = torch.randn(5, D)
    expected, _ = layer(x)
    assert vars(gate) == before
    layer.experts = Adapter(layer.experts)
    assert_same_bits(layer(x)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)


def test_parts_on_ranks(workers):
    workers.run(2, parts_on_ranks)


def modules_in_process(group, rank, num_chunks=1):
    torch.manual_seed(7)
    everyone = [
        nn.Sequential(nn.Linear(D, 3 + e), nn.Tanh(), nn.Linear(3 + e, D)) for e in range(4)
    ]
    mine = [everyone[e] for e in ExpertPlacement(4, 1 if group is None else 2).experts_of(rank)]
    layer = MoE(
        D,
        4,
        2,
        gate=TopKGate(D, 4, 2),
        w_load=0.0,
        experts=mine,
        parallel=None if group is None else ExpertParallel(group, num_chunks=num_chunks),
    ).double()
    x = tokens_of([4, 5])[0]
    y, aux = layer(x if group is None else x.split([4, 5])[rank])
    (y.square().sum() + aux.loss).backward()
    names = {name: entry.name for name, entry in expert_parameters(layer).items()}
    grads = {n: p.grad for n, p in layer.named_parameters() if n.startswith("experts.")}
    return y.detach(), {names.get(n, n): grad for n, grad in grads.items()}


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_any_modules_as_experts(workers, num_chunks):
    y, grads = modules_in_process(None, 0)
    parts = workers.run(2, modules_in_process, num_chunks)
    assert_exact(torch.cat([part[0] for part in parts]), y)
    together = parts[0][1] | parts[1][1]
    assert together.keys() == grads.keys()
    for name, grad in grads.items():
        # The ranks compute the mean of two losses, the single process their sum.
        assert_exact(2 * together[name], grad)


class Scaled(nn.Linear):
    """An expert with a non-persistent buffer."""

    def __init__(self, number):
        super().__init__(D, D)
        self.register_buffer("scale", torch.tensor(float(number)), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


def experts_of_their_own(group, rank, num_experts, dense):
    numbers = [*ExpertPlacement(num_experts, 2).experts_of(rank)]
    experts = [Scaled(number) for number in numbers]
    layer = MoE(D, num_experts, 2, experts=experts, process_group=group)
    model = parallelize(layer, group, dense=dense)
    y, aux = model(torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    assert [float(expert.scale) for expert in experts] == numbers


@pytest.mark.parametrize("num_experts", [4, 5])
@pytest.mark.parametrize("dense", ["ddp", "fsdp"])
def test_experts_keep_all_their_buffers(workers, num_experts, dense):
    workers.run(2, experts_of_their_own, num_experts, dense)


def some_frozen(group, rank):
    """Freezes the experts of one rank, then the gate, then the replicated experts."""
    experts = [nn.Linear(D, D).requires_grad_(rank > 0) for _ in range(2)]
    layer = MoE(D, 4, 2, experts=experts, process_group=group)
    y, aux = parallelize(layer, group)(torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    assert all((expert.weight.grad is not None) == (rank > 0) for expert in experts)
    layer = MoE(D, 4, 2, process_group=group)
    nn.init.normal_(layer.gate.requires_grad_(False).w_gate)
    assert parallelize(layer, group) is layer
    y, aux = layer(torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shares"))
    layer = MoE(D, 4, 2, process_group=mesh)
    layer.experts.requires_grad_(False)
    y, aux = parallelize(layer, mesh)(torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    return layer.gate.w_gate.grad


def test_parts_of_a_model_are_frozen(workers):
    assert_same_bits(*workers.run(2, some_frozen))


def frozen_at_first(group, rank):
    """Trains replicas of experts that are frozen while the model is prepared."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shares"))
    layer = MoE(D, 4, 2, process_group=mesh)
    layer.experts.requires_grad_(False)
    model = parallelize(layer, mesh)
    layer.experts.requires_grad_(True)
    y, aux = model(rank_weight(rank) * torch.randn(4, D))
    (y.square().sum() + aux.loss).backward()
    return layer.experts.weight_0.grad


def test_experts_that_are_trained_later(workers):
    assert_same_bits(*workers.run(2, frozen_at_first))


def without_noise(group, rank):
    """Averages gradients in every step although W_noise has none."""
    layer = MoE(D, 4, 2, process_group=group).eval()
    nn.init.constant_(layer.gate.w_gate, 0.1)
    model = parallelize(layer, group, find_unused_parameters=True)
    for _ in range(2):
        y, _ = model(rank_weight(rank) * torch.randn(4, D))
        layer.zero_grad()
        y.square().sum().backward()
    return layer.gate.w_gate.grad


def test_training_without_noise(workers):
    assert_same_bits(*workers.run(2, without_noise))


def in_place(group, rank):
    y, aux = MoE(D, 4, 2, process_group=group)(torch.randn(4, D))
    torch.relu_(y).sum().backward()
    assert not any(value._is_view() for value in aux if isinstance(value, torch.Tensor))


def test_outputs_may_be_changed_in_place(workers):
    workers.run(2, in_place)


def compiled(group, rank):
    """Compiles a layer, and a layer whose experts have a compiled module."""
    sizes = []  # the numbers of operations of the graphs

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph

    layer = layer_of("topk", group)
    x = tokens_of([4, 5])[0].split([4, 5])[rank]
    (y, aux), (expected, aux_there) = torch.compile(layer, backend=backend)(x), layer(x)
    assert_same_bits(y, expected)
    assert_same_bits(aux.loss, aux_there.loss)
    (y.square().sum() + aux.loss).backward()
    assert len(sizes) < 6  # the exchange runs eagerly

    sizes.clear()
    modules = [nn.Linear(D, D), nn.Linear(D, D)]
    layer = MoE(D, 4, 2, experts=modules, process_group=group).double().eval()
    expected, _ = layer(x)
    modules[0].compile(backend=backend)
    y, _ = torch.compile(layer, backend="eager")(x)
    assert_same_bits(y, expected)
    # torch 2.11 does not compile a module in a function without compilation.
    assert len(sizes) == (not torch.__version__.startswith("2.11"))


def test_compiled(workers):
    workers.run(2, compiled)


def under_autocast(group, rank, kind, dtype):
    torch.manual_seed(4)
    if kind == "modules":
        # Under autocast, the two modules return different dtypes.
        modules = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), nn.LayerNorm(D)]
        options = {"experts": modules if group is None else [modules[rank]]}
    else:
        options = {"hidden_sizes": (7,)}
    layer = MoE(D, 2, 2, **sharing(group, options)).to(dtype).eval()
    x = 100 * tokens_of([4, 5])[0].to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = layer(x if group is None else x.split([4, 5])[rank])
    return y.detach()


@pytest.mark.parametrize(
    "kind, dtype",
    [("modules", torch.float32), ("weights", torch.float32), ("weights", torch.float64)],
)
def test_autocast_equals_one_process(workers, kind, dtype):
    expected = under_autocast(None, 0, kind, dtype)
    assert_same_bits(torch.cat(workers.run(2, under_autocast, kind, dtype)), expected)


def groups_under_autocast(group, rank, kind, expert_dtype):
    options = {} if group is None else {"parallel": ExpertParallel(group, placement="groups")}
    torch.manual_seed(4)
    gate = HierarchicalBalancedGate(D, 4, 3, 2) if kind == "balanced" else None
    layer = HierarchicalMoE(D, 4, 3, 2, gate=gate, expert_dtype=expert_dtype, **options)
    layer.train(kind == "balanced")
    for name, param in layer.gate.named_parameters():
        of_groups = name.endswith("_secondary")
        whole = torch.randn(4 if of_groups else len(param), *param.shape[1:])
        first = layer.gate.groups.start if of_groups else 0
        param.data.copy_(whole[first : first + len(param)])
    x = tokens_of([4, 5])[0].float()
    with torch.autocast("cpu", torch.bfloat16, enabled=expert_dtype is None):
        y, aux = layer(x if group is None else x.split([4, 5])[rank])
    return y.detach(), aux.expert_index


@pytest.mark.parametrize("kind", ["noisy", "balanced"])
@pytest.mark.parametrize("expert_dtype", [None, torch.bfloat16])
def test_groups_in_bfloat16_equal_one_process(workers, kind, expert_dtype):
    """The gates see tokens in float32; the sum of each rank is rounded to bfloat16."""
    y, expert_index = groups_under_autocast(None, 0, kind, expert_dtype)
    parts = workers.run(2, groups_under_autocast, kind, expert_dtype)
    assert torch.equal(torch.cat([index for _, index in parts]), expert_index)
    found = torch.cat([y for y, _ in parts])
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found, y, rtol=2 * eps, atol=2 * eps * float(y.abs().max()))


def copies_of_the_experts(group, rank):
    """Uses a mesh with replicas only. The balanced gate's mask covers the tokens of all ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shares"))
    y, aux = layer_of("balanced", mesh)(tokens_of([7, 8])[0].split([7, 8])[rank])
    return y.detach(), aux.tokens_per_expert


def test_balanced_gate_over_copies_of_the_experts(workers):
    expected, aux = layer_of("balanced")(tokens_of([7, 8])[0])
    parts = workers.run(2, copies_of_the_experts)
    assert_exact(torch.cat([y for y, _ in parts]), expected.detach())
    assert torch.equal(sum(counts for _, counts in parts), aux.tokens_per_expert)
    assert len(parts[0][1].unique()) > 1  # equal only when summed over the ranks


def made_without_memory(group, rank):
    """Makes layers on the meta device, then allocates and fills them."""
    with torch.device("meta"):
        layers = [
            MoE(D, 5, 2, parallel=ExpertParallel(group, exchange="tokens", num_chunks=2)),
            MoE(D, 5, 2, gate=BalancedGate(D, 5, 2), w_load=0.0, process_group=group),
            HierarchicalMoE(D, 3, 4, 2, process_group=group),
            gated(HierarchicalBalancedGate(D, 3, 4, 2), process_group=group),
        ]
    x = tokens_of([4, 5])[0].float().split([4, 5])[rank]
    for layer in layers:
        layer.to_empty(device="cpu")
        for value in (*layer.parameters(), *layer.buffers()):
            value.detach().fill_(3)
        for module in layer.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        y, aux = layer(x)
        assert y.isfinite().all() and aux.loss.isfinite()
        gate = layer.gate.named_parameters()
        assert not any(param.any() for name, param in gate if name.startswith("w_"))


def test_layers_made_on_the_meta_device(workers):
    workers.run(2, made_without_memory)


def shards_of_process(group, rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
    model[1].running_mean.fill_(rank + 1)
    first = [model[0].weight.detach().clone(), model[1].running_mean.clone()]
    parallelize(model, group, dense="fsdp")
    return first, [model[0].weight.full_tensor().detach(), model[1].running_mean]


def test_shards_begin_with_the_first_processes_values(workers):
    parts = workers.run(2, shards_of_process)
    for _, values in parts:
        for value, expected in zip(values, parts[0][0], strict=True):
            assert_same_bits(value, expected)


def local_balance(group, rank):
    layer = MoE(D, 4, 2, parallel=ExpertParallel(group, balance="local")).eval()
    torch.nn.init.normal_(layer.gate.w_gate, generator=torch.Generator().manual_seed(2))
    x = tokens_of([5, 6])[0].float().split([5, 6])[rank]
    _, aux = layer(x)
    alone = MoE(D, 4, 2).eval()
    alone.gate.load_state_dict(layer.gate.state_dict())
    _, expected = alone(x)
    assert_same_bits(aux.importance, expected.importance)
    assert_same_bits(aux.loss, expected.loss)


def test_balance_by_process(workers):
    workers.run(2, local_balance)
