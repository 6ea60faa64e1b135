"""The habits of torch.nn: device and dtype, widths as numbers, activations as modules."""

import copy
import pickle

import pytest
import torch
from assertions import assert_same_bits
from torch import nn
from torch.nn import functional as F

from moe_ext import (
    BalancedGate,
    ExpertChoiceGate,
    FeedForwardExperts,
    HierarchicalBalancedGate,
    HierarchicalMoE,
    HierarchicalNoisyTopKGate,
    KeepAux,
    MoE,
    MoELSTM,
    MoELSTMCell,
    NoisyTopKGate,
    ReLUGate,
    SharedExpert,
    SoftmaxGate,
    TopKGate,
    presets,
)

D, E, K = 4, 6, 2

MODULES = {
    "BalancedGate": lambda **own: BalancedGate(D, E, K, **own),
    "ExpertChoiceGate": lambda **own: ExpertChoiceGate(D, E, K, **own),
    "FeedForwardExperts": lambda **own: FeedForwardExperts(E, D, [3], bias=True, **own),
    "HierarchicalBalancedGate": lambda **own: HierarchicalBalancedGate(D, 3, 2, 2, **own),
    "HierarchicalMoE": lambda **own: HierarchicalMoE(D, 3, 2, 2, **own),
    "HierarchicalMoE of modules": lambda **own: HierarchicalMoE(
        D, 3, 2, 2, experts=[nn.Identity() for _ in range(6)], **own
    ),
    "HierarchicalNoisyTopKGate": lambda **own: HierarchicalNoisyTopKGate(D, 3, 2, 2, **own),
    "MoE": lambda **own: MoE(D, E, K, bias=True, **own),
    "MoELSTM": lambda **own: MoELSTM(D, D, E, K, **own),
    "MoELSTMCell": lambda **own: MoELSTMCell(D, D, E, K, **own),
    "NoisyTopKGate": lambda **own: NoisyTopKGate(D, E, K, **own),
    "ReLUGate": lambda **own: ReLUGate(D, E, K, **own),
    "SharedExpert": lambda **own: SharedExpert(D, [3], **own),
    "SoftmaxGate": lambda **own: SoftmaxGate(D, E, **own),
    "TopKGate": lambda **own: TopKGate(D, E, K, logit_bias=True, bias_update_rate=0.1, **own),
    "deepseek_v3": lambda **own: presets.deepseek_v3(D, 3, 16, K, **own),
    "gpt_oss": lambda **own: presets.gpt_oss(D, 3, E, K, **own),
    "mixtral": lambda **own: presets.mixtral(D, 3, E, K, **own),
    "olmoe": lambda **own: presets.olmoe(D, 3, E, K, **own),
    "qwen3_moe": lambda **own: presets.qwen3_moe(D, 3, E, K, **own),
}


def tensors_of(module):
    """Returns the parameters, the buffers and the counts of gates."""
    counts = [getattr(m, "tokens_since_update", None) for m in module.modules()]
    own = [*module.parameters(), *module.buffers()]
    return [*own, *(count for count in counts if count is not None)]


@pytest.mark.parametrize("name", MODULES)
def test_device(name):
    tensors = tensors_of(MODULES[name](device="meta"))
    assert tensors and all(tensor.device.type == "meta" for tensor in tensors)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype(name, dtype):
    """The state that adapts is at least float32."""
    module = MODULES[name](dtype=dtype)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    same = {tensor.dtype for tensor in module.buffers() if tensor.is_floating_point()}
    assert same <= {torch.promote_types(dtype, torch.float32)}
    torch.manual_seed(0)
    expected = MODULES[name](dtype=torch.float64)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        instance = MODULES[name]()
    finally:
        torch.set_default_dtype(default)
    for a, b in zip(instance.parameters(), expected.parameters(), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("name", MODULES)
def test_dtypes_of_parameters_are_floating_point(name):
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype, got torch.int64$"):
        MODULES[name](dtype=torch.int64)


def test_expert_dtype_takes_precedence():
    layer = MoE(D, E, K, dtype=torch.float64, expert_dtype=torch.bfloat16)
    assert layer.gate.w_gate.dtype == torch.float64
    assert {parameter.dtype for parameter in layer.experts.parameters()} == {torch.bfloat16}
    assert layer(torch.randn(3, D))[0].dtype == torch.float32


def test_given_parts_keep_their_device_and_dtype():
    gate, experts = TopKGate(D, E, K), FeedForwardExperts(E, D, [3])
    assert {p.dtype for p in MoE(D, E, K, gate=gate, dtype=torch.float64).gate.parameters()} == {
        torch.float32
    }
    assert MoE(D, E, K, experts=experts, device="meta").experts.weight_0.device.type == "cpu"
    for own in ({"device": "meta"}, {"dtype": torch.float64}):
        with pytest.raises(ValueError, match="^MoE: device and dtype must be left out when gate"):
            MoE(D, E, K, gate=gate, experts=experts, **own)


@pytest.mark.parametrize(
    "make",
    [
        lambda width: MoE(D, E, K, hidden_sizes=width),
        lambda width: HierarchicalMoE(D, 3, 2, 2, hidden_sizes=width),
        lambda width: FeedForwardExperts(E, D, width),
        lambda width: SharedExpert(D, width),
    ],
)
def test_a_single_width(make):
    assert repr(make(7)) == repr(make([7])) == repr(make((7,)))


NAMES = {
    "gelu": [nn.GELU(), nn.GELU, F.gelu],
    "gelu_tanh": [nn.GELU("tanh")],
    "identity": [nn.Identity(), nn.Identity],
    "relu": [nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU, F.relu, torch.relu],
    "sigmoid": [nn.Sigmoid(), nn.Sigmoid, F.sigmoid, torch.sigmoid],
    "silu": [nn.SiLU(), nn.SiLU, F.silu],
    "tanh": [nn.Tanh(), nn.Tanh, F.tanh, torch.tanh],
}


@pytest.mark.parametrize("name, given", [(n, alias) for n, all_ in NAMES.items() for alias in all_])
def test_activations_as_modules_and_functions(name, given):
    experts = FeedForwardExperts(1, D, 5, activation=given)
    assert experts.activation == name
    assert MoE(D, E, K, activation=given).experts.activation == name
    assert SharedExpert(D, 3, activation=given).expert.activation == name
    function = given() if isinstance(given, type) else given
    x = torch.randn(3, D)
    w_0, w_1 = (weight[0] for weight in experts.weights)
    torch.testing.assert_close(experts(x, None), function(x @ w_0) @ w_1)


@pytest.mark.parametrize("unknown", [nn.ELU(), nn.Softplus, F.elu, torch.exp, lambda x: x, "elu"])
def test_unknown_activations(unknown):
    with pytest.raises(ValueError, match="^FeedForwardExperts: activation must be one of .*got"):
        MoE(D, E, K, activation=unknown)


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: MoE(D, E, **k),
        lambda **k: HierarchicalMoE(D, 3, 2, **k),
        lambda **k: MoELSTM(D, D, E, **k),
        lambda **k: MoELSTMCell(D, D, E, **k),
        lambda **k: presets.mixtral(D, 3, E, **k),
        *(
            lambda kind=kind, **k: kind(D, E, **k)
            for kind in (BalancedGate, ExpertChoiceGate, NoisyTopKGate, ReLUGate, TopKGate)
        ),
        *(
            lambda kind=kind, **k: kind(D, 3, 2, **k)
            for kind in (HierarchicalBalancedGate, HierarchicalNoisyTopKGate)
        ),
    ],
)
def test_top_k_is_another_name_of_k(make):
    assert repr(make(top_k=2)) == repr(make(k=2))
    with pytest.raises(TypeError, match=": k and top_k are the same argument, got both$"):
        make(k=2, top_k=2)


def test_keep_aux():
    layer = MoE(D, E, K)
    model = nn.Sequential(nn.Linear(3, D), KeepAux(layer), nn.Linear(D, 1))
    assert model[1].aux is None
    x = torch.randn(5, 3)
    torch.manual_seed(0)
    y = model(x)
    torch.manual_seed(0)
    expected, aux = layer(model[0](x))
    assert_same_bits(y, model[2](expected))
    assert_same_bits(model[1].aux.loss, aux.loss)
    (y.sum() + model[1].aux.loss).backward()
    assert layer.gate.w_gate.grad.isfinite().all()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin[1].aux is None and model[1].aux is not None
        twin.eval(), model.eval()
        assert_same_bits(twin(x), model(x))
    masked = KeepAux(layer)(torch.randn(2, 3, D), torch.zeros(2, 3, dtype=torch.bool))
    assert masked.count_nonzero() == 0
