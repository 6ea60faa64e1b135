"""What gates adapt does not depend on ranks, micro-batches or recomputation."""

import pytest
import torch
import torch.distributed as dist
from assertions import assert_all_same_bits, assert_exact, assert_same_bits
from layers import RECOMPUTED
from one_process import D, average_gradients, draw_parameters, sharing
from pairwise import pairwise
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from moe_ext import MoE, ReLUGate, TopKGate, update_gates
from moe_ext.distributed import expert_parameters

E, K, T, STEPS = 8, 2, 18, 3
pytestmark = pytest.mark.equation("arXiv 2408.15664", "arXiv 2412.14711")

# The gates, by the name of the buffer that adapts.
GATES = {
    "selection_bias": lambda: TopKGate(
        D, E, K, score="sigmoid", num_groups=4, groups_per_token=2, bias_update_rate=0.01
    ),
    "l1_weight": lambda: ReLUGate(D, E, K, l1_weight=0.5, l1_growth=1.5),
}


def make_layer(state, group=None, balance="global"):
    options = sharing(group, {"hidden_sizes": (7,), "balance": balance})
    layer = MoE(D, E, K, gate=GATES[state](), w_importance=0.1, w_load=0, **options)
    return draw_parameters(layer, std=0.5)


def train(group, rank, state, accumulation, recompute, balance="global"):
    """Trains three steps; returns the states and counts of each step, losses and last gradients."""
    size = 1 if group is None else dist.get_world_size(group)
    layer = make_layer(state, group, balance)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(3)
    history = {"counts": [], "states": [], "losses": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(T, D, dtype=torch.float64, generator=draw) + 0.5
        weight = torch.randn(T, D, dtype=torch.float64, generator=draw)
        losses = 0
        for batch in zip(x.chunk(accumulation), weight.chunk(accumulation), strict=True):
            part, w = (whole.chunk(size)[rank] for whole in batch)

            def loss_of(part, w=w):
                y, aux = layer(part)
                return size * (y * w).sum() + aux.loss

            loss = RECOMPUTED[recompute](loss_of, part.clone().requires_grad_())
            loss.backward()
            losses = losses + loss.detach()
        if group is not None:
            average_gradients(layer, group)
            dist.all_reduce(losses, group=group)
        history["losses"].append(losses / size)
        optimizer.step()
        history["counts"].append(layer.gate.tokens_since_update.clone())
        # With a global balance, the ranks have summed already: another sum changes nothing.
        by_rank = group is None or balance == "local"
        update_gates(layer, group if by_rank else DeviceMesh.from_group(group, "cpu"))
        history["states"].append(getattr(layer.gate, state).clone())
    grads = {name: param.grad for name, param in layer.named_parameters()}
    bounds = {name: entry.bounds[:2] for name, entry in expert_parameters(layer).items()}
    return history, grads, bounds


@pairwise(state=GATES, size=[1, 2, 3], accumulation=[1, 3], recompute=RECOMPUTED)
def test_equals_one_process_without_recomputation(workers, state, size, accumulation, recompute):
    expected, expected_grads, _ = train(None, 0, state, accumulation, "no")
    # Before the first step the weights are the same, so the micro-batches do not matter either.
    at_once = train(None, 0, state, 1, "no")[0]
    assert expected["counts"][0].tolist() == at_once["counts"][0].tolist()
    assert expected["counts"][0].sum() == T * K or expected["counts"][0][E] == T
    assert (expected["states"][-1] != getattr(GATES[state](), state)).any()
    for history, grads, bounds in workers.run(size, train, state, accumulation, recompute):
        for actual, right in zip(history["counts"], expected["counts"], strict=True):
            assert actual.tolist() == right.tolist()
        for name in ("states", "losses"):
            assert_exact(torch.stack(history[name]), torch.stack(expected[name]))
        for name, grad in grads.items():
            first, last = bounds.get(name, (0, None))
            assert_exact(grad, expected_grads[name][first:last])


@pytest.mark.parametrize("state", GATES)
def test_ranks_with_their_own_balance_sum_at_the_update(workers, state):
    """The counts are then those of each rank; the states stay equal on all ranks."""
    (first, *_), (second, *_) = workers.run(2, train, state, 3, "not reentrant", "local")
    assert first["counts"][0].tolist() != second["counts"][0].tolist()
    assert_all_same_bits(first["states"], second["states"])
    right = train(None, 0, state, 3, "no")[0]
    total = first["counts"][0] + second["counts"][0]
    assert total.tolist() == right["counts"][0].tolist()
    assert_exact(first["states"][0], right["states"][0])


def all_tokens():
    draw = torch.Generator().manual_seed(3)
    return torch.randn(16, D, dtype=torch.float64, generator=draw)


def replicated(group, rank, state):
    """Trains two micro-batches under DistributedDataParallel, which broadcasts the buffers."""
    layer = make_layer(state)
    model = DistributedDataParallel(layer, process_group=group)
    for part in all_tokens().chunk(4)[rank::2]:
        y, aux = model(part)
        (y.sum() + aux.loss).backward()
    counts = layer.gate.tokens_since_update.clone()
    update_gates(model, group)
    return counts, getattr(layer.gate, state)


@pytest.mark.parametrize("state", GATES)
def test_replicas_of_the_whole_layer(workers, state):
    layer = make_layer(state)
    layer(all_tokens())
    right = layer.gate.tokens_since_update.clone()
    update_gates(layer)
    parts = workers.run(2, replicated, state)
    assert sum(counts for counts, _ in parts).tolist() == right.tolist()
    for _, value in parts:
        assert_same_bits(value, getattr(layer.gate, state))
