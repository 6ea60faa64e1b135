"""Errors of the modules for invalid arguments. The tables have a call and the error's pattern."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch
from torch.nn import Identity, Linear
from torch.nn.utils.rnn import pack_sequence

import moe_ext
from moe_ext import (
    Experts,
    Gate,
    HierarchicalMoE,
    MoE,
    MoELSTM,
    NoisyTopKGate,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
    presets,
)
from moe_ext.checks import required
from moe_ext.distributed import ExpertParallel
from moe_ext.gates import AdaptiveGate

E, K, D, A, B, U = 5, 2, 3, 3, 4, 6


def layer(**changes):
    return MoE(**dict(d_model=D, num_experts=E, k=K) | changes)


def gate(**changes):
    return NoisyTopKGate(**dict(d_model=D, num_experts=E, k=K) | changes)


def replay(*expert_index):
    return layer()(torch.ones(3, D), expert_index=torch.tensor(expert_index))


def lstm(**changes):
    return MoELSTM(**dict(d_input=D, d_hidden=U, num_experts=E, k=K) | changes)


class Wide(Experts):
    """Does not declare its output width."""

    def __init__(self, d_output=None):
        super().__init__(E, None if d_output is None else D, d_output)

    def forward(self, x, offsets):
        return x.repeat(1, 2)


class Narrow(Experts):
    def forward(self, x, offsets):
        return x[:, :2]


class RowSum(Identity):
    def forward(self, x):
        return x.sum(0, keepdim=True)


class RowGate(Gate):
    def forward(self, x):
        raise AssertionError("never called")


class PairGate(Gate):
    def forward(self, x, ranks=None):
        return x, x


class Ragged(SoftmaxGate):
    """Returns the number of slots of each token."""

    def forward(self, x, ranks=None):
        routing = super().forward(x, ranks)
        return routing._replace(
            gates=routing.gates.flatten(),
            expert_index=routing.expert_index.flatten(),
            token_offsets=torch.arange(0, E * len(x) + 1, E),
        )


class Dropping(SoftmaxGate):
    def forward(self, x, ranks=None):
        routing = super().forward(x, ranks)
        return routing._replace(kept=torch.zeros_like(routing.expert_index, dtype=torch.bool))


x, steps = torch.ones(3, D), torch.ones(2, 4, D)
NAMES = vars(moe_ext) | dict(globals(), AdaptiveGate=AdaptiveGate, Linear=Linear, math=math)
nested = torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)
NAMES |= dict(nested=nested, pack_sequence=pack_sequence, moe_ext=moe_ext)
NAMES |= dict(numpy=numpy, given=[Identity() for _ in range(E)], presets=presets)

SIZES = {
    "layer(k=0)": "^MoE: k must .*got 0$",
    "layer(k=E + 1)": "k must .*5.*got .*6$",
    "layer(num_experts=4.0)": "^MoE: num_experts must be a whole number, got 4.0$",
    "layer(d_model=numpy.float64(D))": f"^MoE: d_model must be a whole number, got .*{D}",
    "layer(k=torch.tensor(K))": "^MoE: k must be a whole number .*, got tensor",
    "layer(num_experts=numpy.True_)": "^MoE: num_experts must be a whole number, got .*True_?$",
    "layer(d_model=True)": "^MoE: d_model must be a whole number, got True$",
    "FeedForwardExperts(1.5, D)": r"num_experts must be a whole number, got 1\.5$",
    "FeedForwardExperts(E, D, [8.0])": r"hidden_sizes must be a seq.*, got \[8\.0\]$",
    "FeedForwardExperts(E, D, (0,))": r"hidden_sizes.* must .*got \(0,\)",
    "SoftmaxGate(8.5, E)": "^SoftmaxGate: d_model must be a whole number, got 8.5$",
    "gate(k=0)": "^NoisyTopKGate: k must .*got 0",
    "gate(k=E + 1)": "^NoisyTopKGate: k must .*5.*got .*6",
    "TopKGate(D, E, E + 1)": f"^TopKGate: k must .* {E}, got 6$",
    "ReLUGate(D, E, E + 1)": f"^ReLUGate: k must .* {E}, got 6$",
    "ExpertChoiceGate(D, E, E + 1)": f"^ExpertChoiceGate: k must .* {E}, got 6$",
    "BalancedGate(D, E, E + 1)": f"^BalancedGate: k must .* {E}, got 6$",
    "BalancedGate(D, E, 0)": f"^BalancedGate: k must .* {E}, got 0$",
    "HierarchicalBalancedGate(D, 3, 4, (4, 1))": r"k must .*num_groups = 3.*got \(4, 1\)",
    "layer(gate=SoftmaxGate(D + 1, E), k=E)": f"^MoE: gate.d_model must be {D}, got 4$",
    "HierarchicalMoE(D, A, B, 2, gate=gate(k=4))": "MoE: gate.num_experts must be 12, got 5",
    "layer(experts=FeedForwardExperts(E, 4))": f"^MoE: experts.d_model must be {D}, got 4$",
    "layer(experts=given[1:])": "num_experts must be 5.*got 4",
}
LEVELS = {
    "(D, A, B, A + 1)": "k must be between 1 and num_groups = 3 .*, got 4",
    "(D, A, B, (2, B + 1))": r"k must .* experts_per_group = 4 at the second level, got \(2, 5\)",
    "(D, A, B, (2, 2, 2))": r"k must be a whole number or a pair of them, got \(2, 2, 2\)",
    "(D, 0, B, 1)": "num_groups must be at least 1, got 0",
    "(D, A, 0, 1)": "experts_per_group must be at least 1, got 0",
}
SIZES |= {
    f"{name}{sizes}": f"^{name}: {pattern}"
    for name in ("HierarchicalNoisyTopKGate", "HierarchicalMoE")
    for sizes, pattern in LEVELS.items()
}
OPTIONS = {
    "layer(activation='rely')": "activation must .*got '?rely",
    "layer(activation='clamped_swiglu')": "must be limit, alpha and offset for clamped.*, got ..$",
    "layer(activation_args=(7, 1, 0))": r"must be empty for relu, got \[7, 1, 0\]",
    "layer(activation='clamped_swiglu', activation_args=(math.nan, 1, 0))": (
        r"^FeedForwardExperts: activation_args: limit must be a finite number, got nan$"
    ),
    "gate(noise_epsilon=-1.0)": "^NoisyTopKGate: noise_epsilon must .*got -1",
    "gate(noise_epsilon=None)": "^NoisyTopKGate: noise_epsilon must .*, got None$",
    "HierarchicalNoisyTopKGate(D, A, B, 2, noise_epsilon=-1)": "noise_epsilon must .*, got -1",
    "TopKGate(D, E, K, bias_update_rate=-1)": "^TopKGate: bias_update_rate must .*got -1$",
    "TopKGate(D, E, K, num_groups=3)": "^topk_routing: num_groups must divide .*got 3",
    "TopKGate(D, E, K, score='relu')": "^topk_routing: score must be one of .*got 'relu'",
    "ReLUGate(D, E, K, l1_weight=0.0)": "^ReLUGate: l1_weight must be a number above 0, got 0.0$",
    "ReLUGate(D, E, K, l1_weight=math.nan)": "^ReLUGate: l1_weight must .*, got nan$",
    "ReLUGate(D, E, K, l1_weight=math.inf)": "^ReLUGate: l1_weight must .*, got inf$",
    "ReLUGate(D, E, K, l1_weight=1e-50)": "^ReLUGate: l1_weight must .* of float32 .*, got 1e-50$",
    "ReLUGate(D, E, K, l1_weight=1e-40)": "^ReLUGate: l1_weight must .* of float32 .*, got 1e-40$",
    "ReLUGate(D, E, K, l1_weight=1e39)": "^ReLUGate: l1_weight must .* of float32 .*, got 1e.39$",
    "ReLUGate(D, E, K, l1_weight=True)": "^ReLUGate: l1_weight must be a finite .*, got True$",
    "TopKGate(D, E, K, bias_update_rate=1e39)": "bias_update_rate must .* float32 .*, got 1e.39$",
    "TopKGate(D, E, K, bias_update_rate=1e-50)": "bias_update_rate must .* float32 .*, got 1e-50$",
    "TopKGate(D, E, K, scale=math.nan)": "^TopKGate: scale must be a finite number, got nan$",
    "layer(w_load=1e39)": "^MoE: w_load must be 0 or a number of float32 .*, got 1e.39$",
    "layer(w_load=numpy.True_)": "^MoE: w_load must be a finite number, got .*True_?$",
    "SwitchLoss(1e-50)": "^SwitchLoss: weight must be 0 or a number of float32 .*, got 1e-50$",
    "ZLoss(1e39)": "^ZLoss: weight must be 0 or a number of float32 .*, got 1e.39$",
    "ReLUGate(D, E, K, l1_growth=0.9)": "^ReLUGate: l1_growth must be at least 1, got 0.9$",
    "layer(w_load=math.inf)": "^MoE: w_load must be a finite number, got inf$",
    "layer(w_load=torch.tensor(0.1))": "^MoE: w_load must be a finite number, got t",
    "load_loss(torch.ones(2), -0.1)": "^load_loss: weight must be at least 0, got -0.1$",
    "importance_loss(torch.ones(2), -0.1)": "^importance_loss: weight must .*, got -0.1$",
    "SwitchLoss(None)": "^SwitchLoss: weight must be a finite number, got None$",
    "SwitchLoss(-1.0)": "^SwitchLoss: weight must be at least 0, got -1.0$",
    "layer(losses=[ZLoss(1.0), ZLoss(2.0)])": r"losses must have .*\['z_loss', 'z_loss'\]$",
    "HierarchicalMoE(D, 2, 2, 1, losses=[ZLoss(1.0)])(x)": "^ZLoss: logits must .*, got None$",
    "HierarchicalMoE(D, 2, 2, 1, losses=[SwitchLoss(1.0)])(x)": "^Routing: logits must .* None$",
    "presets.deepseek_v3(D, D, E, K, num_shared_experts=-1)": "num_shared_experts must .*got -1$",
    "layer(capacity='1')": "^Capacity: factor must be a finite number, got '1'$",
    "layer(capacity=0.0)": "factor must be a number above 0, got 0.0$",
    "layer(capacity=math.nan)": "factor must be a finite number, got nan$",
    "Capacity(1, 'probs')": "Capacity: drop must be one of position, score, got 'probs'$",
    "layer(drop='score')": "drop must be left out without capacity_factor, got 'score'$",
    "layer(num_identity_experts=-1)": "^MoE: num_identity_experts must be at least 0, got -1$",
    "layer(gate=gate(), num_null_experts=1)": "^MoE: gate.num_experts must be 6, got 5$",
    "layer(k=E + 2, num_null_experts=1)": "^MoE: k must .* got 7$",
    "layer(experts=Wide(4), num_identity_experts=1)": "experts.d_output must be .* = 3 .*, got 4$",
    "layer(experts=Wide(), num_identity_experts=1)(x)": r"return \[T, d_model = 3\] .* \[3, 6\]$",
    "layer(experts=[Linear(D, 4) for _ in range(5)], num_identity_experts=1)(x)": (
        r"^MoE: experts must return \[T, d_model = 3\] with .*, got \[3, 4\]$"
    ),
    "ExpertParallel(None, exchange='row')": "must be one of rows, tokens, nodes, got 'row'$",
    "ExpertParallel(None, balance='all')": "^ExpertParallel: balance .*got 'all'$",
    "ModuleExperts([])": "modules must .*got",
    "layer(experts=[Linear(D, D)] * E)": "modules must have no module twice .*got .*Linear",
    "layer(shared_expert=SharedExpert(4, [4]))": "shared_expert.expert.d_model must be .*, got 4$",
    "layer(shared_expert=Linear(D, 1))(x)": r"shared_expert must return \[T, .* 3\], got \[3, 1\]$",
    "layer(experts=Narrow(E, D))(x)": r"experts must return \[R, d_output = 3\], got 2$",
    "MoE(D, 2, 2, experts=[Linear(D, 3), Linear(D, 4)])(x)": r"experts must .*\(3,\), \(4,\)",
    "ModuleExperts([Linear(D, D)])(x, torch.arange(3))": r"^Mod.*: offsets .* \(2,\), got \(3,\)$",
    "update_gates(TopKGate(D, E, K))": "^update_gates: model must contain .*, got 'TopKGate'",
    "layer(gate=gate(), noise_epsilon=0.5)": "noise_epsilon.* must be left out",
    "layer(gate=gate(noise_epsilon=0.5), noise_epsilon=1e-2)": "noise_epsilon.* must be left out",
    "HierarchicalMoE(D, A, B, (A, B), gate=SoftmaxGate(D, A * B), noise_epsilon=0.5)": (
        "must be left out when gate is given"
    ),
    "layer(experts=given, hidden_sizes=[9])": "hidden_sizes.* must be left out",
}
OPTIONS |= {
    f"MoE(D, 4, 1, gate=HierarchicalNoisyTopKGate(D, 2, 2, 1), {name}={value})": (
        f"^MoE: {name} must be left out with a hierarchical gate, got {value}$"
    )
    for name, value in {
        "num_identity_experts": 1,
        "num_null_experts": 1,
        "capacity": 1.5,
    }.items()
}
OPTIONS |= {
    f"layer(activation='clamped_swiglu', activation_args={args})": (
        rf"^FeedForwardExperts: activation_args: {name} must .*, got {value}$"
    )
    for args, name, value in (
        ("(1e-50, 1, 1)", "limit", "1e-50"),
        ("(0, 1, 1)", "limit", "0"),
        ("(1, math.nan, 1)", "alpha", "nan"),
        ("(1, 1e39, 1)", "alpha", r"1e\+39"),
        ("(1, 1, 1e39)", "offset", r"1e\+39"),
    )
}
CALLS = {
    "layer()(torch.ones(4, D + 1))": "x must .*3.*got .*4",
    "layer()(steps, torch.ones(2, 3).bool())": "mask must .*got .*2, 3",
    "replay([0], [0], [0])": r"^MoE: expert_index must have shape \[..., k = 2\] .*, got \(3, 1\)$",
    "replay(*[[0, 1]] * 4)": r"^MoE: expert_index must .* each token of x, got \(4, 2\)$",
    "layer()(x, expert_index=torch.tensor(1))": r"expert_index must have shape .*, got \(\)$",
    "replay([0, 1], [0, 1], [0, E])": "expert_index must be .*below gate.num_experts = 5, got 5$",
    "replay([0, 1], [0, 1], [3, 3])": r"expert_index must have different .*, got \[3, 3\]$",
    "batchwise_loss(x, torch.ones(1, D), x > 0)": r"threshold must have shape \(3,\), got \(1, 3\)",
    "batchwise_loss(x, torch.ones(D), x[0] > 0)": r"mask must have shape \(3, 3\), got \(3,\)",
    "batchwise_loss(x[0], x[0], x[0] > 0)": r"scores must have .*num_tokens, E\], got \(3,\)$",
    "load_loss(x, 0.1)": r"^load_loss: load must have shape \[E\] .*, got \(3, 3\)$",
    "importance_loss(x[:0, 0], 0.1)": r"^importance_loss: importance must .*, got \(0,\)$",
    "gate()(x, expert_index=x[:, :1].long())": r"expert_index must have .*\[3, 2\], got \[3, 1\]$",
    "gate()(x, expert_index=x[:, :2].long())": "expert_index must have different experts for",
    "layer(shared_expert=RowSum())(x)": r"^MoE: shared_expert must return .*, got \[1, 3\]$",
    "lstm(memory_slots=0)": "^MoELSTM: memory_slots must be at least 1, got 0",
    "lstm(dropout=1.0)": r"^MoELSTMCell: dropout must be in \[0, 1\), got 1.0",
    "lstm(w_load=None)": "^MoELSTM: w_load must .*, got None$",
    "lstm(gate=SoftmaxGate(D + U, E + 1))": "^MoE: gate.num_experts must be 5, got 6",
    "lstm(d_hidden=0)": "^MoELSTMCell: d_hidden must be at least 1, got 0",
    "lstm()(steps[..., :1])": r"x must have shape \[B, S, d_input = 3\].*, got",
    "lstm()(steps, (x, x))": r"state must be two tensors of shape \(2, 6\), got",
    "lstm()(steps, mask=torch.ones(4, 2).bool())": r"mask must have shape \(2, 4\), got \(4, 2\)",
    "lstm().cell(steps)": r"^MoELSTMCell: x must have shape \[B, d_input = 3\], got",
    "lstm().cell(x, (x, x))": "^MoELSTMCell: state must be two tensors of shape",
    "lstm(k=E, gate=Ragged(D + U, E))(steps)": "^MoELSTM: gate must select the same number of",
    "lstm(k=E, gate=Dropping(D + U, E))(steps)": "gate must .*, and drop none, got Dropping",
}
CALLS |= {
    f"{call}(torch.ones{shape})": rf"^{name}: x must have shape \[T, d_model = 3\], got "
    for name, call in {
        "NoisyTopKGate": "gate()",
        "TopKGate": "TopKGate(D, E, K)",
        "BalancedGate": "BalancedGate(D, E, K)",
        "SharedExpert": "SharedExpert(D, [4])",
    }.items()
    for shape in ((2, 4), (2, 2, 3))
}


@pytest.mark.parametrize("call, pattern", [*(SIZES | OPTIONS | CALLS).items()])
def test_values(call, pattern):
    with pytest.raises(ValueError, match=pattern):
        eval(call, NAMES)


TYPES = {
    "lstm(gather_experts='x')": "^MoELSTM: gather_experts must be True or False, got 'x'$",
    "layer(recompute='no')": "^MoE: recompute must be True or False, got 'no'$",
    "layer(bias='yes')": "^FeedForwardExperts: bias must be True or False, got 'yes'$",
    "layer(expert_dtype=torch.int8)": "dtype must be a floating-point .*got torch.int8",
    "layer(generator=0)": "^NoisyTopKGate: generator must be a torch.Generator .*int$",
    "gate(detach_threshold=1)": "^NoisyTopKGate: detach_threshold must be True or",
    "TopKGate(D, E, K, logit_bias='no')": "^TopKGate: logit_bias must be .*'no'$",
    "layer(shared_expert=3)": "^MoE: shared_expert must be a module or None, got int$",
    "layer(losses=[0.1])": "losses must be a sequence of moe_ext.RouterLoss, got float$",
    "layer(losses=(loss for loss in [ZLoss(1.0)]))": "losses must be a .*, got generator$",
    "layer(gate=Linear(D, E))": "^MoE: gate must derive from moe_ext",
    "layer(gate=RowGate(D, E, K))(x)": r"RowGate.forward\(\) takes 2 positional .* 3 were given",
    "layer(gate=PairGate(D, E, K))(x)": "^MoE: gate must return a moe_ext.Routing, got tuple$",
    "layer(experts=Linear(D, D))": "^MoE: experts must derive from moe_ext",
    "layer(parallel='global')": "MoE: parallel must be an ExpertParallel, got str",
    "layer(process_group='gloo')": "ExpertParallel: process_group must .*, got str",
    "layer()([[0.0] * D])": "^MoE: x must be a tensor, got list$",
    "layer()(x, [True])": "^MoE: mask must be a tensor, got list$",
    "layer()(x, torch.ones(3))": "mask must .*bool.*got .*float32",
    "layer()(x, expert_index=[[0, 1]])": "^MoE: expert_index must be a tensor, got list$",
    "replay([0.0], [0.0], [0.0])": "^MoE: expert_index must have dtype int64 or .*torch.float32$",
    "lstm()(None)": "^MoELSTM: x must be a tensor, got NoneType$",
    "lstm()(numpy.ones((2, 4, D)))": "^MoELSTM: x must be a tensor, got ndarray$",
    "lstm()(pack_sequence([x]))": "^MoELSTM: x must be a tensor, got PackedSequence: use .* mask$",
    "lstm()(nested)": "^MoELSTM: x must be a padded tensor, not a nested one .*, got torch.jagged",
    "lstm()(steps, (None, None))": "^MoELSTM: state: h must be a tensor, got NoneType$",
    "lstm()(steps, steps)": r"^MoELSTM: state must be a pair \(h, c\), got Tensor$",
    "lstm()(steps, mask=[True])": "^MoELSTM: mask must be a tensor, got list$",
    "lstm().cell(None)": "^MoELSTMCell: x must be a tensor, got NoneType$",
    "layer()(pack_sequence([x]))": "^MoE: x must be a tensor, got PackedSequence: use .* mask$",
    "SharedExpert(D, [4])(None)": "^SharedExpert: x must be a tensor, got NoneType$",
    "SharedExpert(D, [4])(nested)": "^SharedExpert: x must be a padded tensor",
    "FeedForwardExperts(E, D)(numpy.ones((3, D)), None)": "^FeedForwardExperts: x must .* ndarray$",
    "FeedForwardExperts(E, D)(x, [3])": "^FeedForwardExperts: offsets must be a tensor, got list$",
    "ModuleExperts(given)(None, None)": "^ModuleExperts: x must be a tensor, got NoneType$",
    "gate()(nested)": "^NoisyTopKGate: x must be a padded tensor",
    "ReLUGate(D, E, K)(None)": "^ReLUGate: x must be a tensor, got NoneType$",
    "HierarchicalNoisyTopKGate(D, A, B, 2)(None)": "^Hier.*Gate: x must be a tensor, got NoneType",
    "importance_loss([1.0], 0.1)": "^importance_loss: importance must be a tensor, got list$",
    "load_loss(None, 0.1)": "^load_loss: load must be a tensor, got NoneType$",
    "batchwise_loss(x, None, x > 0)": "^batchwise_loss: threshold must be a tensor, got NoneType$",
    "batchwise_loss(x, torch.ones(D), x)": "^batchwise_loss: mask must .*, got torch.float32$",
    "load_loss(x[0].long(), 0.1)": "^load_loss: load must have a floating-point dtype, got torch",
    "moe_ext.recurrent.unroll(None, [], [None], [])": "^unroll: inputs must .*, got None",
    "gate()(x.long())": "^NoisyTopKGate: x must have a floating",
    "layer()(x.long())": "^MoE: x must have a floating-point dtype, got torch.int64$",
    "layer(expert_dtype=torch.float32)(x.long())": "^MoE: x must have a floating-point dtype",
    "layer()(x.bfloat16())": "^experts: x must .*.*bfloat16; use torch.autoc.*expert_dtype",
    "SharedExpert(D, [4])(x.half())": "^experts: x must .*float32, got float16; use torch.autocast",
    "layer(top_k=2)": "^MoE: k and top_k are the same argument, got both$",
    "layer(topk=2)": "^MoE: there is no argument topk, did you mean k",
    "FeedForwardExperts(E, D, top_k=2)": "^FeedForwardExperts: there is no argument top_k$",
    "MoE(hidden_size=D, num_local_experts=E, k=K)": "no argument hidden_size, did you mean d_model",
    "MoE(D, num_local_experts=E, k=K)": "no argument num_local_experts, did you mean num_experts",
    "layer(capacityfactor=2)": "^MoE: .* capacityfactor, did you mean capacity",
    "layer(unknown=2)": "^MoE: there is no argument unknown$",
    "HierarchicalMoE(D, A, B, 2, intermediate_size=4)": "did you mean hidden_sizes",
    "TopKGate(D, E, K, norm_topk_prob=True)": "norm_topk_prob, did you mean renormalize",
    "lstm(input_size=3)": "^MoELSTM: there is no argument input_size, did you mean d_input",
    "lstm()(steps.long())": "^MoELSTM: x must have a floating-point dtype, got torch.int64",
    "lstm()(steps, mask=torch.ones(2, 4))": "mask must have dtype torch.bool, got torch.float32",
}


@pytest.mark.parametrize("call, pattern", [*TYPES.items()])
def test_types(call, pattern):
    with pytest.raises(TypeError, match=pattern):
        eval(call, NAMES)


@pytest.mark.parametrize(
    "call, pattern",
    [
        ("Gate(D, E, K)(x)", "^Gate must define forward"),
        ("Experts(E, D)(x, torch.arange(E + 1))", "^Experts must define forward"),
        ("RouterLoss(1.0).value()", "^RouterLoss must define value$"),
        ("AdaptiveGate(D, E, K, num_counts=1).update(x)", "^AdaptiveGate must define update"),
    ],
)
def test_what_a_derived_class_must_define(call, pattern):
    with pytest.raises(NotImplementedError, match=pattern):
        eval(call, NAMES)


def test_attributes_that_change_between_steps():
    changed = layer(capacity=1.0, losses=[SwitchLoss(0.1)], gate=TopKGate(D, E, K))
    for value in (0, math.nan, "1"):
        changed.capacity = moe_ext.Capacity(1.0)
        changed(x)
        changed.capacity = value
        with pytest.raises(ValueError, match="^Capacity: factor must .*got"):
            changed(x)
    with pytest.raises(ValueError, match="^SwitchLoss: weight must be at least 0, got -5$"):
        changed.losses[0].weight = -5
    two_levels = HierarchicalMoE(D, A, B, (1, 2))
    for one, name, value, rule in (
        (layer(), "w_load", math.nan, "w_load must be a finite number"),
        (layer(), "w_importance", -1.0, "w_importance must be at least 0"),
        (layer(), "losses", (ZLoss(1.0), ZLoss(2.0)), "losses must have different names"),
        (layer(), "num_null_experts", 1, r"num_experts \+ .* must be 5, .*, got 6"),
        (two_levels, "num_identity_experts", 1, r"num_experts \+ .* must be 12, .*, got 13"),
        (two_levels, "capacity", 0.5, "capacity must be None with a hier"),
    ):
        before = getattr(one, name)
        setattr(one, name, value)
        with pytest.raises(ValueError, match=f"^MoE: {rule}"):
            one(x)
        setattr(one, name, before)
        one(x)


def test_what_a_recurrent_layer_would_count_in_each_time_step():
    for name, value in (
        ("capacity", 0.5),
        ("losses", (SwitchLoss(1.0),)),
        ("w_load", 0.1),
    ):
        changed = lstm()
        setattr(changed.cell.moe, name, value)
        with pytest.raises(ValueError, match=f"^MoELSTM: cell.moe.{name} must have no value"):
            changed(steps)


FOREIGN_CALLS = [
    "MoE(numpy.int64(D), numpy.int32(E), numpy.uint8(K), hidden_sizes=[numpy.int64(4)])",
    "MoE(D, E, K, num_null_experts=numpy.int64(1), num_identity_experts=numpy.int64(1))",
    "MoE(D, E, K, recompute=numpy.True_, bias=numpy.bool_(False))",
    "MoE(D, E, K, gate=TopKGate(D, E, numpy.int64(K), num_groups=numpy.int64(1)))",
    "MoE(D, E, K, gate=ReLUGate(D, E, numpy.int64(K), l1_weight=Fraction(1, 10)))",
    "MoE(D, E, K, w_load=numpy.float32(0.5), losses=[SwitchLoss(Decimal('0.1'))])",
    "MoE(D, E, K, capacity=Fraction(5, 4), gate=TopKGate(D, E, K))",
    "HierarchicalMoE(D, numpy.int64(A), numpy.int64(B), numpy.int64(2))",
    "HierarchicalMoE(D, A, numpy.int64(B), k=(numpy.int64(1), 2), losses=[])",
    "layer(gate=gate(noise_epsilon=numpy.float64(0.5)))",
    "lstm(d_hidden=numpy.int64(U), memory_slots=numpy.int64(2), dropout=numpy.float64(0.5))",
]


@pytest.mark.parametrize("call", FOREIGN_CALLS)
def test_numbers_of_other_libraries(call):
    """They become plain numbers, which can be saved and compiled."""
    made = eval(call, NAMES | dict(Fraction=Fraction, Decimal=Decimal))
    y, *_, aux = made(steps)
    (y.sum() + aux.loss).backward()
    values = [item for module in made.modules() for item in vars(module).items()]
    kept = {name: value for name, value in values if isinstance(value, Fraction | Decimal)}
    kept |= {name: value for name, value in values if type(value).__module__ == "numpy"}
    assert not kept


def test_widths_that_are_accepted():
    assert layer(experts=Wide(4), num_null_experts=1).experts.d_output == 4
    assert layer(parallel=ExpertParallel(None, num_chunks=2)).sharding.exchange is None


def test_a_required_value():
    assert required(0, "f: x", "be given") == 0
    with pytest.raises(ValueError, match="^f: x must be given, got None$"):
        required(None, "f: x", "be given")
    with pytest.raises(ValueError, match="^f: x must name a file, got 'y'$"):
        required(None, "f: x", "name a file", "y")
