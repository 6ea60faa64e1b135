"""Errors of the modules for invalid arguments."""

import math
import re

import numpy
import pytest
import torch
from torch.nn import Identity, Linear

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    Experts,
    FeedForwardExperts,
    Gate,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    ModuleExperts,
    MoE,
    MoELSTM,
    NoisyTopKGate,
    ReLUGate,
    RouterLoss,
    SharedExpert,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
    load_loss,
    presets,
    update_gates,
)
from moe_ext.distributed import ExpertParallel
from moe_ext.gates import AdaptiveGate

E, K, D, A, B = 5, 2, 3, 3, 4


def gate(**changes):
    return NoisyTopKGate(**{**dict(d_model=D, num_experts=E, k=K), **changes})


def layer(**changes):
    return MoE(**{**dict(d_model=D, num_experts=E, k=K), **changes})


def hierarchical(make, *sizes, **options):
    return lambda: make(D, *sizes, **options)


def experts(activation, *arguments):
    return FeedForwardExperts(E, D, (4,), activation=activation, activation_args=arguments)


class Wide(Experts):
    """Does not declare its output width."""

    def __init__(self, d_output=None):
        super().__init__(E, None if d_output is None else D, d_output)

    def forward(self, x, offsets):
        return x.repeat(1, 2)


class Narrow(Experts):
    def forward(self, x, offsets):
        return x[:, :2]


class OfTokens(Gate):
    def forward(self, x):
        raise AssertionError("never called")


class OfPairs(Gate):
    def forward(self, x, ranks=None):
        return x, x


x = torch.ones(3, D)
GIVEN = [Identity() for _ in range(E)]
LEVELS = [
    ((A, B, 0), "k must be between 1 and num_groups = 3 at the first level, got 0"),
    ((A, B, A + 1), "k must be between 1 and num_groups = 3 .*, got 4"),
    ((A, B, (2, B + 1)), r"k must .* experts_per_group = 4 at the second level, got \(2, 5\)"),
    ((A, B, (2, 0)), r"k must be between 1 and experts_per_group = 4 .*, got \(2, 0\)"),
    ((A, B, (2, 2, 2)), r"k must be a whole number or a pair of them, got \(2, 2, 2\)"),
    ((A, B, 1.5), "k must be a whole number or a pair of them, got 1.5"),
    ((0, B, 1), "num_groups must be at least 1, got 0"),
    ((A, 0, 1), "experts_per_group must be at least 1, got 0"),
]
VALUES = [
    # sizes and k
    (lambda: layer(k=0), "^MoE: k must .*got 0$"),
    (lambda: layer(k=2.0), "k must be a whole number .*got 2.0$"),
    (lambda: layer(k=E + 1), "k must .*5.*got .*6$"),
    (lambda: layer(num_experts=4.0), "^MoE: num_experts must be a whole number, got 4.0$"),
    (lambda: layer(d_model=numpy.int64(D)), f"^MoE: d_model must be a whole number, got .*{D}"),
    (lambda: layer(d_model=True), "^MoE: d_model must be a whole number, got True$"),
    (lambda: FeedForwardExperts(1.5, D), r"num_experts must be a whole number, got 1\.5$"),
    (lambda: FeedForwardExperts(-1, D), "num_experts.* must .*got -1"),
    (lambda: FeedForwardExperts(E, D, "ab"), "hidden_sizes must be a seq.*, got 'ab'$"),
    (lambda: FeedForwardExperts(E, D, [8.0]), r"hidden_sizes must be a seq.*, got \[8\.0\]$"),
    (lambda: FeedForwardExperts(E, D, (0,)), r"hidden_sizes.* must .*got \(0,\)"),
    (lambda: layer(hidden_sizes=8), "^FeedForwardExperts: hidden_sizes must be a seq.*, got 8$"),
    (lambda: SoftmaxGate(8.5, E), "^SoftmaxGate: d_model must be a whole number, got 8.5$"),
    (lambda: SoftmaxGate(D, 0), "num_experts must .*got 0"),
    (lambda: gate(k=0), "k must .*got 0"),
    (lambda: gate(k=E + 1), "k must .*5.*got .*6"),
    (lambda: gate(num_experts=0), "must .*got"),
    (lambda: BalancedGate(D, 0, 1), "BalancedGate: num_experts must .*got 0"),
    *(
        (lambda each=each, k=k: each(D, E, k), f"^{each.__name__}: k must .* {E}, got {k}$")
        for each in (TopKGate, BalancedGate, ExpertChoiceGate, ReLUGate)
        for k in (0, E + 1)
    ),
    *(
        (hierarchical(make, *sizes), f"^{make.__name__}: {pattern}")
        for make in (HierarchicalNoisyTopKGate, HierarchicalMoE)
        for sizes, pattern in LEVELS
    ),
    (
        hierarchical(HierarchicalBalancedGate, 3, 4, (4, 1)),
        r"HierarchicalBalancedGate: k must .*num_groups = 3.*got \(4, 1\)",
    ),
    (
        hierarchical(HierarchicalBalancedGate, 3, 0, 1),
        "HierarchicalBalancedGate: experts_per_group must .*got 0",
    ),
    (lambda: layer(gate=SoftmaxGate(D + 1, E), k=E), f"^MoE: gate.d_model must be {D}, got 4$"),
    (
        lambda: HierarchicalMoE(D, A, B, 2, gate=NoisyTopKGate(D, 5, 4)),
        "MoE: gate.num_experts must be 12, got 5",
    ),
    (
        lambda: layer(experts=FeedForwardExperts(E, D + 1)),
        f"^MoE: experts.d_model must be {D}, got {D + 1}$",
    ),
    (lambda: layer(experts=GIVEN[1:]), "num_experts must be 5.*got 4"),
    # activations
    (lambda: FeedForwardExperts(E, D, (4,), activation="rely"), "activation must .*got '?rely"),
    (lambda: layer(activation="rely"), "activation must .*got '?rely"),
    (
        lambda: experts("clamped_swiglu"),
        r"activation_args must be limit, alpha and offset for clamped_swiglu, got \[\]",
    ),
    (
        lambda: experts("relu", 7, 1, 0),
        r"activation_args must be empty for relu, got \[7.0, 1.0, 0.0\]",
    ),
    (
        lambda: experts("clamped_swiglu", math.nan, 1, 0),
        r"activation_args must start with a limit above 0, got \[nan, 1.0, 0.0\]",
    ),
    # numbers
    (lambda: gate(noise_epsilon=-1.0), "^NoisyTopKGate: noise_epsilon must .*got -1"),
    (lambda: gate(noise_epsilon=None), "NoisyTopKGate: noise_epsilon must .*, got None$"),
    (
        hierarchical(HierarchicalNoisyTopKGate, A, B, 2, noise_epsilon=-1),
        "noise_epsilon must be at least 0, got -1",
    ),
    (
        lambda: TopKGate(D, E, K, bias_update_rate=-1),
        "^TopKGate: bias_update_rate must .*got -1$",
    ),
    (lambda: TopKGate(D, E, K, num_groups=3), "topk_routing: num_groups must divide .*got 3"),
    (lambda: TopKGate(D, E, K, score="relu"), "topk_routing: score must be one of .*got 'relu'"),
    *(
        (lambda options=options: ReLUGate(D, E, K, **options), f"^ReLUGate: {pattern}$")
        for options, pattern in (
            ({"l1_weight": 0.0}, "l1_weight must be above 0, got 0.0"),
            ({"l1_weight": math.nan}, "l1_weight must .*, got nan"),
            ({"l1_weight": math.inf}, "l1_weight must .*, got inf"),
            ({"l1_growth": 0.9}, "l1_growth must be at least 1, got 0.9"),
            ({"l1_growth": math.inf}, "l1_growth must .*, got inf"),
        )
    ),
    (lambda: layer(w_load=math.inf), "^MoE: w_load must be a finite number, got inf$"),
    (lambda: layer(w_load=torch.tensor(0.1)), "^MoE: w_load must be a finite number, got t"),
    (lambda: MoELSTM(D, D, E, K, w_load=None), "^MoELSTM: w_load must .*, got None$"),
    (lambda: load_loss(torch.ones(2), -0.1), "^load_loss: weight must be at least 0, got -0.1$"),
    (lambda: SwitchLoss(None), "^SwitchLoss: weight must be a finite number, got None$"),
    (lambda: SwitchLoss("0.1"), "^SwitchLoss: weight must be a finite number, got '0.1'$"),
    (lambda: SwitchLoss(-1.0), "^SwitchLoss: weight must be at least 0, got -1.0$"),
    (
        lambda: presets.deepseek_v3(D, D, E, K, num_shared_experts=-1),
        "^deepseek_v3: num_shared_experts must be .*got -1$",
    ),
    # capacity
    (lambda: layer(capacity_factor="1"), "^MoE: capacity_factor must be a number .*got '1'$"),
    (lambda: layer(capacity_factor=0.0), "capacity_factor must be a number above 0, got 0.0$"),
    (lambda: layer(capacity_factor=math.nan), "capacity_factor must be a number .*, got nan$"),
    (lambda: layer(capacity_factor=1, drop="probs"), "drop must be one of .*, got 'probs'$"),
    (lambda: layer(drop="score"), "drop must be left out without capacity_factor, got 'score'$"),
    # zero-computation experts
    (lambda: layer(num_identity_experts=-1), "num_identity_experts must be at least 0, got -1$"),
    (lambda: layer(num_null_experts=1.0), "num_null_experts must be a whole number, got 1.0$"),
    (lambda: layer(gate=gate(), num_null_experts=1), "^MoE: gate.num_experts must be 6, got 5$"),
    (lambda: layer(k=E + 2, num_null_experts=1), "^MoE: k must be .* got 7$"),
    (
        lambda: layer(experts=Wide(4), num_identity_experts=1),
        f"^MoE: experts.d_output must be d_model = {D} with identity experts, got 4$",
    ),
    *(
        (
            lambda given=given: layer(experts=given, num_identity_experts=1)(x),
            rf"^MoE: experts must return \[T, d_model = {D}\] with .*, got \[3, {width}\]$",
        )
        for given, width in (([Linear(D, 4) for _ in range(E)], 4), (Wide(), 2 * D))
    ),
    *(
        (
            lambda name=name, value=value: MoE(
                D, 4, 1, gate=HierarchicalNoisyTopKGate(D, 2, 2, 1), **{name: value}
            ),
            f"^MoE: {name} must be left out with a hierarchical gate, got {value}$",
        )
        for name, value in (
            ("num_identity_experts", 1),
            ("num_null_experts", 1),
            ("capacity_factor", 1.5),
        )
    ),
    # losses
    (
        lambda: layer(losses=[ZLoss(1.0), ZLoss(2.0)]),
        r"^MoE: losses must have different names, got \['z_loss', 'z_loss'\]$",
    ),
    *(
        (
            lambda loss=loss: HierarchicalMoE(D, 2, 2, 1, losses=[loss])(x),
            f"^{name}: logits must be set by the gate, got None$",
        )
        for loss, name in ((ZLoss(1.0), "ZLoss"), (SwitchLoss(1.0), "Routing"))
    ),
    # other parts of the layer
    (lambda: ExpertParallel(None, exchange="row"), "exchange must be one of .*, got 'row'$"),
    (lambda: ExpertParallel(None, num_chunks=0), "^ExpertParallel: num_chunks .*got 0$"),
    (lambda: ExpertParallel(None, balance="all"), "^ExpertParallel: balance .*got 'all'$"),
    (lambda: ModuleExperts([]), "modules must .*got"),
    (
        lambda: layer(experts=[Linear(D, D)] * E),
        "^ModuleExperts: modules must be a different module .*got .*Linear",
    ),
    (
        lambda: layer(shared_expert=SharedExpert(D + 1, [4])),
        f"^MoE: shared_expert.expert.d_model must be d_model = {D}, got {D + 1}$",
    ),
    (
        lambda: layer(shared_expert=Linear(D, 1))(x),
        r"^MoE: shared_expert must return \[T, d_output = 3\], got \[3, 1\]$",
    ),
    (
        lambda: layer(experts=Narrow(E, D))(x),
        rf"^MoE: experts must return \[R, d_output = {D}\], got 2$",
    ),
    (
        lambda: MoE(D, 2, 2, experts=[Linear(D, 3), Linear(D, 4)])(x),
        r"ModuleExperts: experts must .*\(3,\), \(4,\)",
    ),
    (
        lambda: update_gates(TopKGate(D, E, K)),
        "update_gates: model must contain a gate that adapts.*, got 'TopKGate'",
    ),
    # options without effect
    (lambda: layer(gate=gate(), noise_epsilon=0.5), "noise_epsilon.* must be left out"),
    (
        lambda: HierarchicalMoE(D, A, B, (A, B), gate=SoftmaxGate(D, A * B), noise_epsilon=0.5),
        "must be left out when gate is given",
    ),
    *(
        (
            lambda option=option: layer(experts=GIVEN, **option),
            f"MoE: .*{[*option][0]}.* must be left",
        )
        for option in (
            {"hidden_sizes": [9]},
            {"activation": "tanh"},
            {"expert_dtype": torch.bfloat16},
        )
    ),
    # the tokens
    *(
        (lambda shape=shape: layer()(torch.randn(shape)), rf"x must .*{D}.*got .*{shape[-1]}")
        for shape in ((4, D + 1), (4, D - 1), (D + 1,))
    ),
    *(
        (
            lambda make=make, given=given: make()(given),
            rf"^{name}: x must have shape \[T, d_model = {D}\], "
            f"got {re.escape(str(tuple(given.shape)))}$",
        )
        for make, name in (
            (gate, "NoisyTopKGate"),
            (lambda: TopKGate(D, E, K), "TopKGate"),
            (lambda: BalancedGate(D, E, K), "BalancedGate"),
        )
        for given in (torch.ones(2, D + 1), torch.ones(2, 2, D))
    ),
    (
        lambda: layer()(torch.ones(2, 4, D), torch.ones(2, 3, dtype=torch.bool)),
        "mask must .*got .*2, 3",
    ),
]


@pytest.mark.parametrize("call, pattern", VALUES)
def test_values(call, pattern):
    with pytest.raises(ValueError, match=pattern):
        call()


@pytest.mark.parametrize(
    "call, pattern",
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
        (lambda: layer(shared_expert=3), "^MoE: shared_expert must be a module or None, got int$"),
        *(
            (lambda given=given: layer(losses=given), f"^MoE: losses must be a .*, got {name}$")
            for given, name in (
                ([0.1], "float"),
                ((loss for loss in [ZLoss(1.0)]), "generator"),
                (ZLoss(1.0), "ZLoss"),
            )
        ),
        *(
            (
                lambda option=option: layer(**option),
                f"^MoE: {[*option][0]} must derive from moe_ext",
            )
            for option in (
                {"gate": Linear(D, E)},
                {"gate": SoftmaxGate},
                {"experts": Linear(D, D)},
            )
        ),
        (
            lambda: layer(gate=OfTokens(D, E, K)),
            r"^MoE: gate must have forward\(x, ranks=None\), got \(x",
        ),
        (
            lambda: layer(gate=OfPairs(D, E, K))(x),
            "^MoE: gate must return a moe_ext.Routing, got tuple$",
        ),
        (lambda: layer(parallel="global"), "MoE: parallel must be an ExpertParallel, got str"),
        (lambda: layer(process_group="gloo"), "ExpertParallel: process_group must .*, got str"),
        (
            lambda: layer(process_group=ExpertParallel(None)),
            "process_group must .*, got ExpertParallel",
        ),
        (lambda: layer()([[0.0] * D]), "^MoE: x must be a tensor, got list$"),
        (lambda: layer()(x, [True]), "^MoE: mask must be a tensor, got list$"),
        (lambda: layer()(x, torch.ones(3)), "mask must .*bool.*got .*float32"),
        (
            lambda: layer()(x, expert_index=[[0, 1]]),
            "^MoE: expert_index must be a tensor, got list$",
        ),
        (lambda: gate()(x.long()), "^NoisyTopKGate: x must have a floating"),
        *(
            (
                lambda dtype=dtype: layer(expert_dtype=dtype)(x.long()),
                "^MoE: x must have a floating-point dtype, got torch.int64$",
            )
            for dtype in (None, torch.float32)
        ),
        (lambda: layer()(x.bfloat16()), "^experts: x must .*float32.*got .*[Bb][Ff]loat16"),
    ],
)
def test_types(call, pattern):
    with pytest.raises(TypeError, match=pattern):
        call()


@pytest.mark.parametrize(
    "call, pattern",
    [
        (lambda: Gate(D, E, K)(x), "^Gate must define forward"),
        (lambda: Experts(E, D)(x, torch.arange(E + 1)), "^Experts must define forward"),
        (lambda: RouterLoss(1.0).value(), "^RouterLoss must define value$"),
        (lambda: AdaptiveGate(D, E, K, num_counts=1).update(x), "AdaptiveGate must define update"),
    ],
)
def test_what_a_derived_class_must_define(call, pattern):
    with pytest.raises(NotImplementedError, match=pattern):
        call()


def test_attributes_that_change_between_steps():
    changed = layer(capacity_factor=1.0, losses=[SwitchLoss(0.1)], gate=TopKGate(D, E, K))
    for name, value in (("capacity_factor", 0), ("capacity_factor", math.nan), ("drop", "last")):
        changed.capacity_factor, changed.drop = 1.0, "position"
        changed(x)
        setattr(changed, name, value)
        with pytest.raises(ValueError, match=f"^MoE: {name} must .*got"):
            changed(x)
    with pytest.raises(ValueError, match="^SwitchLoss: weight must be at least 0, got -5$"):
        changed.losses[0].weight = -5


def test_widths_that_are_accepted():
    assert layer(experts=Wide(4), num_null_experts=1).experts.d_output == 4
    assert layer(parallel=ExpertParallel(None, num_chunks=2)).sharding.exchange is None
