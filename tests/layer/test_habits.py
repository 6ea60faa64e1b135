"""The habits of torch.nn: device and dtype, widths as numbers, activations as modules."""

import copy
import pickle

import pytest
import torch
from assertions import assert_exact, assert_same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
    add_loss,
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


def block(layer, x):
    """Returns the output of a block with a residual connection, and the loss of its layer."""
    y, aux = layer(x)
    return x + y, aux.loss


def random_layer():
    layer = MoE(D, E, K, gate=TopKGate(D, E, K)).double()
    nn.init.normal_(layer.gate.w_gate)
    return layer


def gradients_of(module, loss):
    """Returns the gradient of each parameter, by name."""
    module.zero_grad()
    loss.backward()
    return {name: param.grad.clone() for name, param in module.named_parameters()}


def assert_same_gradients(module, loss, expected):
    """Compares the gradients of two training losses."""
    expected = gradients_of(module, expected)
    for name, grad in gradients_of(module, loss).items():
        assert_exact(grad, expected[name])


@pytest.mark.parametrize(
    "call",
    [
        lambda run, x: run(x),
        lambda run, x: checkpoint(run, x, use_reentrant=False),
        lambda run, x: checkpoint(run, x.requires_grad_(), use_reentrant=True),
        lambda run, x: torch.compile(run, backend="aot_eager")(x),
    ],
    ids=["plain", "checkpoint", "reentrant", "compile"],
)
def test_an_added_loss_has_its_gradient(call):
    layer = random_layer()
    x = torch.randn(7, D, dtype=torch.float64)
    y, loss = block(layer, x)

    def run(x):
        return add_loss(*block(layer, x))

    with_loss = call(run, x)
    assert_exact(with_loss, y)
    (grad_of_y,) = torch.autograd.grad(y.square().sum(), layer.gate.w_gate, retain_graph=True)
    assert_same_gradients(layer, with_loss.square().sum(), y.square().sum() + loss)
    assert not torch.allclose(layer.gate.w_gate.grad, grad_of_y)  # the loss has a gradient


def test_keep_aux_adds_the_loss():
    layer = random_layer()
    model = nn.Sequential(nn.Linear(D, D).double(), KeepAux(layer, adds_loss=True))
    x = torch.randn(7, D, dtype=torch.float64)
    y, aux = layer(model[0](x))
    assert_same_gradients(model, model(x).square().sum(), y.square().sum() + aux.loss)
    kept = model[1].aux
    assert_exact(kept.loss, aux.loss)
    assert not (kept.loss.requires_grad or kept.gates.requires_grad)
    with torch.no_grad():
        assert_exact(model(x), y)
    assert not model(x)._is_view()  # fully_shard warns about views
    with pytest.raises(TypeError, match="^KeepAux: adds_loss must be True or False, got 1$"):
        KeepAux(layer, adds_loss=1)


def test_keep_aux_refuses_a_loss_without_gradient():
    """Reentrant checkpointing runs the first forward pass without gradients."""
    x = torch.randn(7, D, dtype=torch.float64, requires_grad=True)
    for reentrant in (False, True):
        layer = KeepAux(random_layer())
        y = checkpoint(layer, x, use_reentrant=reentrant)
        loss = y.square().sum() + layer.aux.loss
        if reentrant:
            with pytest.raises(ValueError, match="^KeepAux: adds_loss must be True with reentrant"):
                loss.backward()
        else:
            loss.backward()


def test_a_result_with_an_added_loss_can_be_changed():
    y, loss = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    added = add_loss(2 * y, loss)
    added += 1
    added.sum().backward()
    assert y.grad.tolist() == [2, 2] and loss.grad == 1


def test_an_added_loss_is_scaled_as_given():
    y, loss = torch.zeros(2, requires_grad=True), torch.ones((), requires_grad=True)
    (5 * add_loss(y, loss * 3)).sum().backward()
    assert (y.grad.tolist(), loss.grad.item()) == ([5, 5], 3)
    twice = torch.func.grad(lambda loss: add_loss(loss * y.detach(), loss).sum())
    assert twice(loss.detach()) == 1  # the sum of y is 0
    with pytest.raises(ValueError, match=r"^add_loss: loss must have shape \(\), got \(1,\)$"):
        add_loss(y, loss[None])
    with pytest.raises(TypeError, match="^add_loss: loss must be a tensor, got float$"):
        add_loss(y, 0.0)
