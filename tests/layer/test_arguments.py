"""Errors of the modules for invalid arguments."""

import math
import re

import numpy
import pytest
import torch

from moe_ext import (
    BalancedGate,
    Experts,
    FeedForwardExperts,
    HierarchicalBalancedGate,
    ModuleExperts,
    MoE,
    MoELSTM,
    NoisyTopKGate,
    SharedExpert,
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
        (lambda: SwitchLoss(None), "^SwitchLoss: weight must be a finite number, got None$"),
        (lambda: SwitchLoss("0.1"), "^SwitchLoss: weight must be a finite number, got '0.1'$"),
        (lambda: layer(w_load=math.inf), "^MoE: w_load must be a finite number, got inf$"),
        (lambda: layer(w_load=torch.tensor(0.1)), "^MoE: w_load must be a finite number, got t"),
        (lambda: layer(capacity_factor="1"), "^MoE: capacity_factor must be a number .*got '1'$"),
        (
            lambda: layer(experts=[torch.nn.Linear(D, D)] * E),
            "^ModuleExperts: modules must be a different module .*got .*Linear",
        ),
        (
            lambda: layer(shared_expert=SharedExpert(D + 1, [4])),
            rf"^MoE: shared_expert.expert.d_model must be d_model = {D}, got {D + 1}$",
        ),
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
    "make, pattern",
    [
        (lambda: layer(recompute="no"), "^MoE: recompute must be True or False, got 'no'$"),
        (lambda: layer(bias="yes"), "^FeedForwardExperts: bias must be True or False, got 'yes'$"),
        (lambda: layer(expert_dtype="bfloat16"), "dtype must be a floating-point .*got 'bfloat16'"),
        (lambda: layer(expert_dtype=torch.int8), "dtype must be a floating-point .*got torch.int8"),
        (lambda: layer(generator=0), "^NoisyTopKGate: generator must be a torch.Generator .*int$"),
        (lambda: gate(detach_threshold=1), "^NoisyTopKGate: detach_threshold must be True or"),
        (lambda: TopKGate(D, E, K, logit_bias="no"), "^TopKGate: logit_bias must be .*'no'$"),
        (lambda: BalancedGate(D, E, K, detach_scores=0), "^BalancedGate: detach_scores .*got 0$"),
        (lambda: SharedExpert(D, [4], gated=1), "^SharedExpert: gated must be True or False"),
        (lambda: layer()([[0.0] * D]), "^MoE: x must be a tensor, got list$"),
        (lambda: layer()(torch.ones(1, D), [True]), "^MoE: mask must be a tensor, got list$"),
        (
            lambda: layer()(torch.ones(1, D), expert_index=[[0, 1]]),
            "^MoE: expert_index must be a tensor, got list$",
        ),
        (lambda: gate()(torch.ones(1, D, dtype=int)), "^NoisyTopKGate: x must have a floating"),
    ],
)
def test_argument_types(make, pattern):
    with pytest.raises(TypeError, match=pattern):
        make()


@pytest.mark.parametrize("make", [gate, lambda: TopKGate(D, E, K), lambda: BalancedGate(D, E, K)])
def test_the_tokens_of_a_gate(make):
    routes = make()
    for x in (torch.ones(2, D + 1), torch.ones(2, 2, D)):
        shape = re.escape(str(tuple(x.shape)))
        rule = rf"x must have shape \[T, d_model = {D}\], got {shape}$"
        with pytest.raises(ValueError, match=f"^{type(routes).__name__}: {rule}"):
            routes(x)


def test_attributes_that_change_between_steps():
    changed = layer(capacity_factor=1.0, losses=[SwitchLoss(0.1)], gate=TopKGate(D, E, K))
    x = torch.ones(3, D)
    for name, value in (("capacity_factor", 0), ("capacity_factor", math.nan), ("drop", "last")):
        changed.capacity_factor, changed.drop = 1.0, "position"
        changed(x)
        setattr(changed, name, value)
        with pytest.raises(ValueError, match=f"^MoE: {name} must .*got"):
            changed(x)
    with pytest.raises(ValueError, match="^SwitchLoss: weight must be at least 0, got -5$"):
        changed.losses[0].weight = -5


def test_the_declared_width_of_experts():
    class Narrow(Experts):
        def forward(self, x, offsets):
            return x[:, :2]

    rule = rf"return \[R, d_output = {D}\], got 2$"
    with pytest.raises(ValueError, match=f"^MoE: experts must {rule}"):
        layer(experts=Narrow(E, D))(torch.ones(3, D))


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
