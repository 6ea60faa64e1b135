"""Errors of the modules for invalid arguments."""

import math

import numpy
import pytest
import torch

from moe_ext import (
    BalancedGate,
    FeedForwardExperts,
    HierarchicalBalancedGate,
    ModuleExperts,
    MoE,
    MoELSTM,
    NoisyTopKGate,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
)
from moe_ext.distributed import ExpertParallel

E, K, D = 5, 2, 3


def gate(**changes):
    return NoisyTopKGate(**{**dict(d_model=D, num_experts=E, k=K), **changes})


def layer(**changes):
    return MoE(**{**dict(d_model=D, num_experts=E, k=K), **changes})


@pytest.mark.parametrize(
    "make, pattern",
    [
        (lambda: layer(k=0), r"k must .*got 0"),
        (lambda: layer(k=2.0), r"k must be a whole number .*got 2.0"),
        (lambda: layer(k=E + 1), r"k must .*5.*got .*6"),
        (lambda: layer(num_experts=4.0), "^MoE: num_experts must be a whole number, got 4.0$"),
        (
            lambda: layer(d_model=numpy.int64(D)),
            rf"^MoE: d_model must be a whole number, got .*{D}",
        ),
        (lambda: layer(d_model=True), "^MoE: d_model must be a whole number, got True$"),
        (lambda: FeedForwardExperts(1.5, D), r"num_experts must be a whole number, got 1\.5$"),
        (lambda: FeedForwardExperts(E, D, "ab"), r"hidden_sizes must be a seq.*, got 'ab'$"),
        (lambda: FeedForwardExperts(E, D, [8.0]), r"hidden_sizes must be a seq.*, got \[8\.0\]$"),
        (lambda: SoftmaxGate(8.5, E), "^SoftmaxGate: d_model must be a whole number, got 8.5$"),
        (lambda: gate(k=0), r"k must .*got 0"),
        (lambda: gate(k=E + 1), r"k must .*5.*got .*6"),
        (lambda: gate(num_experts=0), r"must .*got"),
        (lambda: gate(noise_epsilon=-1.0), r"noise_epsilon must .*got -1"),
        (lambda: BalancedGate(D, E, 0), rf"BalancedGate: k must .*{E}.*got 0"),
        (lambda: BalancedGate(D, E, E + 1), rf"BalancedGate: k must .*{E}.*got {E + 1}"),
        (lambda: BalancedGate(D, 0, 1), r"BalancedGate: num_experts must .*got 0"),
        (lambda: TopKGate(D, E, E + 1), rf"TopKGate: k must .*{E}.*got {E + 1}"),
        (
            lambda: HierarchicalBalancedGate(D, 3, 4, (4, 1)),
            r"HierarchicalBalancedGate: k must .*num_groups = 3.*got \(4, 1\)",
        ),
        (
            lambda: HierarchicalBalancedGate(D, 3, 0, 1),
            r"HierarchicalBalancedGate: experts_per_group must .*got 0",
        ),
        (lambda: SoftmaxGate(D, 0), r"num_experts must .*got 0"),
        (lambda: FeedForwardExperts(-1, D), r"num_experts.* must .*got -1"),
        (
            lambda: layer(hidden_sizes=8),
            "^FeedForwardExperts: hidden_sizes must be a sequence of whole numbers, .*, got 8$",
        ),
        (lambda: FeedForwardExperts(E, D, (0,)), r"hidden_sizes.* must .*got \(0,\)"),
        (
            lambda: FeedForwardExperts(E, D, (4,), activation="rely"),
            r"activation must .*got '?rely",
        ),
        (
            lambda: FeedForwardExperts(E, D, (4,), activation="clamped_swiglu"),
            r"activation_args must be limit, alpha and offset for clamped_swiglu, got \[\]",
        ),
        (
            lambda: FeedForwardExperts(E, D, (4,), activation_args=(7, 1, 0)),
            r"activation_args must be empty for relu, got \[7.0, 1.0, 0.0\]",
        ),
        (
            lambda: FeedForwardExperts(
                E, D, (4,), activation="clamped_swiglu", activation_args=(math.nan, 1, 0)
            ),
            r"activation_args must start with a limit above 0, got \[nan, 1.0, 0.0\]",
        ),
        (
            lambda: ExpertParallel(None, exchange="row"),
            "^ExpertParallel: exchange must be one of rows, tokens, got 'row'$",
        ),
        (lambda: ExpertParallel(None, num_chunks=0), "^ExpertParallel: num_chunks .*got 0$"),
        (lambda: ExpertParallel(None, balance="all"), "^ExpertParallel: balance .*got 'all'$"),
        (lambda: layer(activation="rely"), r"activation must .*got '?rely"),
        (lambda: ModuleExperts([]), r"modules must .*got"),
        (lambda: SwitchLoss(None), "^SwitchLoss: weight must be at least 0, got None$"),
        (lambda: gate(noise_epsilon=None), "NoisyTopKGate: noise_epsilon must .*, got None$"),
        (lambda: MoELSTM(D, D, E, K, w_load=None), "^MoELSTM: w_load must .*, got None$"),
        (
            lambda: layer(experts=[torch.nn.Identity()] * (E - 1)),
            r"num_experts must be 5.*got 4",
        ),
        (
            lambda: layer(gate=SoftmaxGate(D + 1, E), k=E),
            f"^MoE: gate.d_model must be {D}, got {D + 1}$",
        ),
        (
            lambda: layer(experts=FeedForwardExperts(E, D + 1)),
            f"^MoE: experts.d_model must be {D}, got {D + 1}$",
        ),
    ],
)
def test_constructor_values(make, pattern):
    with pytest.raises(ValueError, match=pattern):
        make()


@pytest.mark.parametrize(
    "options, name",
    [
        ({"gate": torch.nn.Linear(D, E)}, "gate"),
        ({"gate": SoftmaxGate}, "gate"),
        ({"experts": torch.nn.Linear(D, D)}, "experts"),
    ],
)
def test_modules_that_are_no_gate_and_no_experts(options, name):
    with pytest.raises(TypeError, match=f"^MoE: {name} must derive from moe_ext"):
        layer(**options)


@pytest.mark.parametrize("shape", [(4, D + 1), (4, D - 1), (D + 1,)])
def test_width_of_the_input(shape):
    with pytest.raises(ValueError, match=rf"x must .*{D}.*got .*{shape[-1]}"):
        layer()(torch.randn(shape))


def test_mask():
    x = torch.randn(2, 4, D)
    with pytest.raises(ValueError, match=r"mask must .*got .*2, 3"):
        layer()(x, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask must .*bool.*got .*float32"):
        layer()(x, torch.ones(2, 4))


@pytest.mark.parametrize(
    "options, name",
    [
        ({"gate": NoisyTopKGate(6, 5, 2), "noise_epsilon": 0.5}, "noise_epsilon"),
        ({"experts": [torch.nn.Identity()] * 5, "hidden_sizes": [9]}, "hidden_sizes"),
        ({"experts": [torch.nn.Identity()] * 5, "activation": "tanh"}, "activation"),
        ({"experts": [torch.nn.Identity()] * 5, "expert_dtype": torch.bfloat16}, "expert_dtype"),
    ],
)
def test_options_without_effect_are_refused(options, name):
    with pytest.raises(ValueError, match=f"MoE: .*{name}.* must be left out"):
        MoE(6, 5, 2, **options)
