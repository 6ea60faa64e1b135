"""Router replay: the layer takes the experts of each token, with live gates and gradients."""

from functools import partial

import pytest
import reference as ref
import torch
from assertions import assert_exact, assert_same_bits, run_layer, tensors_of
from torch.utils.checkpoint import checkpoint

from moe_ext import (
    BalancedGate,
    HierarchicalMoE,
    MoE,
    NoisyTopKGate,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
)

D, E, K = 6, 6, 2
LOSSES = [SwitchLoss(0.3), SwitchLoss(0.1, per_sequence=True), ZLoss(0.2)]


def make_layer(gate, device="cpu", dtype=torch.float64, k=K, **options):
    """Makes a layer with random weights of the gate."""
    options.setdefault("losses", LOSSES)
    layer = MoE(D, E, k, gate=gate(D, E, k), hidden_sizes=[7], w_importance=0.1, **options)
    for name, weight in layer.gate.named_parameters():
        if name.startswith("w_"):
            torch.nn.init.normal_(weight)
    if getattr(layer.gate, "selection_bias", None) is not None:
        torch.nn.init.normal_(layer.gate.selection_bias)
    return layer.to(device, dtype)


def random_index(*shape, k=K):
    """Returns k random experts for each token, in random order."""
    return torch.rand(*shape, E).argsort(-1)[..., :k].contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("k", [1, K, E])
@pytest.mark.parametrize("gate", [TopKGate, NoisyTopKGate])
def test_replay_of_itself_is_bitwise_identical(device, gate, k, masked, training, dtype):
    layer = make_layer(gate, device, dtype, k, w_load=0.1).train(training)
    x = torch.randn(3, 8, D, device=device, dtype=dtype)
    mask = torch.rand(3, 8, device=device) < 0.7 if masked else None
    y, aux, gradients = run_layer(layer, x, mask)
    z, replayed, found = run_layer(layer, x, mask, aux.expert_index)
    assert_same_bits(z, y)
    for a, b in zip(tensors_of(replayed), tensors_of(aux), strict=True):
        assert_same_bits(a, b)
    for a, b in zip(found, gradients, strict=True):
        if training and gate is NoisyTopKGate:  # sums the gradients of gates and load separately
            limit = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(a, b, rtol=limit, atol=limit * float(b.abs().max()))
        else:
            assert_same_bits(a, b)


OPTIONS = [
    dict(renormalize=False, scale=2.5),
    dict(bias_update_rate=0.1),
    dict(score="sigmoid", logit_bias=True, bias_update_rate=0.1),
    dict(score="sigmoid", renormalize=False, num_groups=3, groups_per_token=2),
    dict(score="softmax", renormalize=False, num_groups=3, bias_update_rate=0.1),
    dict(score="sqrt_softplus", num_groups=2, scale=2.5, bias_update_rate=0.1),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replay_with_options_is_bitwise_identical(device, options, dtype):
    layer = make_layer(partial(TopKGate, **options), device, dtype)
    x = torch.randn(40, D, device=device, dtype=dtype)
    y, aux, gradients = run_layer(layer, x)
    z, replayed, found = run_layer(layer, x, expert_index=aux.expert_index)
    again, before = [z, *tensors_of(replayed), *found], [y, *tensors_of(aux), *gradients]
    for a, b in zip(again, before, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gate", [TopKGate, NoisyTopKGate])
def test_gates_of_any_experts_equal_reference(device, gate, training):
    """The gates are the softmax over the given experts' logits, whatever the gate would select."""
    layer = make_layer(gate, device, losses=()).train(training)
    x = torch.randn(9, D, dtype=torch.float64, device=device, requires_grad=True)
    expert_index = random_index(9)
    noise = torch.randn(9, E, dtype=torch.float64)
    layer.gate.draw_noise = lambda like: noise.to(device)
    _, aux = layer(x, expert_index=expert_index.to(device))
    leaf = x.detach().cpu().requires_grad_()
    H_X = leaf @ layer.gate.w_gate.detach().cpu()
    if training and gate is NoisyTopKGate:
        r = leaf @ layer.gate.w_noise.detach().cpu()
        H_X = torch.stack([ref.H(*row, 1e-2) for row in zip(H_X, r, noise, strict=True)])
    expected = leaf.new_zeros(9, E)
    for t, given in enumerate(expert_index.tolist()):
        expected[t, given] = ref.Softmax([H_X[t, i] for i in given])
    found = torch.zeros_like(x).new_zeros(9, E).scatter(1, aux.expert_index, aux.gates)
    assert_exact(found.detach(), expected.detach())
    assert torch.equal(aux.expert_index.cpu().sort(1).values, expert_index.sort(1).values)
    assert aux.tokens_per_expert.tolist() == expert_index.flatten().bincount(minlength=E).tolist()
    weight = torch.randn(9, E, dtype=torch.float64)
    (actual,) = torch.autograd.grad((found * weight.to(device)).sum(), x)
    assert_exact(actual, torch.autograd.grad((expected * weight).sum(), leaf)[0])


def test_load_is_that_of_the_gate(device):
    """The load of a noisy gate in training does not depend on the given experts."""
    layer = make_layer(NoisyTopKGate, device)
    x = torch.randn(9, D, dtype=torch.float64, device=device)
    _, aux, _ = run_layer(layer, x)
    _, replayed, _ = run_layer(layer, x, expert_index=random_index(9).to(device))
    assert_same_bits(replayed.load, aux.load)
    assert not torch.equal(replayed.importance, aux.importance)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("how", ["leading dimensions", "tokens", "mask", "nested"])
def test_shapes_of_the_experts(how, dtype):
    """Outputs do not depend on the order of a token's experts, apart from rounding."""
    layer = make_layer(TopKGate)
    x, index = torch.randn(2, 4, D, dtype=torch.float64), random_index(2, 4).to(dtype)
    mask = torch.rand(2, 4) < 0.6
    real = index[mask] if how == "mask" else index.flatten(0, 1)
    if how == "nested":
        nested = torch.nested.nested_tensor(list(x), layout=torch.jagged)
        _, aux = layer(nested, expert_index=real)
    elif how == "mask":
        _, aux = layer(x, mask, expert_index=index)
        assert_same_bits(
            layer(x, mask, expert_index=real)[0], layer(x, mask, expert_index=index)[0]
        )
    else:
        _, aux = layer(x, expert_index=real if how == "tokens" else index)
    assert torch.equal(aux.expert_index.sort(1).values, real.sort(1).values.long())
    flipped = layer(x, expert_index=index.flip(-1))
    assert_exact(flipped[0].detach(), layer(x, expert_index=index)[0].detach())


def test_replay_with_recomputation():
    """Recomputed experts and a recomputed layer give the same gradients."""
    x, index = torch.randn(9, D, dtype=torch.float64), random_index(9)
    plain = make_layer(NoisyTopKGate)
    other = make_layer(NoisyTopKGate, recompute=True)
    other.load_state_dict(plain.state_dict())
    expected = run_layer(plain, x, expert_index=index)

    def recomputed(x, mask, expert_index):
        return checkpoint(plain, x, mask, expert_index=expert_index, use_reentrant=False)

    recomputed.zero_grad, recomputed.parameters = plain.zero_grad, plain.parameters
    for layer in (other, recomputed):
        y, aux, gradients = run_layer(layer, x, expert_index=index)
        assert_same_bits(y, expected[0])
        assert_same_bits(aux.loss, expected[1].loss)
        for a, b in zip(gradients, expected[2], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("gate", [TopKGate, NoisyTopKGate])
@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("real_only", [False, True])
def test_replay_compiles(masked, real_only, gate):
    torch._dynamo.reset()
    layer = make_layer(gate)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((3, 7), (4, 5)):
        x, index = torch.randn(*shape, D, dtype=torch.float64), random_index(*shape)
        mask = torch.rand(shape) < 0.6 if masked else None
        if real_only:
            index = index.flatten(0, 1) if mask is None else index[mask]
        expected, actual = (run_layer(f, x, mask, index) for f in (layer, compiled))
        assert_exact(actual[0].detach(), expected[0].detach())
        assert_exact(actual[1].loss.detach(), expected[1].loss.detach())
        for a, b in zip(actual[2], expected[2], strict=True):
            assert_exact(a, b)


def test_no_tokens():
    layer = make_layer(TopKGate)
    x = torch.randn(2, 3, D, dtype=torch.float64)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    y, aux = layer(x, mask, expert_index=random_index(2, 3))
    assert y.count_nonzero() == 0 and aux.expert_index.shape == (0, K)
    assert layer(x[:0], mask[:0], expert_index=random_index(0, 3))[0].shape == (0, 3, D)
    assert layer(x[:0], expert_index=random_index(0, 3))[0].shape == (0, 3, D)


@pytest.mark.parametrize(
    "index, error, message",
    [
        (torch.zeros(3, K), TypeError, "have dtype int64 or int32, got torch.float32"),
        (torch.zeros(3, 1).long(), ValueError, r"have shape \[..., k = 2\] .*, got \(3, 1\)"),
        (torch.tensor([[0, 1]] * 4), ValueError, r"have shape .* each token of x, got \(4, 2\)"),
        (torch.tensor(1), ValueError, r"have shape .*, got \(\)"),
        (
            torch.tensor([[0, 1]] * 2 + [[0, E]]),
            ValueError,
            "be .*below gate.num_experts = 6, got 6",
        ),
        (torch.tensor([[0, 1]] * 2 + [[0, -1]]), ValueError, "be at least 0 .*, got -1"),
        (torch.tensor([[0, 1]] * 2 + [[3, 3]]), ValueError, r"have different .*, got \[3, 3\]"),
    ],
)
def test_invalid_experts_are_refused(index, error, message):
    layer = make_layer(TopKGate)
    with pytest.raises(error, match=f"^MoE: expert_index must {message}$"):
        layer(torch.randn(3, D, dtype=torch.float64), expert_index=index)


@pytest.mark.parametrize("gate", [TopKGate, NoisyTopKGate])
@pytest.mark.parametrize("experts", [[3, 3], [0, E], [-1, 0]])
def test_a_compiled_layer_refuses_invalid_experts(gate, experts):
    torch._dynamo.reset()
    layer = torch.compile(make_layer(gate), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, D, dtype=torch.float64)
    layer(x, expert_index=torch.tensor([[0, 1]] * 3))
    errors, message = (
        (ValueError, IndexError, RuntimeError),
        "different experts|below 6|out of bounds",
    )
    with pytest.raises(errors, match=message):
        layer(x, expert_index=torch.tensor([[0, 1]] * 2 + [experts]))


@pytest.mark.parametrize(
    "layer, name",
    [
        (MoE(D, E, K, gate=BalancedGate(D, E, K), w_load=0), "BalancedGate"),
        (MoE(D, E, E, gate=SoftmaxGate(D, E)), "SoftmaxGate"),
        (HierarchicalMoE(D, 2, 3, 1), "HierarchicalNoisyTopKGate"),
    ],
)
def test_gates_that_cannot_replay(layer, name):
    message = f"^MoE: expert_index must be None for {name}, whose forward does not take it, got "
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(3, D), expert_index=random_index(3))
