"""CV², L_importance and L_load (Eq. 7, 11); the losses of later routers."""

import copy
import pickle

import pytest
import reference as ref
import torch
from assertions import assert_as_accurate, assert_exact, assert_same_bits

from moe_ext import (
    BalancedGate,
    Gate,
    HierarchicalMoE,
    MoE,
    RouterLoss,
    Routing,
    SoftmaxGate,
    SwitchLoss,
    TopKGate,
    ZLoss,
    cv_squared,
    importance_loss,
    load_loss,
)


def vec(*values, device="cpu"):
    return torch.tensor(values, dtype=torch.float64, device=device)


@pytest.mark.equation("Eq. 7", "Eq. 11")
@pytest.mark.parametrize(
    "v, expected",
    [([1, 3], 0.25), ([4, 0, 0, 0], 3), ([5], 0), ([0, 0, 0], 0), ([0], 0), ([3] * 8, 0)],
)
def test_population_variance(device, v, expected):
    """n = 1 and all zeros give 0 instead of 0 / 0. Equal values also have gradient 0."""
    v = vec(*v, device=device).requires_grad_()
    actual = cv_squared(v)
    assert actual.shape == ()
    assert float(actual.detach()) == pytest.approx(expected, abs=1e-14)
    (gradient,) = torch.autograd.grad(actual, v)
    assert gradient.isfinite().all()
    if expected == 0:
        assert gradient.abs().max() < 1e-15
    if len(v) == 1:
        assert gradient.tolist() == [0]


@pytest.mark.equation("Eq. 7", "Eq. 11")
@pytest.mark.parametrize("n", [2, 3, 256, 4096])
def test_equals_reference(device, n):
    v = torch.rand(n, dtype=torch.float64) + 0.1
    leaf = v.clone().requires_grad_()
    expected = ref.CV_squared(leaf)
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    moved = v.to(device).requires_grad_()
    actual = cv_squared(moved)
    assert_exact(actual.detach(), expected.detach())
    assert_exact(torch.autograd.grad(actual, moved)[0], expected_gradient)


@pytest.mark.equation("Eq. 7", "Eq. 11")
def test_derivative_formula(device):
    """Checks dCV²/dy_i = (2n / S²)(y_i - Q/S) with S = sum y, Q = sum y²; y · dCV²/dy = 0."""
    y = (torch.rand(7, dtype=torch.float64, device=device) + 0.1).requires_grad_()
    (gradient,) = torch.autograd.grad(cv_squared(y), y)
    S, Q = y.sum(), y.pow(2).sum()
    assert_exact(gradient, (2 * 7 / S**2 * (y - Q / S)).detach())
    assert abs(float(gradient @ y)) < 1e-14


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.float64, 1e-9)])
def test_scale_free(device, scale, dtype, rtol):
    """Values of any scale give the same result, because no epsilon is used."""
    y = torch.rand(6, dtype=dtype, device=device) + 0.1
    torch.testing.assert_close(cv_squared(y * scale), cv_squared(y), rtol=rtol, atol=0)


def test_maximum_is_one_expert_taking_all(device):
    y = torch.zeros(100, dtype=torch.float64, device=device)
    y[17] = 12.5
    assert float(cv_squared(y)) == pytest.approx(99, rel=1e-12)


@pytest.mark.parametrize("offset", [0.1, 1000.0])
def test_float32(device, offset):
    """Includes nearly balanced loads, where the difference of two moments would cancel."""
    y = torch.rand(64, device=device) + offset

    def plain(y):
        return y.var(correction=0) / y.mean() ** 2

    leaves = [y.clone().requires_grad_(), y.clone().requires_grad_(), y.double().requires_grad_()]
    out = [f(x) for f, x in zip((cv_squared, plain, plain), leaves, strict=True)]
    assert_as_accurate(*out)
    assert_as_accurate(*(torch.autograd.grad(o, x)[0] for o, x in zip(out, leaves, strict=True)))


def test_coefficients_are_applied_once(device):
    v = vec(1, 3, device=device)
    assert float(importance_loss(v, 0.1)) == pytest.approx(0.025, rel=1e-12)
    assert float(load_loss(v, 0.4)) == pytest.approx(0.1, rel=1e-12)
    assert float(importance_loss(v, 0.0)) == 0
    with pytest.raises(ValueError, match="^load_loss: weight must be at least 0, got -0.1$"):
        load_loss(v, -0.1)
    assert_exact(importance_loss(v, 0.1), ref.L_importance(v.cpu(), 0.1))
    assert_exact(load_loss(v, 0.3), ref.L_load(v.cpu(), 0.3))


def test_losses_are_of_the_whole_batch(device):
    """CV² is computed from the summed loads; the mean of the parts' CV² differs."""
    a, b = vec(4, 0, device=device), vec(0, 4, device=device)
    assert float(cv_squared(a + b)) == 0
    assert float((cv_squared(a) + cv_squared(b)) / 2) == 1


def test_any_layout(device):
    y = torch.rand(4, 3, dtype=torch.float64, device=device)
    assert_same_bits(cv_squared(y[:, 1]), cv_squared(y[:, 1].contiguous()))


D, E, K = 6, 5, 2
SWITCH = pytest.mark.equation("arXiv 2101.03961")
Z = pytest.mark.equation("arXiv 2202.08906")
SEQUENCE = pytest.mark.equation("arXiv 2412.19437")


class SigmoidGate(Gate):
    """Scores each expert with a sigmoid."""

    def __init__(self, d_model, num_experts, k):
        super().__init__(d_model, num_experts, k)
        self.w_gate = torch.nn.Parameter(torch.randn(d_model, num_experts))

    def forward(self, x, ranks=None):
        logits = self.logits(x, self.w_gate)
        top, index = logits.sigmoid().topk(self.k)
        gates = top / top.sum(-1, keepdim=True)
        return self.make_routing(gates, index, ranks=ranks, logits=logits, scores=logits.sigmoid())


GATES = {
    "noisy": lambda: None,
    "top-k": lambda: TopKGate(D, E, K),
    "k=1": lambda: TopKGate(D, E, 1),
    "softmax": lambda: SoftmaxGate(D, E),
    "balanced": lambda: BalancedGate(D, E, K),
    "sigmoid": lambda: SigmoidGate(D, E, K),
}


def layer_with(*losses, gate="top-k", device="cpu", dtype=torch.float64, **options):
    """Makes a layer with random weights of the gate."""
    gate = GATES[gate]()
    k = K if gate is None else gate.k
    layer = MoE(D, E, k, gate=gate, hidden_sizes=[7], losses=losses, **options)
    for name, weight in layer.gate.named_parameters():
        if name.startswith("w_"):
            torch.nn.init.normal_(weight)
    return layer.to(device, dtype)


def chosen_of(aux, T):
    """Returns the experts of each token."""
    if aux.token_offsets is None:
        return aux.expert_index.tolist()
    index, ends = aux.expert_index.tolist(), aux.token_offsets.tolist()
    return [index[ends[t] : ends[t + 1]] for t in range(T)]


def logits_of(layer, x, gate):
    """Returns the logits and probabilities of each row of x by the reference."""
    logits = x @ layer.gate.w_gate.detach().cpu()
    if gate != "sigmoid":
        return logits, [ref.Softmax(v) for v in logits]
    return logits, [torch.sigmoid(v) / sum(torch.sigmoid(v)) for v in logits]


@SWITCH
@Z
@pytest.mark.parametrize("gate", GATES)
def test_router_losses_equal_reference(device, gate):
    layer = layer_with(SwitchLoss(0.3), ZLoss(0.2), gate=gate, device=device)
    x = torch.randn(9, D, dtype=torch.float64, device=device, requires_grad=True)
    _, aux = layer(x)
    leaf = x.detach().cpu().requires_grad_()
    logits, P_X = logits_of(layer, leaf, gate)
    switch, z = ref.L_switch(P_X, chosen_of(aux, 9)), ref.L_z(logits)
    assert_exact(aux.losses["switch_loss"], switch.detach())
    assert_exact(aux.losses["z_loss"], z.detach())
    assert aux.metrics()["z_loss"] == pytest.approx(float(z.detach()), rel=1e-12)
    if gate == "balanced":  # adds the loss of its thresholds, which has no gradient for x
        return assert_exact(
            torch.autograd.grad(aux.loss, x)[0],
            torch.autograd.grad(0.3 * switch + 0.2 * z, leaf)[0],
        )
    loss = 0.3 * switch + 0.2 * z
    assert_exact(aux.loss.detach(), loss.detach())
    assert_exact(torch.autograd.grad(aux.loss, x)[0], torch.autograd.grad(loss, leaf)[0])


@SEQUENCE
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("how", ["dense", "mask", "nested", "one sequence"])
def test_loss_of_each_sequence_equals_reference(device, gate, how):
    """A sequence without real tokens does not count."""
    layer = layer_with(SwitchLoss(0.3, per_sequence=True), gate=gate, device=device)
    lengths = {"mask": [4, 0, 3], "one sequence": [7]}.get(how, [4, 4, 4])
    x = torch.randn(len(lengths), max(lengths), D, dtype=torch.float64, device=device)
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    if how == "one sequence":
        _, aux = layer(x[0])
    elif how == "nested":
        lengths = [4, 2, 3]
        rows = [row[:length] for row, length in zip(x, lengths, strict=True)]
        _, aux = layer(torch.nested.nested_tensor(rows, layout=torch.jagged))
    else:
        _, aux = layer(x.unflatten(0, (3, 1)), mask.unflatten(0, (3, 1)) if how == "mask" else None)
    chosen = iter(chosen_of(aux, sum(lengths)))
    losses = []
    for row, length in zip(x.cpu(), lengths, strict=True):
        if length:
            _, P_X = logits_of(layer, row[:length], gate)
            losses.append(ref.L_switch(P_X, [next(chosen) for _ in range(length)]))
    assert_exact(aux.losses["switch_loss_per_sequence"], sum(losses) / len(losses))


@SWITCH
@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, E])
def test_the_switch_loss_does_not_depend_on_k(k, per_sequence):
    """It is 1 for equal probabilities, and E / k if all tokens prefer the same k experts."""
    loss = SwitchLoss(1.0, per_sequence=per_sequence)
    layer = MoE(D, E, k, gate=TopKGate(D, E, k), losses=[loss]).double()
    torch.nn.init.zeros_(layer.gate.w_gate)
    x = torch.ones(2, 8, D, dtype=torch.float64)
    assert float(layer(x)[1].loss.detach()) == pytest.approx(1, abs=1e-12)
    layer.gate.w_gate.data[:, :k] = 100
    assert float(layer(x)[1].loss.detach()) == pytest.approx(E / k, rel=1e-12)


@SWITCH
@pytest.mark.parametrize("masked", [False, True])
def test_transformers_loss_is_k_times_ours(masked):
    """It is the mean over layers before the product, so it equals ours for one layer only."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layer = layer_with(SwitchLoss(1.0))
    x = torch.randn(3, 8, D, dtype=torch.float64)
    mask = torch.rand(3, 8) < 0.6 if masked else None
    _, aux = layer(x, mask)
    logits = (x @ layer.gate.w_gate.detach()).flatten(0, 1)
    theirs = modeling.load_balancing_loss_func((logits,), E, K, mask)
    # Their sums are in float32.
    assert float(aux.losses["switch_loss"]) == pytest.approx(float(theirs) / K, rel=1e-6)


def test_accumulated_losses():
    """Micro-batches of equal size give the z-loss and the loss of each sequence of the batch."""
    layer = layer_with(SwitchLoss(0.3, per_sequence=True), ZLoss(0.2))
    x = torch.randn(6, 4, D, dtype=torch.float64)
    whole = layer(x)[1].loss
    parts = sum(layer(part)[1].loss for part in x.chunk(3)) / 3
    assert_exact(parts.detach(), whole.detach())
    expected, actual = (torch.autograd.grad(v, layer.gate.w_gate)[0] for v in (whole, parts))
    assert_exact(actual, expected)
    of_batch = layer_with(SwitchLoss(0.3))
    of_parts = sum(of_batch(part)[1].loss for part in x.chunk(3)) / 3
    assert abs(of_parts - of_batch(x)[1].loss) > 1e-4


def test_losses_add_to_those_of_the_paper():
    x = torch.randn(9, D, dtype=torch.float64)
    layer = layer_with(SwitchLoss(0.3), ZLoss(0.0), w_importance=0.2)
    assert (layer.w_importance, layer.w_load) == (0.2, 0)
    _, aux = layer(x)
    expected = 0.2 * cv_squared(aux.importance) + 0.3 * aux.losses["switch_loss"]
    assert_exact(aux.loss.detach(), expected.detach())
    assert aux.losses["z_loss"] > 0  # a metric only
    layer.losses[0].weight = 1.0  # a schedule
    expected = 0.2 * cv_squared(aux.importance) + aux.losses["switch_loss"]
    assert_exact(layer(x)[1].loss.detach(), expected.detach())
    assert not any(value.requires_grad for value in aux.losses.values())
    plain = MoE(D, E, K)
    assert (plain.w_importance, plain.w_load, plain.losses) == (0.1, 0.1, ())
    assert plain(x.float())[1].losses == {}


@pytest.mark.parametrize("gate", ["noisy", "balanced", "sigmoid"])
def test_losses_of_no_tokens(device, gate):
    losses = SwitchLoss(1.0), SwitchLoss(1.0, per_sequence=True), ZLoss(1.0)
    layer = layer_with(*losses, gate=gate, device=device)
    x = torch.randn(2, 3, D, dtype=torch.float64, device=device, requires_grad=True)
    for inputs in ((x[:, :0],), (x[:0],), (x, torch.zeros(2, 3, dtype=torch.bool, device=device))):
        y, aux = layer(*inputs)
        assert [float(value) for value in aux.losses.values()] == [0, 0, 0]
        (gradient,) = torch.autograd.grad(y.sum() + aux.loss, x)
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_in_every_type(device, dtype):
    """The logits are in float32 for bfloat16 tokens, also under autocast."""
    losses = SwitchLoss(1.0), SwitchLoss(1.0, per_sequence=True), ZLoss(1.0)
    layer = layer_with(*losses, device=device, dtype=dtype)
    x = torch.randn(2, 9, D, device=device, dtype=dtype)
    found = layer(x)[1]
    with torch.autocast(x.device.type, torch.bfloat16):
        assert_same_bits(layer(x)[1].loss, found.loss)
    exact = layer.double()(x.double())[1]
    for name, value in found.losses.items():
        assert value.dtype == torch.float32
        assert float(value) == pytest.approx(float(exact.losses[name]), rel=1e-6)


@Z
def test_z_loss_of_large_logits():
    """exp(1000) is infinite; its logarithm is not computed."""
    logits = torch.tensor([[1000.0, 0.0], [-1000.0, -1001.0]], dtype=torch.float64)
    routing = Routing(None, None, None, None, logits=logits)
    total, count = ZLoss(1.0).sums(routing, None, None)
    second = -1000 + torch.log1p(torch.tensor(-1.0, dtype=torch.float64).exp())
    assert_exact(total, 1e6 + second.square())
    assert count == 2


class RouterEntropy(RouterLoss):
    name = "router_entropy"

    def sums(self, routing, tokens_per_expert, sequence_offsets):
        p = routing.probabilities()
        return -torch.special.xlogy(p, p).sum(), p.new_tensor(len(p))

    def value(self, entropy, num_tokens):
        return entropy / num_tokens


def test_a_custom_loss():
    layer = layer_with(RouterEntropy(0.5))
    x = torch.randn(9, D, dtype=torch.float64)
    _, aux = layer(x)
    logits = x @ layer.gate.w_gate.detach()
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    assert_exact(aux.losses["router_entropy"], expected)
    assert_exact(aux.loss.detach(), 0.5 * expected)


@pytest.mark.parametrize("loss", [SwitchLoss(0.1), SwitchLoss(0.1, per_sequence=True)])
def test_a_layer_with_losses_can_be_copied(loss):
    layer, x = layer_with(loss), torch.randn(3, 4, D, dtype=torch.float64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(other(x)[1].loss, layer(x)[1].loss)
    assert repr(loss) in repr(layer)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: SwitchLoss(-1.0), ValueError, "^SwitchLoss: weight must be at least 0, got -1.0$"),
        (
            lambda: layer_with(ZLoss(1.0), ZLoss(2.0)),
            ValueError,
            r"^MoE: losses must have different names, got \['z_loss', 'z_loss'\]$",
        ),
        (
            lambda: layer_with(0.1),
            TypeError,
            "^MoE: losses must be a sequence of moe_ext.RouterLoss, got float$",
        ),
        (
            lambda: MoE(D, E, K, losses=(loss for loss in [ZLoss(1.0)])),
            TypeError,
            "^MoE: losses must be a sequence of moe_ext.RouterLoss, got generator$",
        ),
        (
            lambda: MoE(D, E, K, losses=ZLoss(1.0)),
            TypeError,
            "^MoE: losses must be a sequence of moe_ext.RouterLoss, got ZLoss$",
        ),
        (
            lambda: HierarchicalMoE(D, 2, 2, 1, losses=[ZLoss(1.0)])(torch.ones(3, D)),
            ValueError,
            "^ZLoss: logits must be set by the gate, got None$",
        ),
        (
            lambda: HierarchicalMoE(D, 2, 2, 1, losses=[SwitchLoss(1.0)])(torch.ones(3, D)),
            ValueError,
            "^Routing: logits must be set by the gate, got None$",
        ),
        (lambda: RouterLoss(1.0).value(), NotImplementedError, "^RouterLoss must define value$"),
    ],
)
def test_errors_of_losses(make, error, message):
    with pytest.raises(error, match=message):
        make()
