"""Experts on the ranks of several nodes: each token is sent once to each node."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from one_process import (
    COUNTS,
    D,
    assert_equals_one_process,
    call,
    draw_parameters,
    sharing,
    tokens_of,
)
from workers import TIMEOUT, on_ranks

from moe_ext import Experts, HierarchicalMoE, MoE, TopKGate
from moe_ext.distributed import ExpertParallel, NodeExchange

NODES = {"exchange": "nodes", "ranks_per_node": 2}


def layer_of(options, process_group=None, **shared):
    torch.manual_seed(1)
    given = {"num_experts": 7, "k": 3, "hidden_sizes": (5,)} | options
    layer = MoE(D, **sharing(process_group, given | shared))
    return draw_parameters(layer, but="experts.")


@pytest.mark.guarantee("Sharding does not change the result")
@pytest.mark.parametrize(
    "options",
    [
        {},  # 2, 2, 2 and 1 experts: 4 and 3 on a node
        {"num_experts": 3, "k": 1},  # a rank without experts
        {"num_experts": 2, "k": 2},  # a node without experts
        {"num_experts": 8, "capacity": 0.6},  # tokens with different numbers of experts
    ],
)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_equals_one_process(workers, options, num_chunks):
    make, x = partial(layer_of, options), tokens_of(COUNTS["4"])
    assert_equals_one_process(workers, "4", make, call, x, num_chunks=num_chunks, **NODES)


def sent_between_nodes(call, rank):
    """Returns the bytes of rows that this rank sends to ranks of the other node during a call."""
    total, all_to_all_single = 0, dist.all_to_all_single

    def note(output, rows, received, counts, group, **options):
        nonlocal total
        if rows.dim() == 2 and rows.shape[1] == D:
            for number, target in zip(counts, dist.get_process_group_ranks(group), strict=True):
                total += number * rows[:1].nbytes if target // 2 != rank // 2 else 0
        return all_to_all_single(output, rows, received, counts, group=group, **options)

    with patch.object(dist, "all_to_all_single", note):
        call()
    return total


def sum_of(values):
    """Sums values over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


@on_ranks(4)
def test_each_token_is_sent_once_to_each_node(group, rank):
    """Counts the bytes of rows between the nodes, there and back."""
    x = torch.randn(40, D, generator=torch.Generator().manual_seed(rank))
    sent, results = {}, {}
    for options in ({"exchange": "rows"}, {"exchange": "tokens"}, NODES):
        torch.manual_seed(1)
        parallel = ExpertParallel(group, **options)
        layer = MoE(D, 8, 4, hidden_sizes=(5,), gate=TopKGate(D, 8, 4), parallel=parallel)
        inputs, outputs = x.clone().requires_grad_(), []

        def forward(layer=layer, inputs=inputs, outputs=outputs):
            outputs += layer(inputs)

        def backward(outputs=outputs):
            outputs[0].sum().backward()

        bytes_of_row = 2 * D * x.element_size()
        rows_sent = [sent_between_nodes(run, rank) / bytes_of_row for run in (forward, backward)]
        sent[options["exchange"]] = sum_of(rows_sent)
        results[options["exchange"]] = outputs[0], inputs.grad
    owners = [[e // 2 for e in experts] for experts in outputs[1].expert_index.tolist()]
    elsewhere = [[owner for owner in experts if owner // 2 != rank // 2] for experts in owners]
    rows = sum(map(len, elsewhere))
    pairs = sum(len({*ranks}) for ranks in elsewhere)
    nodes = sum(len({owner // 2 for owner in ranks}) for ranks in elsewhere)
    for exchange, expected in (("rows", rows), ("tokens", pairs), ("nodes", nodes)):
        assert sent[exchange] == sum_of([expected] * 2)
    for exchange in ("tokens", "nodes"):
        torch.testing.assert_close(results[exchange], results["rows"])


class IdleExperts(Experts):
    """Its output has no gradient if there are no rows."""

    def __init__(self):
        super().__init__(1, D)
        self.linear = torch.nn.Linear(D, D)

    def forward(self, x, offsets):
        return self.linear(x) if len(x) else x.new_zeros(0, D)


@on_ranks(4)
def test_ranks_without_tokens_run_backward(group, rank):
    """Also if only the gate needs a gradient, and the gates stay on the rank of the token."""
    gate = TopKGate(D, 4, 1, renormalize=False, logit_bias=True)
    gate.b_gate.data[0] = 100
    experts = IdleExperts()
    layer = MoE(D, 4, 1, gate=gate, experts=experts, parallel=ExpertParallel(group, **NODES))
    layer(torch.randn(6, D))[0].sum().backward()
    assert (experts.linear.weight.grad is not None) == (rank == 0)


@on_ranks(4)
def test_layers_share_the_groups_of_nodes(group, rank):
    """The groups have the timeout of the ranks."""
    parallel = ExpertParallel(group, **NODES)
    first, second = (MoE(D, 4, 2, parallel=parallel).sharding.exchange for _ in range(2))
    assert isinstance(first, NodeExchange)
    assert first.between.ranks.group is second.between.ranks.group
    assert dist.get_process_group_ranks(first.between.ranks.group) == [rank % 2, rank % 2 + 2]
    assert dist.get_process_group_ranks(first.within.ranks.group) == [
        rank // 2 * 2,
        rank // 2 * 2 + 1,
    ]
    for exchange in (first.between, first.within):
        backend = exchange.ranks.group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == TIMEOUT


@on_ranks(4)
def test_options(group, rank):
    with pytest.raises(ValueError, match="^ExpertParallel: ranks_per_node must be None without"):
        ExpertParallel(group, ranks_per_node=2)
    with pytest.raises(ValueError, match="^ExpertParallel: ranks_per_node must be given without"):
        ExpertParallel(group, exchange="nodes")
    with patch.dict("os.environ", LOCAL_WORLD_SIZE="2"):
        assert ExpertParallel(group, exchange="nodes").ranks_per_node == 2
    with pytest.raises(ValueError, match="^NodeExchange: ranks_per_node must divide .*4, got 3"):
        MoE(D, 4, 2, parallel=ExpertParallel(group, exchange="nodes", ranks_per_node=3))
    with pytest.raises(ValueError, match='placement must be "experts" with exchange="nodes"'):
        HierarchicalMoE(D, 2, 2, 1, parallel=ExpertParallel(group, **NODES))
    for number in (1, 4):  # every rank is a node, or all are one node: nothing is sent twice
        parallel = ExpertParallel(group, exchange="nodes", ranks_per_node=number)
        assert not isinstance(MoE(D, 4, 2, parallel=parallel).sharding.exchange, NodeExchange)
