"""The collectives and the synchronizations of a step, for the table of a guide."""

import re
from pathlib import Path
from unittest.mock import patch

import fake_device
import pytest
import torch
from torch import nn
from workers import Workers

from moe_ext import (
    BalancedGate,
    Capacity,
    ExpertChoiceGate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    MoE,
    ReLUGate,
    SharedExpert,
    SwitchLoss,
    TopKGate,
    ZLoss,
)
from moe_ext.dispatch import Dispatcher
from moe_ext.distributed import ExpertParallel, clip_grad_norm_

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "first_run_on_gpus.md"
D, E, K = 16, 8, 2

GATES = {  # options of the layer, by the text of the table
    "`TopKGate`, adapting": lambda: {"gate": TopKGate(D, E, K, bias_update_rate=1e-3)},
    "`BalancedGate`": lambda: {"gate": BalancedGate(D, E, K), "w_load": 0},
    "`HierarchicalBalancedGate`": lambda: {
        "gate": HierarchicalBalancedGate(D, 4, 2, (2, 1)),
        "w_load": 0,
    },
    "`ExpertChoiceGate`": lambda: {"gate": ExpertChoiceGate(D, E, K), "w_load": 0},
    "`ReLUGate`": lambda: {"gate": ReLUGate(D, E, K), "w_load": 0},
}
TOKENS = {"exchange": "tokens"}
LAYERS = {  # the layer, its options and those of ExpertParallel
    "`NoisyTopKGate`": (MoE, dict, {}),
    "two chunks": (MoE, dict, {"num_chunks": 2}),
    '`exchange="tokens"`': (MoE, dict, TOKENS),
    '`exchange="tokens"`, two chunks': (MoE, dict, TOKENS | {"num_chunks": 2}),
    '`exchange="nodes"`': (MoE, dict, {"exchange": "nodes", "ranks_per_node": 2}),
    '`exchange="tokens"`, bfloat16 experts': (
        MoE,
        lambda: {"expert_dtype": torch.bfloat16},
        TOKENS,
    ),
    "`HierarchicalMoE`": (HierarchicalMoE, dict, {}),
    '`HierarchicalMoE`, `placement="experts"`': (HierarchicalMoE, dict, {"placement": "experts"}),
    '`balance="local"`': (MoE, dict, {"balance": "local"}),
    "a shared expert": (MoE, lambda: {"shared_expert": SharedExpert(D, [8])}, {}),
    "`SwitchLoss`, `ZLoss`": (MoE, lambda: {"losses": [SwitchLoss(0.01), ZLoss(1e-3)]}, {}),
    "modules as experts": (
        MoE,
        lambda: {"experts": [nn.Linear(D, D) for _ in range(E // 4)], "hidden_sizes": None},
        {},
    ),
    "capacity by position": (MoE, lambda: {"capacity": 1.0}, {}),
    "capacity by score": (MoE, lambda: {"capacity": Capacity(1.0, "score")}, {}),
    "identity and null experts": (
        MoE,
        lambda: {"num_identity_experts": 2, "num_null_experts": 1},
        {},
    ),
    **{text: (MoE, options, {}) for text, options in GATES.items()},
}


def step(layer, x):
    """Returns the collectives of forward and backward, and the synchronizations of both."""
    passes, waits = [], 0
    for function in ("forward", "backward"):
        with fake_device.counted() as counts:
            if function == "forward":
                y, aux = layer(x)
                loss = y.float().square().sum() + aux.loss
            else:
                loss.backward()
        waits += counts.pop("synchronization", 0)
        passes.append(", ".join(f"{number} {name}" for name, number in sorted(counts.items())))
    return [*passes, str(waits)]


def rows_of_all_layers(group, rank):
    rows = {}
    for text, (kind, options, parallel_options) in LAYERS.items():
        parallel = ExpertParallel(group, **parallel_options)
        sizes = (E, K) if kind is MoE else (4, 2, (2, 1))
        layer = kind(D, *sizes, parallel=parallel, **({"hidden_sizes": [8]} | options()))
        x = torch.randn(5 * rank, D)
        # The first call compares the options of all ranks, on the host.
        with fake_device.device(), patch.object(Dispatcher, "require_same"):
            layer = fake_device.moved(layer)
            for _ in range(2):  # the first step moves constants to the device
                layer.zero_grad()
                rows[text] = step(layer, fake_device.Far(x.clone()).requires_grad_())
            with fake_device.counted() as counts:
                clip_grad_norm_(layer, 1.0)
        assert counts == {"all-reduce": 1}, text
    return rows


@pytest.fixture
def own_workers():
    """Provides processes for one test: a device stays in a process."""
    processes = Workers()
    yield processes
    processes.close()


def test_the_table_of_the_guide(own_workers):
    """A new collective, or a new synchronization, must be in the table; all ranks have the same."""
    every = own_workers.run(4, rows_of_all_layers)
    assert all(rows == every[0] for rows in every)
    table = [f"| {text} | {' | '.join(row)} |" for text, row in every[0].items()]
    lines = [line for line in GUIDE.read_text().splitlines() if re.match(r"\|.*all-to-all", line)]
    assert lines == table, "the table should be\n" + "\n".join(table)
