"""The reference itself, against numbers worked by hand and, for P(x, i), against sampling."""

import math

import pytest
import reference as ref
import torch


def vec(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_softplus_and_phi():
    assert float(ref.Softplus(vec(0.0)[0])) == pytest.approx(math.log(2), abs=1e-15)
    assert float(ref.Softplus(vec(25.0)[0])) == pytest.approx(25 + math.log1p(math.exp(-25)), abs=0)
    assert float(ref.Softplus(vec(800.0)[0])) == 800
    assert float(ref.Phi(vec(0.0)[0])) == 0.5
    assert float(ref.Phi(vec(1.0)[0])) == pytest.approx(0.8413447460685429, rel=1e-15)
    assert float(ref.Phi(vec(-10.0)[0])) == pytest.approx(7.619853024160527e-24, rel=1e-12)


def test_softmax_gating():
    # logits [0, ln 2, ln 5] -> weights 1 : 2 : 5
    gates = ref.G_sigma(vec(1.0), vec(0.0, math.log(2), math.log(5))[None])
    torch.testing.assert_close(gates, vec(1, 2, 5) / 8, rtol=1e-15, atol=0)


def test_top_k_ties_and_nan():
    assert ref.top_k(vec(1, 3, 2), 2) == [1, 2]
    assert ref.top_k(vec(2, 1, 2, 2), 3) == [0, 2, 3]
    assert ref.top_k(vec(math.nan, -math.inf, 0, math.nan), 4) == [2, 1, 0, 3]


def test_keep_top_k_and_gates():
    kept = ref.KeepTopK(vec(math.log(3), 7, math.log(1), 8), 2)
    assert [float(v) for v in kept] == [-math.inf, 7, -math.inf, 8]
    gates = ref.G(vec(math.log(3), 0, -5, -6), 2)
    torch.testing.assert_close(gates, vec(0.75, 0.25, 0, 0), rtol=1e-15, atol=0)
    assert gates[2] == 0 and gates[3] == 0


def test_noisy_logits():
    # Softplus(0) = ln 2
    h = ref.H(vec(1, 2), vec(0, 0), vec(2, -1), nu=0.5)
    torch.testing.assert_close(h, vec(2 + 2 * math.log(2), 1.5 - math.log(2)), rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "k, expected",
    [(1, [3, 4, 4, 4]), (2, [2, 2, 3, 3]), (3, [1, 1, 1, 2]), (4, [-math.inf] * 4)],
)
def test_kth_excluding(k, expected):
    h = vec(4, 3, 2, 1)
    assert [float(ref.kth_excluding(h, k, i)) for i in range(4)] == expected


def test_kth_excluding_is_a_neighbour_in_the_order():
    """H_(k+1) for the members of the top k, H_(k) for the rest."""
    h = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = ref.top_k(h, 9)
    for k in range(1, 9):
        for i in range(9):
            expected = h[order[k]] if i in order[:k] else h[order[k - 1]]
            assert ref.kth_excluding(h, k, i) == expected


def test_probability_by_hand():
    c, s, h = vec(1, 0, -1), vec(0.5, 1, 2), vec(2, 0.5, -3)
    # k = 1: expert 0 must exceed 0.5 (z = 1), expert 1 must exceed 2 (z = -2), expert 2 too (-1.5)
    expected = [0.8413447460685429, 0.0227501319481792, 0.0668072012688581]
    for i in range(3):
        assert float(ref.P(c, s, h, 1, i)) == pytest.approx(expected[i], rel=1e-12)
        assert float(ref.P(c, s, h, 3, i)) == 1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_probability_by_sampling(k):
    """4 sigma on 5 components: a right P fails with probability 3e-4 per k; the seed is fixed."""
    n, draws = 5, 20_000
    generator = torch.Generator().manual_seed(k)
    c, r, noise = torch.randn(3, n, dtype=torch.float64, generator=generator)
    s = ref.Softplus(r) + 0.01
    h = ref.H(c, r, noise, 0.01)
    for i in range(n):
        redrawn = h.repeat(draws, 1)
        fresh = torch.randn(draws, dtype=torch.float64, generator=generator)
        redrawn[:, i] = c[i] + fresh * s[i]
        frequency = (redrawn.topk(k).indices == i).double().sum() / draws
        p = ref.P(c, s, h, k, i)
        assert abs(frequency - p) <= 4 * torch.sqrt(p * (1 - p) / draws) + 2 / draws


@pytest.mark.parametrize(
    "v, expected", [([1, 3], 0.25), ([4, 0, 0, 0], 3), ([5], 0), ([0, 0], 0), ([2, 2, 2], 0)]
)
def test_cv_squared(v, expected):
    assert float(ref.CV_squared(vec(*v))) == expected


def test_importance_load_and_losses():
    G_X = torch.stack([vec(0.75, 0.25), vec(0.25, 0.75), vec(0.5, 0.5)])
    assert ref.Importance(G_X).tolist() == [1.5, 1.5]
    assert float(ref.L_importance(vec(1, 3), 0.1)) == pytest.approx(0.025)
    assert float(ref.L_load(vec(4, 0, 0, 0), 0.5)) == pytest.approx(1.5)
    c, s, h = vec(1, 0, -1)[None], vec(0.5, 1, 2)[None], vec(2, 0.5, -3)[None]
    load = ref.Load(c.repeat(2, 1), s.repeat(2, 1), h.repeat(2, 1), 1)
    assert load.tolist() == pytest.approx([1.6826894921, 0.0455002639, 0.1336144025], abs=1e-9)


def test_dispatch_and_combine():
    batches = ref.dispatch(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4)
    assert batches == [[(0, 1), (1, 0)], [(1, 1), (2, 1)], [(0, 0), (2, 0)], []]
    outputs = [[vec(1), vec(2)], [vec(3), vec(4)], [vec(5), vec(6)], []]
    gates = torch.tensor([[0.5, 0.25], [1, 0], [0.5, 0.5]], dtype=torch.float64)
    y = ref.combine(outputs, batches, gates, 1)
    assert y.tolist() == [[2.75], [2], [5]]


@pytest.mark.parametrize(
    "activation, expected",
    [
        ("identity", [-2, 3]),
        ("relu", [0, 3]),
        ("gelu", [-2 * 0.0227501319481792, 3 * 0.9986501019683699]),
        ("silu", [-2 * 0.1192029220221176, 3 * 0.9525741268224334]),
        ("tanh", [-0.9640275800758169, 0.9950547536867305]),
        ("sigmoid", [0.1192029220221176, 0.9525741268224334]),
        ("reglu", [0]),
        ("geglu", [-2 * 0.0227501319481792 * 3]),
        ("swiglu", [-2 * 0.1192029220221176 * 3]),
    ],
)
def test_activations(activation, expected):
    assert ref.activate(vec(-2, 3), activation).tolist() == pytest.approx(expected, rel=1e-12)


def test_expert():
    W = [torch.tensor([[1.0, -1], [2, 1]]).double(), torch.tensor([[1.0], [10]]).double()]
    # [3, 1] -> [5, -2] -> relu [5, 0] -> 5
    assert ref.E_i(vec(3, 1), W).tolist() == [5]
    # with biases [5, 1] -> [0, 3]: [5 + 0, -2 + 3] -> [5, 1] -> 15 + 2
    assert ref.E_i(vec(3, 1), W, [vec(0, 3), vec(2)]).tolist() == [17]
    assert ref.E_i(vec(3, 1), W[:1]).tolist() == [5, -2]


def test_moe_by_hand():
    X = torch.tensor([[1.0], [-1.0]]).double()
    W_g = vec(math.log(3), 0, -1)[None]
    experts = [lambda x: x, lambda x: 10 * x, lambda x: 100 * x]
    Y, G_X, importance, load = ref.MoE(X, W_g, None, None, 2, experts)
    # row 1: experts 0, 1 with gates 3/4, 1/4; row 2: logits [-ln 3, 0, 1], experts 2, 1
    e = math.e / (1 + math.e)
    torch.testing.assert_close(Y, vec(0.75 + 2.5, -100 * e - 10 * (1 - e))[:, None])
    torch.testing.assert_close(importance, vec(0.75, 0.25 + 1 - e, e))
    torch.testing.assert_close(G_X.sum(1), vec(1, 1))
    assert load is None
    noisy = ref.MoE(X, W_g, torch.zeros_like(W_g), torch.zeros(2, 3).double(), 2, experts)
    torch.testing.assert_close(noisy[0], Y)
    s = math.log(2) + 0.01
    # the threshold of a member is the third logit, that of the others the second
    ln3 = math.log(3)
    z = [[(ln3 + 1) / s, 1 / s, -1 / s], [-ln3 / s, ln3 / s, (1 + ln3) / s]]
    phi = [[0.5 * math.erfc(-z_i / math.sqrt(2)) for z_i in row] for row in z]
    assert noisy[3].tolist() == pytest.approx([a + b for a, b in zip(*phi, strict=True)], rel=1e-12)


def matrix(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def hierarchy(generator, T, d, a, b, k1):
    """Inputs, weights and noise of a hierarchical mixture, and experts that scale their input."""
    return {
        "X": matrix(generator, T, d),
        "W_g_primary": matrix(generator, d, a),
        "W_noise_primary": matrix(generator, d, a),
        "W_g_secondary": list(matrix(generator, a, d, b)),
        "W_noise_secondary": list(matrix(generator, a, d, b)),
        "noise_primary": matrix(generator, T, a),
        "noise_secondary": matrix(generator, T, k1, b),
    }


def scaling_experts(a, b):
    return [[lambda x, s=1 + i * b + j: s * x for j in range(b)] for i in range(a)]


@pytest.mark.parametrize("level", ["primary", "secondary"])
def test_hierarchy_of_one_group_or_of_groups_of_one(level):
    """a = 1 or b = 1: the flat mixture."""
    generator = torch.Generator().manual_seed(2)
    T, d, n, k = 7, 3, 5, 2
    a, b, k1, k2 = (n, 1, k, 1) if level == "primary" else (1, n, 1, k)
    p = hierarchy(generator, T, d, a, b, k1)
    Y, G_X, importance, load = ref.HierarchicalMoE(**p, k1=k1, k2=k2, experts=scaling_experts(a, b))
    if level == "primary":
        flat = p["W_g_primary"], p["W_noise_primary"], p["noise_primary"]
    else:
        flat = p["W_g_secondary"][0], p["W_noise_secondary"][0], p["noise_secondary"][:, 0]
    experts = [lambda x, s=1 + i: s * x for i in range(n)]
    expected = ref.MoE(p["X"], *flat, k, experts)
    for actual, flat in zip((Y, G_X, importance.flatten(), load.flatten()), expected, strict=True):
        torch.testing.assert_close(actual, flat, rtol=1e-14, atol=1e-14)


def test_load_h_has_a_gradient_to_the_primary_gate():
    """The naive form Load_i(X^(i))_j has none: the paper's reason for the definition."""
    p = hierarchy(torch.Generator().manual_seed(3), T=9, d=4, a=3, b=4, k1=2)
    primary = [p["W_g_primary"].requires_grad_(), p["W_noise_primary"].requires_grad_()]
    secondary = [w.requires_grad_() for w in p["W_g_secondary"] + p["W_noise_secondary"]]
    _, _, load_primary, load_secondary, sizes = ref.hierarchical_gates(**p, k1=2, k2=2)

    naive = ref.CV_squared(torch.cat(load_secondary))
    grads = torch.autograd.grad(naive, primary, allow_unused=True, retain_graph=True)
    assert grads == (None, None)
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(naive, secondary, retain_graph=True))

    load = ref.Load_H(load_primary, load_secondary, sizes)
    grads = torch.autograd.grad(ref.CV_squared(load.flatten()), primary + secondary)
    assert all(g.abs().max() > 0 for g in grads)


def test_forward_steps_of_backpropagation_through_time():
    steps = [ref.C(100, m) / 100 for m in (1, 2, 3, 5, 10, 20, 100)]
    assert steps == [50.5, 9.45, 5.90, 4.16, 3.22, 2.78, 1.99]
