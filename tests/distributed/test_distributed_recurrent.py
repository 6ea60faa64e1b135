"""An LSTM whose matrices are a mixture of sharded experts (Sec. 3.1)."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from assertions import assert_same_bits
from one_process import (
    RANKS,
    D,
    assert_equals_one_process,
    draw_parameters,
    sharing,
    step,
    tokens_of,
)
from pairwise import pairwise
from workers import on_ranks

from moe_ext import HierarchicalNoisyTopKGate, MoELSTM, SoftmaxGate
from moe_ext.distributed import ExpertParallel, expert_parameters
from moe_ext.recurrent import exchanged_bytes

S = 4
HOW = {
    "by bytes": {},
    "rows": {"gather_experts": False},
    "tokens": {"gather_experts": False, "exchange": "tokens", "num_chunks": 2},
    "gathered": {"gather_experts": True},
}


def layer_of(levels, training, process_group=None, **options):
    """Makes a recurrent layer; it is the same on every rank."""
    if levels == 2:
        options["gate"] = HierarchicalNoisyTopKGate(D + 3, 3, 2, (2, 1))
    layer = MoELSTM(D, 3, 6, 2, **sharing(process_group, options))
    return draw_parameters(layer).train(training)


def call(layer, x, part):
    """Returns the weighted sum of each sequence's outputs, and the report.

    In training, all sequences have S time steps, because the table of noise has a row for each.
    """
    lengths = torch.randint(1, S + 1, (30,), generator=torch.Generator().manual_seed(3))[part]
    if layer.training:
        lengths.fill_(S)
    num_steps = max(lengths.tolist(), default=1)
    mask = torch.arange(num_steps) < lengths[:, None]
    weight = torch.linspace(-1, 1, S * 3, dtype=torch.float64).view(S, 3)
    y, (h, c), aux = layer(x[:, :num_steps], mask=None if layer.training else mask)
    return (y * weight[:num_steps]).sum((1, 2)) + (h + 0.5 * c).sum(1), aux


@pytest.mark.equation("Sec. 3.1")
@pairwise(how=HOW, ranks=["2", "3", "2 x 2"], training=[True, False], levels=[1, 2])
def test_equals_one_process(workers, how, ranks, training, levels):
    """Importance and load cover all ranks, which may run different numbers of steps."""
    make = partial(layer_of, levels, training)
    x = tokens_of(RANKS[ranks], S)
    assert_equals_one_process(workers, ranks, make, call, x, **HOW[how])


@pytest.mark.parametrize("gather", [False, True])
@on_ranks(3)
def test_memory_slots(group, rank, gather):
    """Recomputation runs the exchange again and draws the same noise."""
    steps = []
    for slots in (None, 2):
        make = partial(layer_of, 2, True, gather_experts=gather, memory_slots=slots)
        torch.manual_seed(rank)
        steps.append(step(group, rank, "3", make, call, tokens_of(RANKS["3"], S), noise=False))
    plain, recomputed = steps
    assert_same_bits(plain["y"], recomputed["y"])
    for name, grad in plain["grads"].items():
        assert_same_bits(recomputed["grads"][name], grad)


@pytest.mark.parametrize("trains_rest", [False, True])
@pytest.mark.parametrize("gather", [False, True, None])
@on_ranks(2)
def test_experts_that_are_frozen_on_one_rank(group, rank, gather, trains_rest):
    """Without trains_rest, nothing else needs a gradient; gather = None then depends on that."""
    options = {"gather_experts": gather, "memory_slots": None if trains_rest else 2}
    layer = MoELSTM(D, 4, 2, 2, process_group=group, **options).requires_grad_(trains_rest)
    for entry in expert_parameters(layer).values():
        entry.param.requires_grad_(rank == 0)
    y, _, aux = layer(torch.randn(1, 5, D, requires_grad=trains_rest))
    (y.sum() + aux.loss).backward()
    for entry in expert_parameters(layer).values():
        assert (entry.param.grad is not None) == (rank == 0)


@on_ranks(2)
def test_a_compiled_layer_gathers_its_experts(group, rank):
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = MoELSTM(D, 4, 2, 2, process_group=group, gather_experts=True).eval()
        if compiled:
            layer.cell.moe = torch.compile(layer.cell.moe, backend="eager")
        results.append(layer(torch.randn(5, 7, D))[0])
    assert_same_bits(*results)


def bytes_of_step(group, rank, slots, gather):
    """Returns the bytes of rows or weights that this rank sends, and those that are predicted."""
    gate = SoftmaxGate(D + 4, 2)  # each row goes to both ranks
    options = {"gate": gate, "process_group": group, "memory_slots": slots}
    layer = MoELSTM(D, 4, 2, 2, gather_experts=gather, **options)
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
def test_bytes(workers, gather):
    results = workers.run(2, bytes_of_step, None, gather)
    assert sum(sent for sent, _ in results) == results[0][1][gather]


def test_bytes_need_ranks():
    with pytest.raises(ValueError, match="exchanged_bytes: layer must share its experts"):
        exchanged_bytes(MoELSTM(D, D, 4, 2), 7, 7)


@on_ranks(2)
def test_gates_cannot_be_shared(group, rank):
    rule = "MoELSTM: parallel.placement must be \"experts\" or None, got 'groups'"
    with pytest.raises(ValueError, match=f"^{rule}$"):
        MoELSTM(D, 3, 6, 2, parallel=ExpertParallel(group, placement="groups"))
