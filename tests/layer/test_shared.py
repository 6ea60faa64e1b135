"""The shared expert (DeepSeekMoE, arXiv 2401.06066), with the sigmoid of Qwen2-MoE."""

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits
from moe_lab.analysis import moe_ops
from torch import nn

from moe_ext import BalancedGate, HierarchicalMoE, MoE, SharedExpert, TopKGate

D, E, K = 6, 5, 2
SHARED = pytest.mark.equation("arXiv 2401.06066")


def make_layer(shared, device="cpu", dtype=torch.float64, **options):
    layer = MoE(D, E, K, gate=TopKGate(D, E, K), hidden_sizes=[7], shared_expert=shared, **options)
    nn.init.normal_(layer.gate.w_gate)
    if getattr(shared, "w_gate", None) is not None:
        nn.init.normal_(shared.w_gate)
    return layer.to(device, dtype)


@SHARED
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "swiglu", "bias": True},
        {"activation": "clamped_swiglu", "activation_args": (0.75, 1.5, 0.25), "bias": True},
    ],
    ids=str,
)
def test_equals_reference(device, gated, masked, options):
    """Compares the difference to a layer without shared expert, and all gradients."""
    layer = make_layer(SharedExpert(D, [4, 3], gated=gated, **options), device)
    if options:
        nn.init.normal_(layer.shared_expert.expert.bias_0)
    x = torch.randn(2, 4, D, dtype=torch.float64, device=device, requires_grad=True)
    mask = torch.rand(2, 4, device=device) < 0.6 if masked else None
    y, aux = layer(x, mask)
    shared, layer.shared_expert = layer.shared_expert, None
    plain, plain_aux = layer(x, mask)
    assert_same_bits(aux.loss, plain_aux.loss)

    named = dict(shared.named_parameters())
    leaves = {name: p.detach().cpu().requires_grad_() for name, p in named.items()}
    leaf = x.detach().cpu().requires_grad_()
    W = [leaves[f"expert.weight_{i}"][0] for i in range(3)]
    b = [leaves[f"expert.bias_{i}"][0] for i in range(3)] if options else None
    expected = torch.zeros(2, 4, D, dtype=torch.float64)
    for place in range(8):
        i, j = divmod(place, 4)
        if mask is None or mask[i, j]:
            scale = torch.sigmoid(leaf[i, j] @ leaves["w_gate"][:, 0]) if gated else 1
            network = options.get("activation", "relu"), options.get("activation_args")
            expected[i, j] = scale * ref.E_i(leaf[i, j], W, b, *network)
    assert_exact((y - plain).detach(), expected.detach())
    weight = torch.randn(2, 4, D, dtype=torch.float64)
    actual = torch.autograd.grad(
        ((y - plain) * weight.to(device)).sum(), [x, *named.values()], allow_unused=True
    )
    wanted = torch.autograd.grad((expected * weight).sum(), [leaf, *leaves.values()])
    for a, e in zip(actual, wanted, strict=True):
        assert_exact(a, e)


@SHARED
def test_several_shared_experts_are_a_wider_one():
    wide = SharedExpert(D, [8], activation="swiglu").double()
    parts = [SharedExpert(D, [4], activation="swiglu").double() for _ in range(2)]
    with torch.no_grad():
        first, second = wide.expert.weights
        for i, part in enumerate(parts):
            columns = first.unflatten(2, (2, 2, 4))[:, :, :, i].flatten(2)
            part.expert.weight_0.copy_(columns)
            part.expert.weight_1.copy_(second[:, 4 * i : 4 * i + 4])
    x = torch.randn(9, D, dtype=torch.float64)
    assert_exact(wide(x).detach(), sum(part(x) for part in parts).detach())


@SHARED
def test_equals_qwen2_moe():
    """Copies the weights of a mixture of transformers, router and shared expert included."""
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = modeling.Qwen2MoeConfig(
        hidden_size=D,
        num_experts=E,
        num_experts_per_tok=K,
        norm_topk_prob=True,
        moe_intermediate_size=7,
        shared_expert_intermediate_size=9,
        hidden_act="silu",
    )
    theirs = modeling.Qwen2MoeSparseMoeBlock(config).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    shared = SharedExpert(D, [9], activation="swiglu", gated=True)
    layer = make_layer(shared, activation="swiglu")
    with torch.no_grad():
        layer.gate.w_gate.copy_(theirs.gate.weight.T)
        layer.experts.weight_0.copy_(theirs.experts.gate_up_proj.mT)
        layer.experts.weight_1.copy_(theirs.experts.down_proj.mT)
        mlp = theirs.shared_expert
        halves = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).T
        shared.expert.weight_0[0] = halves
        shared.expert.weight_1[0] = mlp.down_proj.weight.T
        shared.w_gate.copy_(theirs.shared_expert_gate.weight.T)
        x = torch.randn(2, 8, D, dtype=torch.float64)
        y, expected = layer(x)[0], theirs(x)
        # Their router rounds the probabilities to float32.
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_recomputation_is_bitwise_identical(gated):
    layers = [
        make_layer(SharedExpert(D, [8], gated=gated, recompute=recompute))
        for recompute in (False, True)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(9, D, dtype=torch.float64)
    found = []
    for layer in layers:
        y, aux = layer(x)
        (y.square().sum() + aux.loss).backward()
        found.append([y, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


def test_it_has_the_dtype_of_the_experts():
    shared = SharedExpert(D, [4], dtype=torch.bfloat16, gated=True)
    layer = MoE(D, E, K, expert_dtype=torch.bfloat16, shared_expert=shared)
    x = torch.randn(9, D)
    y, aux = layer(x)
    assert y.dtype == torch.float32
    (y.sum() + aux.loss).backward()
    assert shared.w_gate.grad.dtype == torch.float32 and shared.w_gate.grad.abs().sum() > 0


@pytest.mark.parametrize("masked", [False, True])
def test_compiles(masked):
    torch._dynamo.reset()
    layer = make_layer(SharedExpert(D, [4], gated=True))
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 7), (4, 5)):
        x = torch.randn(*shape, D, dtype=torch.float64)
        mask = torch.rand(shape) < 0.6 if masked else None
        assert_exact(compiled(x, mask)[0].detach(), layer(x, mask)[0].detach())


def test_any_gate_and_any_module():
    module = nn.Linear(D, D)
    x = torch.randn(8, D)
    for make in (
        lambda **options: HierarchicalMoE(D, 2, 3, 1, **options).eval(),
        lambda **options: MoE(D, E, K, gate=BalancedGate(D, E, K), w_load=0, **options),
    ):
        layer = make(shared_expert=module)
        y, _ = layer(x)
        layer.shared_expert = None
        torch.testing.assert_close(y, layer(x)[0] + module(x))
    assert layer(x[:0])[0].shape == (0, D)


def test_reset_parameters():
    shared = SharedExpert(D, [4], gated=True)
    before = shared.expert.weight_0.clone()
    nn.init.ones_(shared.w_gate)
    shared.reset_parameters()
    assert shared.w_gate.count_nonzero() == 0
    assert not torch.equal(shared.expert.weight_0, before)


def test_its_operations_are_counted():
    shared = SharedExpert(D, [4], gated=True)
    gate = TopKGate(D, E, K)
    plain = moe_ops(MoE(D, E, K, gate=gate, hidden_sizes=[7]))
    found = moe_ops(MoE(D, E, K, gate=gate, hidden_sizes=[7], shared_expert=shared))
    assert found.experts - plain.experts == 2 * 4 * D + D


def test_errors():
    with pytest.raises(TypeError, match="^MoE: shared_expert must be a module or None, got int$"):
        MoE(D, E, K, shared_expert=3)
    layer = MoE(D, E, K, shared_expert=nn.Linear(D, 1))
    message = r"^MoE: shared_expert must return \[T, d_output = 6\], got \[3, 1\]$"
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(3, D))
