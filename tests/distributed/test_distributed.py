"""Experts sharded over ranks: the sharding does not change the result (Sec. 3)."""

import math
from functools import partial

import numpy
import pytest
import torch
from assertions import assert_exact, assert_same_bits
from layers import LOSSES, TABLE
from layers import layer_of as make
from one_process import (
    RANKS,
    D,
    RowExperts,
    assert_equals_one_process,
    draw_parameters,
    mesh_of,
    sharing,
    tokens_of,
)
from pairwise import pairwise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from workers import on_ranks

from moe_ext import (
    BalancedGate,
    Capacity,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    ImportanceLoss,
    LoadLoss,
    MoE,
    NoisyTopKGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
)
from moe_ext.distributed import (
    AllToAll,
    Exchange,
    ExpertParallel,
    ExpertPlacement,
    Ranks,
    expert_parameters,
)
from moe_ext.gates import HierarchicalGate

KINDS = {
    name: partial(lambda row, **options: make(row.gate(), **row.options() | options), row)
    for name, row in TABLE.items()
    if name != "modules"  # see test_any_modules_as_experts
} | {
    "k=1": lambda **options: MoE(D, 5, 1, **options),
    "few": lambda **options: MoE(D, 2, 2, **options),  # fewer experts than ranks
    "swiglu": lambda **options: MoE(D, 6, 2, activation="swiglu", bias=True, **options),
    "one group each": lambda **options: HierarchicalMoE(D, 4, 2, (1, 2), **options),
    "one expert each": lambda **options: HierarchicalMoE(D, 4, 1, (2, 1), **options),
    "one balanced group each": lambda **options: make(
        HierarchicalBalancedGate(D, 4, 3, (1, 2), detach_scores=False), **options
    ),
    "a single balanced group": lambda **options: make(
        HierarchicalBalancedGate(D, 1, 4, (1, 2)), **options
    ),
    "balanced losses": lambda **options: make(BalancedGate(D, 5, 2), losses=LOSSES, **options),
    "balanced zero computation": lambda **options: make(
        BalancedGate(D, 6, 2), num_identity_experts=2, **options
    ),
    "balanced capacity": lambda **options: make(BalancedGate(D, 5, 2), capacity=0.5, **options),
    "capacity with ties": lambda **options: MoE(  # all gates are 1
        D, 2, 1, capacity=Capacity(0.7, "score"), **options
    ),
    "capacity of some": lambda **options: make(
        NoisyTopKGate(D, 6, 2),
        num_identity_experts=1,
        num_null_experts=1,
        capacity=Capacity(0.5, "score"),
        losses=LOSSES,
        **options,
    ),
}


def layer_of(kind, process_group=None, **options):
    """Makes a float64 layer with a random gate; it is the same on every rank."""
    torch.manual_seed(1)
    layer = KINDS[kind](**sharing(process_group, {"hidden_sizes": (7,)} | options))
    return draw_parameters(layer, but="experts.")


def call(layer, x, part, masked=False, replayed=False):
    """Calls the layer, with a masked token after each token, and with given experts."""
    given = {}
    if replayed:
        scores = torch.rand(30, layer.gate.num_experts, generator=torch.Generator().manual_seed(6))
        given["expert_index"] = scores.argsort(1)[part, : layer.k]
    if not masked:
        return layer(x, **given)
    mask = torch.tensor([True, False]).expand(len(x), 2)
    given = {name: torch.stack([index, 0 * index], 1) for name, index in given.items()}
    y, aux = layer(torch.stack([x, torch.full_like(x, math.nan)], 1), mask, **given)
    assert y[:, 1].count_nonzero() == 0
    return y[:, 0], aux


HOW = {
    "rows": {"exchange": "rows", "placement": "experts"},
    "tokens": {"exchange": "tokens", "placement": "experts"},
    "groups": {"placement": "groups"},
}
GATES = {kind: make().gate for kind, make in KINDS.items()}
# The kinds whose secondary gates ranks can share, and those whose gate takes given experts.
GROUPED = {kind for kind, gate in GATES.items() if isinstance(gate, HierarchicalGate)}
REPLAYED = {kind for kind, gate in GATES.items() if gate.replays}
# The kinds that also run in a group of one rank: each gate, and a capacity.
ALONE = {"noisy", "top-k", "hierarchical", "balanced", "balanced groups", "expert choice", "relu"}
ALONE |= {"capacity by score"}


@pytest.mark.guarantee("Sharding does not change the result")
@pytest.mark.equation("Sec. 3.1", "arXiv 2401.06066", "arXiv 2202.09368", "arXiv 2412.14711")
@pytest.mark.equation("arXiv 2101.03961", "arXiv 2410.07348", "arXiv 2509.01322")
@pairwise(
    kind=KINDS,
    ranks=RANKS,
    how=HOW,
    num_chunks=[1, 2, 3],
    recompute=[False, True],
    masked=[False, True],
    replayed=[False, True],
    allowed=lambda kind, ranks, how, replayed, **_: (
        (ranks != "1" or kind in ALONE)
        and (how != "groups" or kind in GROUPED)
        and (not replayed or kind in REPLAYED)
    ),
)
def test_equals_one_process(workers, kind, ranks, how, num_chunks, recompute, masked, replayed):
    """The outputs are bitwise identical if the rows of a token meet in the order of its slots."""
    aux = assert_equals_one_process(
        workers,
        ranks,
        partial(layer_of, kind),
        partial(call, masked=masked, replayed=replayed),
        tokens_of(RANKS[ranks]),
        same_bits=how == "rows",
        num_chunks=num_chunks,
        recompute=recompute,
        **HOW[how],
    )
    assert aux.kept is None or not aux.kept.all()


def call_with_sequences(layer, x, part, masked):
    """Calls a layer with losses of sequences; a masked sequence has no real tokens."""
    mask = torch.rand(30, 7, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[0] = False
    return layer(x, mask[part] if masked else None)


@pytest.mark.equation("arXiv 2101.03961", "arXiv 2202.08906", "arXiv 2412.19437")
@pairwise(ranks=RANKS, masked=[False, True], recompute=[False, True])
def test_losses_equal_one_process(workers, ranks, masked, recompute):
    """The losses of the batch and of each sequence, with their gradients."""
    losses = [SwitchLoss(0.3), SwitchLoss(0.2, per_sequence=True), ZLoss(0.1)]
    losses += [ImportanceLoss(0.1), LoadLoss(0.2)]
    make = partial(layer_of, "top-k", losses=losses)
    called = partial(call_with_sequences, masked=masked)
    x = tokens_of(RANKS[ranks], 7)
    assert_equals_one_process(workers, ranks, make, called, x, recompute=recompute)


def layer_of_modules(process_group=None, **options):
    """Makes a layer whose experts are modules of different sizes."""
    torch.manual_seed(7)
    modules = [nn.Sequential(nn.Linear(D, 3 + e), nn.Tanh(), nn.Linear(3 + e, D)) for e in range(4)]
    if process_group is not None:
        local = ExpertPlacement(4, process_group.size()).experts_of(process_group.rank())
        modules = modules[local.start : local.stop]
    options = {"experts": modules, "hidden_sizes": None} | sharing(process_group, options)
    return make(TopKGate(D, 4, 2), **options).double()


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_any_modules_as_experts(workers, num_chunks):
    x = tokens_of(RANKS["2"])
    assert_equals_one_process(workers, "2", layer_of_modules, call, x, num_chunks=num_chunks)


@pytest.mark.parametrize("capacity", [None, "position", "score"])
@on_ranks(2)
def test_local_balance_is_of_each_rank(group, rank, capacity):
    """Losses and capacities are then those of a layer alone."""
    options = {"losses": [SwitchLoss(0.3), SwitchLoss(0.2, per_sequence=True), LoadLoss(0.1)]}
    if capacity:
        options |= {"capacity": Capacity(0.7, capacity)}
    x = tokens_of(RANKS["2"], 7).split(RANKS["2"])[rank]
    aux = layer_of("top-k", group, balance="local", **options)(x)[1]
    alone = layer_of("top-k", **options)(x)[1]
    assert_same_bits(aux.importance, alone.importance)
    assert_same_bits(aux.loss, alone.loss)
    assert (aux.losses, aux.gate_metrics) == (alone.losses, alone.gate_metrics)
    if capacity:
        assert torch.equal(aux.kept, alone.kept) and not aux.kept.all()


class SeeingGate(NoisyTopKGate):
    replays = True

    def forward(self, x, ranks=None, expert_index=None):
        routing = super().forward(x, ranks, expert_index)
        self.seen = routing.importance.detach(), routing.load.detach()
        return routing


@on_ranks(2)
def test_a_gate_with_its_own_forward_sees_the_sums(group, rank):
    """A layer sums importance and load after the gate only if nothing in the gate can need them."""
    layer = make(SeeingGate(D, 4, 2), process_group=group)
    aux = layer(torch.randn(5, D))[1]
    assert_same_bits(layer.gate.seen[0], aux.importance.detach())
    assert_same_bits(layer.gate.seen[1], aux.load.detach())


class DroppingGate(HierarchicalNoisyTopKGate):
    def routing(self, *args):
        routing = super().routing(*args)
        return routing._replace(kept=torch.zeros_like(routing.gates, dtype=torch.bool))


@on_ranks(2)
def test_hierarchical_layers_refuse_to_drop_assignments(group, rank):
    """All ranks raise an error if `capacity` is set later, or if the gate drops."""
    rules = {
        HierarchicalNoisyTopKGate: "capacity must be None with a hierarchical gate, got Capacity",
        DroppingGate: "gate must return Routing.kept = None with placement",
    }
    for gate, rule in rules.items():
        layer = make(gate(D, 2, 3, 1), process_group=group)
        layer.capacity = 1.5 if gate is HierarchicalNoisyTopKGate else None
        with pytest.raises(ValueError, match=f"^MoE: {rule}"):
            layer(torch.randn(4, D))


class NotingGate(HierarchicalNoisyTopKGate):
    shares_groups = True
    calls = 0

    def forward(self, x, ranks=None, select=None):
        self.calls += 1
        return super().forward(x, ranks, select)


class DeafGate(NotingGate):
    shares_groups = True

    def forward(self, x, ranks=None, select=None):
        routing = self.make_routing(torch.ones(len(x), self.k), torch.zeros(len(x), self.k).long())
        return routing


@on_ranks(2)
def test_a_gate_with_its_own_forward_shares_its_groups(group, rank):
    layers = {
        kind: make(kind(D, 2, 3, (1, 2)), process_group=group)
        for kind in (NotingGate, DeafGate, HierarchicalNoisyTopKGate)
    }
    x = torch.randn(4, D)
    for layer in layers.values():
        assert layer.sharding.group_exchange is not None
        layer.load_state_dict(layers[NotingGate].state_dict())
    torch.manual_seed(rank)
    y = layers[NotingGate](x)[0]
    assert layers[NotingGate].gate.calls == 1
    torch.manual_seed(rank)
    assert_same_bits(layers[HierarchicalNoisyTopKGate](x)[0], y)
    compiled = torch.compile(layers[HierarchicalNoisyTopKGate].gate, backend="eager")
    torch.manual_seed(rank)
    layers[HierarchicalNoisyTopKGate].gate = compiled
    assert_same_bits(layers[HierarchicalNoisyTopKGate](x)[0], y)
    with pytest.raises(ValueError, match="^MoE: gate must pass select to .*, got '0 calls'$"):
        layers[DeafGate](x)


@pytest.mark.guarantee("It works with PyTorch's tools")
@pytest.mark.parametrize(
    "kind", ["top-k", "hierarchical", pytest.param("balanced groups", marks=pytest.mark.long)]
)
@on_ranks(2)
def test_compiled_layers(group, rank, kind):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    layer = layer_of(kind, group)
    compiled = torch.compile(layer, backend=backend)
    x = torch.randn(5, D, dtype=torch.float64)
    passes = []
    for call in (layer, compiled, compiled):
        torch.manual_seed(rank)
        layer.zero_grad()
        y, aux = call(x)
        (y.square().sum() + aux.loss).backward()
        passes.append([y, aux.loss, *(p.grad for p in layer.parameters() if p.grad is not None)])
    for result in passes[1:]:
        for a, b in zip(result, passes[0], strict=True):
            assert_same_bits(a, b)
    assert kind != "top-k" or len(graphs) < 6  # the exchange runs eagerly


def balanced_steps(group, rank, counts, num_chunks, mesh, ties):
    """Returns the results of several passes of a balanced layer, and its thresholds.

    The secondary gate of the last group gives NaN in the first pass, so that no group may start.
    """
    options = {} if group is None else {"num_chunks": num_chunks, "placement": "groups"}
    layer = layer_of("balanced groups", mesh_of(2, 2) if mesh else group, **options)
    gate, x = layer.gate, tokens_of(counts)
    if group is not None:
        x = x.split(counts)[rank]
    rows = slice(gate.groups.start, gate.groups.stop)
    whole = torch.zeros(gate.num_groups, D, gate.experts_per_group, dtype=torch.float64)
    if not ties:
        nn.init.normal_(whole, generator=torch.Generator().manual_seed(7))
    else:
        nn.init.zeros_(gate.w_gate)
    broken = whole.clone()
    broken[-1] = math.nan
    nn.init.zeros_(gate.threshold_secondary)
    moved = torch.randn(whole.shape[::2], generator=torch.Generator().manual_seed(8)) * 0.05

    passes = []
    for name in ("broken", "start", "moved", "batchwise", "thresholds", "no tokens"):
        gate.w_gate_secondary.data.copy_((broken if name == "broken" else whole)[rows])
        if name == "moved":
            gate.threshold_secondary.data.add_(moved[rows])
        layer.train(name not in ("batchwise", "thresholds"))
        gate.batchwise = name == "batchwise"
        y, aux = layer(x if name != "no tokens" else x[:0])
        token_values = y.detach(), aux.gates.detach(), aux.expert_index, aux.token_offsets.diff()
        metrics = [
            aux.gate_metrics.get(key) for key in ("share_without_expert", "mask_disagreement")
        ]
        sums = [aux.loss, aux.importance, aux.load, *metrics]
        sums = [value.detach().double() for value in sums if value is not None]
        state = gate.threshold_secondary.detach().clone(), bool(gate.initialized_secondary)
        passes.append((token_values, sums, *state))
    return passes, rows


@pytest.mark.equation("App. B", "App. F")
@pytest.mark.parametrize(
    "counts, num_chunks, mesh, ties",
    [
        ([5, 8], 1, False, True),
        ([4, 0, 6], 2, False, False),
        ([0, 0, 5, 6], 1, False, False),
        ([3, 7, 0, 5], 2, True, False),
        ([3, 7, 0, 5], 2, True, True),
    ],
)
def test_balanced_groups_equal_one_process(workers, counts, num_chunks, mesh, ties):
    """Masks and thresholds of the secondary gates cover the tokens of all ranks."""
    expected, _ = balanced_steps(None, 0, counts, 1, False, ties)
    assert [started for *_, started in expected] == [False] + 5 * [True]
    parts = workers.run(len(counts), balanced_steps, counts, num_chunks, mesh, ties)
    for step, (token_values, sums, threshold, started) in enumerate(expected):
        rank_passes = [passes[step] for passes, _ in parts]
        y, gates, *decisions = map(torch.cat, zip(*(part[0] for part in rank_passes), strict=True))
        assert_exact(y, token_values[0], nan=True)
        assert_exact(gates, token_values[1], nan=True)
        for decision, wanted in zip(decisions, token_values[2:], strict=True):
            assert torch.equal(decision, wanted)
        for (_, values, own_threshold, own_start), (_, own) in zip(rank_passes, parts, strict=True):
            for value, wanted in zip(values, sums, strict=True):
                assert_exact(value, wanted, nan=True)
            assert_exact(own_threshold, threshold[own])
            assert own_start == started
    assert ties or expected[4][0][3].unique().numel() > 2  # thresholds select differently many


def outputs_of_process(group, rank, kind, counts, dtype, options):
    """Returns y of one rank in evaluation mode; without "spread", all logits tie."""
    torch.manual_seed(1)
    layer = MoE(D, 8, 2, hidden_sizes=(5,), **sharing(group, options)).to(dtype).eval()
    if kind == "spread":
        nn.init.normal_(layer.gate.w_gate, generator=torch.Generator().manual_seed(2))
    x = tokens_of(counts).to(dtype)
    x = x if rank is None else x.split(counts)[rank]
    mask = torch.arange(len(x)) % 3 != 1
    y, aux = layer(x, mask)
    return y.detach(), aux.tokens_per_expert


@pairwise(
    kind=["spread", "all to the first rank"],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    exchange=["rows", "tokens"],
)
def test_outputs_in_every_type(workers, kind, dtype, exchange):
    counts = [6, 0, 9, 3]  # multiples of 3: the mask of a rank is then part of the global mask
    y, tokens_per_expert = outputs_of_process(None, None, kind, counts, dtype, {})
    options = {"exchange": exchange, "num_chunks": 2}
    parts = workers.run(4, outputs_of_process, kind, counts, dtype, options)
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
        owned = [expert for expert in range(num_experts) if owners[expert] == rank]
        assert owned == list(placement.experts_of(rank))
    for wrong in (-1, num_experts):
        rule = rf"expert must be in \[0, {num_experts}\), got {wrong}"
        with pytest.raises(ValueError, match=rule):
            placement.owner(wrong)
    with pytest.raises(ValueError, match=rf"rank must be in \[0, {num_ranks}\), got -1"):
        placement.experts_of(-1)


def test_whole_numbers_of_the_options():
    placement = ExpertPlacement(numpy.int64(12), numpy.uint8(2), numpy.int32(4))
    assert placement == ExpertPlacement(12, 2, 4)
    options = ExpertParallel(None, num_chunks=numpy.int64(2))
    exchange = Exchange(placement, Ranks(), num_chunks=numpy.int64(2))
    numbers = [*vars(placement).values(), options.num_chunks, exchange.num_chunks]
    assert {type(number) for number in numbers} == {int}
    for sizes in ((2.0, 1), (-1, 1), (4, 0), (4, 1, True), (4, 1, 0), (4, 1, 3)):
        with pytest.raises(ValueError, match=r"^ExpertPlacement: \w+ must .*, got "):
            ExpertPlacement(*sizes)
    for wrong in (0, 1.5, numpy.float64(2)):
        with pytest.raises(ValueError, match="^ExpertParallel: num_chunks must be .*, got "):
            ExpertParallel(None, num_chunks=wrong)
        with pytest.raises(ValueError, match="^Exchange: num_chunks must be .*, got "):
            Exchange(placement, Ranks(), num_chunks=wrong)


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
        assert all(torch.equal(actual, after) for _, _, actual in parts)


class OwnForward(HierarchicalBalancedGate):
    """A gate that does more than its four steps."""

    shares_groups = False

    def forward(self, x, ranks=None):
        return super().forward(2 * x, ranks)


# The layer's options, those of ExpertParallel, and the error on four ranks.
REFUSED = [
    ({"experts": [nn.Identity()] * 4}, {}, "MoE: experts.num_experts .*1.*got 4"),
    ({"gate": nn.Identity()}, {}, "MoE: gate must .*moe_ext.Gate, got Identity"),
    ({"experts": [nn.Identity()]}, {"num_chunks": 2}, "MoE: num_experts .*8.*got 4"),
    ({"experts": RowExperts(1)}, {"num_chunks": 2}, "ExpertParallel: num_chunks .*1"),
    (
        {"experts": [nn.Identity()], "gate": HierarchicalNoisyTopKGate(D, 4, 1, (2, 1))},
        {"num_chunks": 2},
        "MoE: num_groups .*8.*one group .*got 4",
    ),
    (
        {"gate": BalancedGate(D, 4, 2)},
        {"balance": "local"},
        "ExpertParallel: balance must be \"global\" .*got 'local'",
    ),
    (
        {"gate": OwnForward(D, 2, 2, (2, 1))},
        {"placement": "groups"},
        'ExpertParallel: placement must be "experts" for OwnForward, which ranks cannot share',
    ),
    (
        {"gate": HierarchicalNoisyTopKGate(D, 2, 2, (2, 1))},
        {"placement": "groups", "balance": "local"},
        'ExpertParallel: placement must be "experts" with balance="local", got \'groups\'',
    ),
]


@on_ranks(4)
def test_options_out_of_range(group, rank):
    given_twice = {"process_group": group}, {}, "MoE: parallel must be None"
    for options, shared, words in (*REFUSED, given_twice):
        with pytest.raises((ValueError, TypeError), match=words):
            MoE(D, 4, 2, parallel=ExpertParallel(group, **shared), **options)
    with pytest.raises(ValueError, match="process_group must be a mesh with mesh_dim_names"):
        MoE(D, 4, 2, process_group=init_device_mesh("cpu", (2, 2)))


@on_ranks(2)
def test_outputs_may_be_changed_in_place(group, rank):
    y, aux = MoE(D, 4, 2, process_group=group)(torch.randn(4, D))
    torch.relu_(y).sum().backward()
    assert not any(value._is_view() for value in aux if isinstance(value, torch.Tensor))


@on_ranks(2)
def test_a_compiled_module_of_the_experts(group, rank):
    graphs = []
    modules = [nn.Linear(D, D), nn.Linear(D, D)]
    layer = MoE(D, 4, 2, experts=modules, process_group=group).eval()
    x = torch.randn(5, D)
    expected, _ = layer(x)
    modules[0].compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    y, _ = torch.compile(layer, backend="eager")(x)
    assert_same_bits(y, expected)
    # torch 2.11 does not compile a module in a function without compilation.
    assert len(graphs) == (not torch.__version__.startswith("2.11"))


def under_autocast(group, rank, kind, dtype):
    torch.manual_seed(4)
    if kind == "modules":
        # Under autocast, the two modules return different dtypes.
        modules = [nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), nn.LayerNorm(D)]
        options = {"experts": modules if group is None else [modules[rank]]}
    else:
        options = {"hidden_sizes": (7,)}
    layer = MoE(D, 2, 2, **sharing(group, options)).to(dtype).eval()
    x = 100 * tokens_of([4, 5]).to(dtype)
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
    torch.manual_seed(4)
    gate = HierarchicalBalancedGate(D, 4, 3, 2) if kind == "balanced" else None
    options = sharing(group, {"gate": gate, "expert_dtype": expert_dtype, "placement": "groups"})
    layer = draw_parameters(HierarchicalMoE(D, 4, 3, 2, **options), but="experts.").float()
    layer.experts.to(expert_dtype or torch.float32)
    layer.train(kind == "balanced")
    x = tokens_of([4, 5]).float()
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
    actual = torch.cat([y for y, _ in parts])
    eps = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(actual, y, rtol=2 * eps, atol=2 * eps * float(y.abs().max()))


@on_ranks(2)
def test_layers_made_on_the_meta_device(group, rank):
    """They are allocated and filled later."""
    with torch.device("meta"):
        layers = [
            MoE(D, 5, 2, parallel=ExpertParallel(group, exchange="tokens", num_chunks=2)),
            MoE(D, 5, 2, gate=BalancedGate(D, 5, 2), w_load=0.0, process_group=group),
            HierarchicalMoE(D, 3, 4, 2, process_group=group),
            make(HierarchicalBalancedGate(D, 3, 4, 2), process_group=group),
        ]
    x = tokens_of([4, 5]).float().split([4, 5])[rank]
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


@on_ranks(2)
def test_values_of_a_row_are_sent_together(group, rank):
    """One all-to-all sends several values, and one the gradients of those that have any."""
    counts = [[1, 3], [0, 2]]  # the rows from each rank to each rank
    num_sent, num_received = counts[rank], [row[rank] for row in counts]
    draw = torch.Generator().manual_seed(rank)
    total, ranks = sum(num_sent), Ranks(group)
    values = [
        torch.randint(99, (total,), generator=draw, dtype=torch.int32),
        torch.randn(total, 3, generator=draw, dtype=torch.float64).requires_grad_(),
        torch.randn(total, 2, 2, generator=draw).half(),
        torch.randn(total, 1, generator=draw).requires_grad_(),
    ]
    received = AllToAll(values, ranks, num_sent, num_received).wait_all()
    for value, arrived in zip(values, received, strict=True):
        assert_same_bits(arrived, AllToAll(value, ranks, num_sent, num_received).wait())
        assert arrived.requires_grad == value.requires_grad
    ((rank + 1) * (received[1].sum() + 10 * received[3].double().sum())).backward()
    receiver = torch.tensor([1.0, 2.0]).repeat_interleave(torch.tensor(num_sent))[:, None]
    assert_same_bits(values[1].grad, receiver.double().expand(total, 3))
    assert_same_bits(values[3].grad, 10 * receiver)
    with torch.no_grad():
        (alone,) = AllToAll([values[1]], ranks, num_sent, num_received).wait_all()
    assert_same_bits(alone, received[1])


@on_ranks(4)
def test_parts_that_are_frozen_on_one_rank(group, rank):
    """Nothing else needs a gradient: all ranks must run backward together."""
    nodes = {"exchange": "nodes", "ranks_per_node": 2}
    for gate, options in (
        (TopKGate(D, 4, 2), {}),
        (TopKGate(D, 4, 2), {"exchange": "tokens"}),
        (TopKGate(D, 4, 1, renormalize=False), {"num_chunks": 2} | nodes),
        (TopKGate(D, 4, 2), nodes),
        (HierarchicalNoisyTopKGate(D, 4, 2, (2, 2)), {}),
        (HierarchicalBalancedGate(D, 4, 2, (2, 1)), {}),
    ):
        layer = MoE(D, gate.num_experts, gate.k, gate=gate, **sharing(group, options))
        gate.requires_grad_(False)
        for entry in expert_parameters(layer).values():
            entry.param.requires_grad_(rank > 0)
        y, aux = layer(torch.ones(8, D))
        (y.sum() + aux.loss).backward()
        for param in layer.experts.parameters():
            assert (param.grad is not None) == (rank > 0)
        with torch.no_grad():
            assert not layer(torch.ones(8, D))[0].requires_grad
