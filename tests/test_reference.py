"""Compares the reference with numbers computed by hand and, for P(x, i), with sampling."""

import math

import pytest
import reference as ref
import torch
from torch.utils._pytree import tree_leaves


def vec(*values):
    return torch.tensor(values, dtype=torch.float64)


def matrix_of(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def routed(logits, b=None, num_groups=1):
    """Routes one token to two experts by sigmoid scores and the best group."""
    return ref.route(logits, 2, b, "sigmoid", num_groups, 1, 2)


# fmt: off
LN2, LN3, LN4, LN5 = (math.log(n) for n in (2, 3, 4, 5))
PHI_1, PHI_MINUS_2, PHI_MINUS_1_5 = 0.8413447460685429, 0.0227501319481792, 0.0668072012688581
# k = 1: expert 0 must exceed 0.5 (z = 1), expert 1 must exceed 2 (z = -2), expert 2 too (-1.5)
ONE_ROW = vec(1, 0, -1), vec(0.5, 1, 2), vec(2, 0.5, -3)
TWO_ROWS = [row.repeat(2, 1) for row in ONE_ROW]
# [3, 1] -> [5, -2] -> relu [5, 0] -> 5; with biases [5, 1] -> 15 + 2
W = [matrix_of([1, -1], [2, 1]), matrix_of([1], [10])]
# The words have p = 1/2, 1/4, 1/4 and lse = ln 4.
WORDS = ref.Logits(vec(1, LN2), matrix_of([0, 1], [0, 0], [0, 0]))
X = matrix_of([0.5, 0.2], [0.3, 0.4], [0.5, 0.1])
TIED, PRIORITY = matrix_of(*[[0.5, 0.5]] * 3), torch.tensor([[2, 1], [0, 1], [1, 0]])
FOUR = vec(0.9, 0.6, 0.5, 0.1)[:, None]
# Scores 0.5, 0.75, 0.25, 0.2 in the groups of experts {0, 1} and {2, 3}. The sums of the biased
# scores of the groups are 1.25 and 1.85.
LOGITS, BIAS = torch.logit(vec(0.5, 0.75, 0.25, 0.2)), vec(0, 0, 1, 0.4)
THREE = vec(0, LN2, LN5)
# Expert 0 has both tokens, expert 1 has one of them.
R_X = ref.relu_gates(torch.eye(2).double(), matrix_of([3, -1], [1, 2]))
DOUBLE = [[2 * torch.eye(2).double()]]  # with one identity expert and one null expert
# Three of four rows choose expert 0, which keeps ceil(4 / 2) = 2 of them.
CROWD = [vec(0.6, 0.4), vec(0.7, 0.3), vec(0.2, 0.8), vec(0.7, 0.3)], [[0], [0], [1], [0]], 1
BY_HAND = [
    ("Eq. 4", lambda: ref.Softplus(vec(0, 25, 800)), [LN2, 25 + math.log1p(math.exp(-25)), 800]),
    ("Eq. 9", lambda: ref.Phi(vec(0, 1, -10)), [0.5, PHI_1, 7.619853024160527e-24]),
    ("Eq. 2", lambda: ref.G_sigma(vec(1), vec(0, LN2, LN5)[None]), [1 / 8, 2 / 8, 5 / 8]),
    ("Eq. 5", lambda: ref.top_k(vec(1, 3, 2), 2), [1, 2]),
    ("Eq. 5", lambda: ref.top_k(vec(2, 1, 2, 2), 3), [0, 2, 3]),
    ("Eq. 5", lambda: ref.top_k(vec(math.nan, -math.inf, 0, math.nan), 4), [2, 1, 0, 3]),
    ("Eq. 5", lambda: ref.KeepTopK(vec(LN3, 7, 0, 8), 2), [-math.inf, 7, -math.inf, 8]),
    ("Eq. 3", lambda: ref.G(vec(LN3, 0, -5, -6), 2), [0.75, 0.25, 0, 0]),
    ("Eq. 4", lambda: ref.H(vec(1, 2), vec(0, 0), vec(2, -1), nu=0.5), [2 + 2 * LN2, 1.5 - LN2]),
    *(("App. A", lambda k=k: [ref.kth_excluding(vec(4, 3, 2, 1), k, i) for i in range(4)], expected)
      for k, expected in [(1, [3, 4, 4, 4]), (2, [2, 2, 3, 3]), (3, [1, 1, 1, 2]),
                          (4, [-math.inf] * 4)]),
    ("Eq. 9", lambda: [ref.P(*ONE_ROW, 1, i) for i in range(3)],
     [PHI_1, PHI_MINUS_2, PHI_MINUS_1_5]),
    ("Eq. 9", lambda: [ref.P(*ONE_ROW, 3, i) for i in range(3)], [1, 1, 1]),
    ("Eq. 10", lambda: ref.Load(*TWO_ROWS, 1), [2 * PHI_1, 2 * PHI_MINUS_2, 2 * PHI_MINUS_1_5]),
    ("Eq. 6", lambda: ref.Importance(matrix_of([0.75, 0.25], [0.25, 0.75], [1, 1])), [2, 2]),
    *(("Eq. 7", lambda v=v: ref.CV_squared(vec(*v)), expected) for v, expected in [
        ([1, 3], 0.25), ([4, 0, 0, 0], 3), ([5], 0), ([0, 0], 0), ([2, 2, 2], 0)]),
    ("Eq. 7", lambda: ref.L_importance(vec(1, 3), 0.1), 0.025),
    ("Eq. 11", lambda: ref.L_load(vec(4, 0, 0, 0), 0.5), 1.5),
    ("Eq. 1", lambda: ref.dispatch(torch.tensor([[2, 0], [0, 1], [2, 1]]), 4),
     [[(0, 1), (1, 0)], [(1, 1), (2, 1)], [(0, 0), (2, 0)], []]),
    ("Eq. 1", lambda: ref.combine(
        [[vec(1), vec(2)], [vec(3), vec(4)], [vec(5), vec(6)], []],
        [[(0, 1), (1, 0)], [(1, 1), (2, 1)], [(0, 0), (2, 0)], []],
        matrix_of([0.5, 0.25], [1, 0], [0.5, 0.5]), 1), [[2.75], [2], [5]]),
    *(("Sec. 3.2", lambda name=name: ref.activate(vec(-2, 3), name), expected)
      for name, expected in {
          "gelu_tanh": [-0.04540230591222494, 2.996362607918227],
          "geglu_tanh": [-0.04540230591222494 * 3],
          "identity": [-2, 3], "relu": [0, 3], "relu_squared": [0, 9],
          "gelu": [-2 * PHI_MINUS_2, 3 * 0.9986501019683699], "geglu": [-2 * PHI_MINUS_2 * 3],
          "silu": [-2 * 0.1192029220221176, 3 * 0.9525741268224334],
          "tanh": [-0.9640275800758169, 0.9950547536867305],
          "sigmoid": [0.1192029220221176, 0.9525741268224334],
          "glu": [0.1192029220221176 * 3], "reglu": [0], "swiglu": [-2 * 0.1192029220221176 * 3],
      }.items()),
    # limit 1, alpha 2, offset 3: sigmoid(2) · (-1 + 3) and -2 · sigmoid(-4) · (1/2 + 3). The limit
    # clamps a = 4 to 1 and b = -5 to -1, but not a = -2.
    *(("Sec. 3.2", lambda name=name, v=v: ref.activate(v, name, (1, 2, 3)),
       [0.8807970779778823 * 2, -2 * 0.01798620996209156 * 3.5])
      for name, v in [("clamped_swiglu", vec(4, -2, -5, 0.5)),
                      ("interleaved_clamped_swiglu", vec(4, -5, -2, 0.5))]),
    ("Sec. 3.2", lambda: ref.E_i(vec(3, 1), W), 5),
    ("Sec. 3.2", lambda: ref.E_i(vec(3, 1), W, [vec(0, 3), vec(2)]), 17),
    ("Sec. 3.2", lambda: ref.E_i(vec(3, 1), W[:1]), [5, -2]),
    ("App. B", lambda: ref.Load_H(vec(6, 2, 1), [vec(1, 2), vec(3, 5), vec(0, 0)], [3, 4, 0]),
     [[2, 4], [1.5, 2.5], [0, 0]]),
    ("App. C.1", lambda: WORDS, [LN2, 0, 0]),
    ("App. C.1", lambda: [ref.CrossEntropy(WORDS, y) for y in (0, 1)], [LN2, LN4]),
    ("App. C.1", lambda: ref.CrossEntropy(WORDS, 0, 3 / 5), 3 / 5 * LN2 + 2 / 5 * LN4),
    ("App. C.1", lambda: ref.CrossEntropy(WORDS, 0, 0.0, 0.5), LN2 + LN4**2 / 2),
    # tanh(ln(3) / 2) = 1/2; a logit far from 0 becomes the softcap.
    ("App. C.1", lambda: ref.Logits(vec(LN3), matrix_of([1], [-1], [1000]), vec(0, 0, 5), 2.0),
     [1, -1, 2]),
    ("App. F", lambda: ref.M_topk(X, 1), [[1, 0], [0, 1], [1, 0]]),
    ("App. F", lambda: ref.M_batchwise(X, 0), [[0, 0]] * 3),
    ("App. F", lambda: ref.M_batchwise(X, 2), [[1, 1], [0, 1], [1, 0]]),
    ("App. F", lambda: ref.M_batchwise(X, 3), [[1, 1]] * 3),
    ("App. F", lambda: ref.M_threshold(X, vec(0.3, 0.1)), [[1, 1], [0, 1], [1, 0]]),
    ("App. F", lambda: ref.M_batchwise(TIED, 1), [[1, 1], [0, 0], [0, 0]]),
    ("App. F", lambda: ref.M_batchwise(TIED, 1, PRIORITY), [[0, 0], [1, 0], [0, 1]]),
    ("App. F", lambda: ref.M_batchwise(TIED, 2, PRIORITY), [[0, 1], [1, 0], [1, 1]]),
    ("App. F", lambda: ref.M_batchwise(vec(0.5 + 1e-9, 0.5, 0.5)[:, None], 1, PRIORITY), [1, 0, 0]),
    *(("App. F", lambda sizes=sizes: ref.rows_per_expert(*sizes), m) for *sizes, m in [
        (2, 8, 4, 4), (1, 5, 2, 3), (1, 7, 3, 2), (1, 8, 3, 3), (1, 1, 9, 1), (4, 3, 2, 3),
        (2, 0, 4, 0)]),
    ("App. F", lambda: ref.G_strict(vec(0.5, 0.3, 0.2), vec(1, 0, 1)), [5 / 7, 0, 2 / 7]),
    ("App. F", lambda: ref.G_strict(vec(0.5, 0.3, 0.2), vec(0, 0, 0)), [0, 0, 0]),
    # m = 2; T = 0.4 also selects 0.5: 0.1; T = 0.8 does not select 0.6: -(0.6 - 0.8)
    *(("App. F", lambda T=T: ref.L_batchwise(FOUR, vec(T), 2), expected)
      for T, expected in [(0.4, 0.1), (0.5, 0), (0.55, 0), (0.6, 0), (0.8, 0.2)]),
    # sums over the experts; the second has m = 2 with 0.9 and 0.5
    *(("App. F", lambda T=T: ref.L_batchwise(torch.cat([FOUR, 1 - FOUR], 1), vec(0.4, T), 2), L)
      for T, L in [(0.45, 0.1), (0.3, 0.2)]),
    ("arXiv 2412.19437", lambda: ref.scores(LOGITS, "sigmoid"), [0.5, 0.75, 0.25, 0.2]),
    ("arXiv 2412.19437", lambda: ref.scores(vec(0), "sqrt_softplus"), LN2**0.5),
    ("arXiv 2408.15664", lambda: [routed(LOGITS), routed(LOGITS, BIAS)], [[1, 0], [2, 1]]),
    ("arXiv 2405.04434", lambda: routed(LOGITS, BIAS, num_groups=2), [2, 3]),
    *(("arXiv 2405.04434", lambda v=v, k=k: ref.best_groups(vec(*v), 2, 1, k), expected)
      for v, k, expected in [((0.9, 0.1, 0.6, 0.5), 1, 0), ((0.9, 0.1, 0.6, 0.5), 2, 1),
                             ((math.nan, 9, 0.6, 0.5), 2, 1)]),
    ("arXiv 2412.19437", lambda: ref.gates_of(LOGITS, [2, 1], "sigmoid", True, 2.5),
     [0.625, 1.875]),
    ("arXiv 2412.19437", lambda: ref.gates_of(THREE, [2, 1], "softmax", False, 1.0), [0.625, 0.25]),
    ("arXiv 2412.19437", lambda: ref.gates_of(THREE, [2, 1], "softmax", True, 1.0), [5 / 7, 2 / 7]),
    ("Sec. 3.1", lambda: [ref.C(100, m) / 100 for m in (1, 2, 3, 5, 10, 20, 100)],
     [50.5, 9.45, 5.90, 4.16, 3.22, 2.78, 1.99]),
    # f = (2/4, 1/4, 1/4) and P = (0.4, 0.4, 0.2) for two rows with two of three experts
    ("arXiv 2101.03961", lambda: ref.L_switch([vec(0.5, 0.3, 0.2), vec(0.3, 0.5, 0.2)],
                                              [[0, 1], [2, 0]]), 1.05),
    ("arXiv 2101.03961", lambda: ref.L_switch([vec(0.25, 0.75)], [[1]]), 1.5),
    ("arXiv 2101.03961", lambda: ref.L_switch([vec(0.5, 0.5)] * 2, [[1], [1]]), 1),
    *(("arXiv 2101.03961", lambda rule=rule: ref.kept_by_capacity(*CROWD, *rule), kept)
      for rule, kept in [((1.0, "position"), [[1, 0], [1, 0], [0, 1], [0, 0]]),
                              ((1.0, "score"), [[0, 0], [1, 0], [0, 1], [1, 0]]),
                              ((0.4, "score"), [[0, 0], [1, 0], [0, 1], [0, 0]])]),
    ("arXiv 2202.08906", lambda: ref.L_z([vec(0, 0), vec(LN3, 0)]), (LN2**2 + LN4**2) / 2),
    # Each of two experts takes one of two rows: the row with its largest softmax.
    ("arXiv 2202.09368", lambda: ref.expert_choice_gates(
        torch.eye(2).double(), matrix_of([LN3, 0], [0, 0]), 1), [[0.75, 0], [0, 0.5]]),
    ("arXiv 2412.14711", lambda: R_X, [[3, 0], [1, 2]]),
    # f = (2, 1) for k = 1: (2 (3 + 1) + 1 · 2) / 2
    ("arXiv 2412.14711", lambda: [ref.L_reg_lb(R_X, 1), ref.L_reg_lb(R_X, 2)], [5, 2.5]),
    # S = 1/4 is below 1 - 1/2, and above 1 - 2/2
    ("arXiv 2412.14711", lambda: [ref.next_lambda(6.0, 1.5, R, k)
                                  for R, k in ((R_X, 1), (R_X, 2), (R_X[:1], 1))], [9, 4, 6]),
    ("arXiv 2410.07348", lambda: ref.zero_computation(vec(1, 2), vec(0.5, 0.3, 0.2), DOUBLE, 1),
     [1.3, 2.6]),
    ("arXiv 2410.07348", lambda: ref.zero_computation(vec(1, 2), vec(0, 0, 1), DOUBLE, 1), [0, 0]),
]
# fmt: on


def numbers_in(values):
    leaves = [torch.as_tensor(x, dtype=torch.float64) for x in tree_leaves(values)]
    return torch.cat([x.flatten() for x in leaves]).tolist()


@pytest.mark.parametrize(
    "compute, expected",
    [
        pytest.param(*rest, id=f"{equation} {number}", marks=pytest.mark.equation(equation))
        for number, (equation, *rest) in enumerate(BY_HAND)
    ],
)
def test_by_hand(compute, expected):
    assert numbers_in(compute()) == pytest.approx(numbers_in(expected), rel=1e-12, abs=1e-15)


@pytest.mark.equation("App. A")
def test_kth_excluding_is_a_neighbour_in_the_order():
    """Returns H_(k+1) for experts in the top k, and H_(k) for the others."""
    h = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = ref.top_k(h, 9)
    for k in range(1, 9):
        for i in range(9):
            expected = h[order[k]] if i in order[:k] else h[order[k - 1]]
            assert ref.kth_excluding(h, k, i) == expected


@pytest.mark.equation("Eq. 8")
@pytest.mark.parametrize("n, k", [(5, 1), (5, 2), (5, 4), (8, 2), (8, 7)])
def test_probability_by_sampling(n, k):
    """Allows 4 sigma on n components.

    A correct P fails with probability 5e-4 for n = 8; the seed is fixed. The term 2 / draws covers
    probabilities so small that a count is far from normal.
    """
    draws = 20_000
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


@pytest.mark.equation("Eq. 1")
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
    # the threshold of an expert in the top 2 is the third logit, that of the others the second
    ln3 = math.log(3)
    z = [[(ln3 + 1) / s, 1 / s, -1 / s], [-ln3 / s, ln3 / s, (1 + ln3) / s]]
    phi = [[0.5 * math.erfc(-z_i / math.sqrt(2)) for z_i in row] for row in z]
    assert noisy[3].tolist() == pytest.approx([a + b for a, b in zip(*phi, strict=True)], rel=1e-12)


def matrix(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def hierarchy(generator, T, d, a, b, k1):
    """Makes inputs, weights and noise of a hierarchical mixture; experts scale their input."""
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


@pytest.mark.equation("App. B", "Eq. 12")
def test_hierarchy_by_hand():
    X = torch.tensor([[1.0], [-1.0]]).double()
    primary = vec(math.log(3), 0)[None]
    secondary = [vec(0, math.log(4))[None], vec(0, 0)[None]]
    gates = X, primary, None, secondary, None, None, None
    Y, G_X, importance, load = ref.HierarchicalMoE(*gates, 2, 2, scaling_experts(2, 2))
    # primary gates 3/4, 1/4 and 1/4, 3/4; in group 0 1/5, 4/5 and 4/5, 1/5; in group 1 1/2
    torch.testing.assert_close(G_X[0], vec(0.15, 0.6, 0.125, 0.125))
    torch.testing.assert_close(G_X[1], vec(0.2, 0.05, 0.375, 0.375))
    torch.testing.assert_close(Y[:, 0], vec(0.15 + 1.2 + 0.875, -0.2 - 0.1 - 2.625))
    torch.testing.assert_close(importance, torch.stack([vec(0.35, 0.65), vec(0.5, 0.5)]))
    assert load is None
    # k = 1 + 1: one gate of 1; row 0 selects expert (0, 1), row 1 the first of the tie in group 1
    Y, G_X, importance, load = ref.HierarchicalMoE(*gates, 1, 1, scaling_experts(2, 2))
    assert G_X.tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    assert Y.tolist() == [[2], [-3]]


@pytest.mark.equation("App. B", "Eq. 12")
def test_hierarchy_evaluates_only_the_experts_of_its_gates():
    p = hierarchy(torch.Generator().manual_seed(4), T=6, d=3, a=4, b=3, k1=2)
    calls = [[0] * 3 for _ in range(4)]

    def expert(i, j):
        def E_ij(x):
            calls[i][j] += 1
            return x

        return E_ij

    experts = [[expert(i, j) for j in range(3)] for i in range(4)]
    Y, G_X, importance, _ = ref.HierarchicalMoE(**p, k1=2, k2=2, experts=experts)
    torch.testing.assert_close(Y, p["X"])  # identity experts, and the gates of a row sum to 1
    assert (G_X > 0).sum(1).tolist() == [4] * 6
    assert torch.tensor(calls).equal((G_X > 0).sum(0).view(4, 3))
    torch.testing.assert_close(importance, G_X.sum(0).view(4, 3))


@pytest.mark.equation("App. B")
def test_secondary_noise_belongs_to_the_slot():
    """The slots of a row are ordered by decreasing primary H."""
    X = torch.tensor([[1.0], [-1.0]]).double()
    zeros = torch.zeros(1, 2).double()
    noise = torch.zeros(2, 2, 2).double()
    noise[:, 0, 1] = 1
    gates = X, vec(1, 0)[None], zeros, [zeros] * 2, [zeros] * 2, torch.zeros(2, 2).double(), noise
    _, G_X, _, _ = ref.HierarchicalMoE(*gates, 2, 1, scaling_experts(2, 2))
    # the noise raises expert 1 of the first slot's group: group 0 for row 0, group 1 for row 1
    assert (G_X > 0).tolist() == [[False, True, True, False], [True, False, False, True]]


@pytest.mark.equation("App. B")
def test_load_h_of_one_row():
    """In a group without rows, every expert has load 0, and no gradient is NaN."""
    zeros = torch.zeros(1, 2).double()
    primary = vec(1, 0)[None].requires_grad_()
    secondary = [vec(0, 2)[None].requires_grad_(), vec(1, 1)[None].requires_grad_()]
    noise = torch.zeros(1, 2).double(), torch.zeros(1, 1, 2).double()
    gates = vec(1)[None], primary, zeros, secondary, [zeros] * 2, *noise
    load = ref.HierarchicalMoE(*gates, 1, 1, scaling_experts(2, 2))[3]
    s = math.log(2) + 0.01
    phi = [0.5 * math.erfc(-z / s / math.sqrt(2)) for z in (1, -2, 2)]
    expected = vec(phi[0] * phi[1], phi[0] * phi[2], 0, 0)
    torch.testing.assert_close(load.flatten(), expected, rtol=1e-14, atol=0)
    grads = torch.autograd.grad(ref.CV_squared(load.flatten()), [primary, secondary[0]])
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads)


@pytest.mark.equation("App. B")
def test_load_h_with_all_experts_of_a_group():
    """With k2 = b, Load_i(X^(i))_j = |X^(i)|: every expert has the load of its group."""
    p = hierarchy(torch.Generator().manual_seed(5), T=8, d=3, a=4, b=2, k1=1)
    _, _, load_primary, load_secondary, sizes = ref.hierarchical_gates(**p, k1=1, k2=2)
    assert sum(sizes) == 8
    assert [row.tolist() for row in load_secondary] == [[size] * 2 for size in sizes]
    load = ref.Load_H(load_primary, load_secondary, sizes)
    taken = (torch.tensor(sizes) > 0).double()
    torch.testing.assert_close(load, (load_primary * taken)[:, None].expand(4, 2))


@pytest.mark.equation("App. B")
def test_hierarchy_gradients_are_those_of_finite_differences():
    p = hierarchy(torch.Generator().manual_seed(6), T=4, d=2, a=3, b=3, k1=2)
    names = [name for name in p if not name.startswith("noise")]
    p = {name: torch.stack(list(p[name])).requires_grad_(name in names) for name in p}

    def outputs(*values):
        Y, _, importance, load = ref.HierarchicalMoE(
            **{**p, **dict(zip(names, values, strict=True))},
            k1=2,
            k2=2,
            experts=scaling_experts(3, 3),
        )
        return Y, importance, load

    assert torch.autograd.gradcheck(outputs, [p[name] for name in names], fast_mode=True)


@pytest.mark.equation("App. B")
@pytest.mark.parametrize("level", ["primary", "secondary"])
def test_hierarchy_of_one_group_or_of_groups_of_one(level):
    """With a = 1 or b = 1, the result is that of the flat mixture."""
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


@pytest.mark.equation("App. B")
def test_load_h_has_a_gradient_to_the_primary_gate():
    """The naive Load_i(X^(i))_j has no gradient for it, which is the paper's reason for Load_H."""
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


@pytest.mark.equation("App. C.1")
def test_lstm_by_hand():
    """A unit whose gates are 1/2, 1/2, tanh(x) and 1/2, with the projection 2 and no recurrence."""
    W, R, b = (vec(*values) for values in ((0, 0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0)))
    x, P = vec(0.5, -1).unsqueeze(1), vec(2).unsqueeze(0)
    outputs, m, c = ref.LSTM(x, W[:, None], R[:, None], b, P, vec(3), vec(4))
    c_1 = 2 + math.tanh(0.5) / 2
    c_2 = c_1 / 2 + math.tanh(-1) / 2
    assert torch.stack(outputs).flatten().tolist() == pytest.approx(
        [math.tanh(c_1), math.tanh(c_2)]
    )
    assert (m.item(), c.item()) == (outputs[1].item(), pytest.approx(c_2))


@pytest.mark.equation("App. C.1")
def test_lstm_recurrence_by_hand():
    """The output reaches the forget gate of the next step; m_t is o_t tanh(c_t) without P."""
    W, R, b = vec(0, 0, 0, 0)[:, None], vec(0, 2, 0, 0)[:, None], vec(0, 0, 1, 0)
    outputs, m, c = ref.LSTM(vec(0, 0)[:, None], W, R, b, None, vec(0), vec(0))
    c_1 = math.tanh(1) / 2
    m_1 = math.tanh(c_1) / 2
    c_2 = c_1 / (1 + math.exp(-2 * m_1)) + math.tanh(1) / 2
    assert outputs[0].item() == pytest.approx(m_1)
    assert c.item() == pytest.approx(c_2) and m.item() == pytest.approx(math.tanh(c_2) / 2)


@pytest.mark.equation("App. F")
def test_strict_gates_of_the_top_k_mask_are_those_of_top_k_gating():
    generator = torch.Generator().manual_seed(7)
    X, W_g = matrix(generator, 6, 3), matrix(generator, 3, 5)
    G_sigma_X = torch.stack([ref.G_sigma(x, W_g) for x in X])
    for g_sigma, M, c in zip(G_sigma_X, ref.M_topk(G_sigma_X, 2), X @ W_g, strict=True):
        expected = ref.G(c, 2)
        torch.testing.assert_close(ref.G_strict(g_sigma, M), expected, rtol=1e-14, atol=0)


@pytest.mark.equation("App. F")
def test_strict_gates_have_the_gradient_of_a_softmax_over_the_mask():
    """dL/dc_i = G_i (v_i - sum_a G_a v_a); experts outside the mask have gradient 0."""
    c, v = matrix(torch.Generator().manual_seed(8), 2, 5)
    M = vec(1, 0, 1, 1, 0)
    c.requires_grad_()
    gates = ref.G_strict(ref.Softmax(c), M)
    (grad,) = torch.autograd.grad(gates @ v, c)
    torch.testing.assert_close(grad, gates * (v - gates @ v), rtol=1e-12, atol=1e-15)


@pytest.mark.equation("App. F")
@pytest.mark.parametrize("m", [1, 3, 8])
def test_l_batchwise_is_convex_in_the_threshold(m):
    """Its slope is m - #{j : X_j > T}, and it is 0 exactly from X_(m+1) to X_(m)."""
    X = torch.rand(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    order = X[:, 0].sort(descending=True).values
    lower = order[m] if m < 8 else -math.inf
    for step in range(-10, 130):
        T = vec(step / 120).requires_grad_()
        L = ref.L_batchwise(X, T, m)
        (slope,) = torch.autograd.grad(L, T)
        assert float(slope) == m - int((X > T).sum())
        if lower <= T <= order[m - 1]:
            assert float(L) == 0
        else:
            assert float(L) > 0


@pytest.mark.equation("App. F")
def test_l_batchwise_gradient_to_the_scores():
    X = vec(0.9, 0.6, 0.5, 0.1)[:, None].requires_grad_()
    (grad,) = torch.autograd.grad(ref.L_batchwise(X, vec(0.05), 2), X)
    assert grad.tolist() == [[0], [0], [1], [1]]


@pytest.mark.equation("App. F")
def test_balanced_moe_by_hand():
    # softmax gates of [x, 0]: 3/4, 1/4 for x = ln 3; m = 1·4 / 2
    X = vec(math.log(3), math.log(4), math.log(2), -math.log(2))[:, None]
    experts = [lambda x: x, lambda x: 10 * x]
    W_g = vec(1, 0)[None]
    Y, G_X, importance, L = ref.BalancedMoE(X, W_g, 1, experts, 1, T=vec(0.7, 0.3))
    assert G_X.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    torch.testing.assert_close(Y, torch.cat([X[:2], 10 * X[2:]]))
    assert importance.tolist() == [2, 2] and float(L) == 0
    # evaluation: compares the gates 3/4, 1/4; 4/5, 1/5; 2/3, 1/3; 1/3, 2/3 with the thresholds
    _, G_X, _, _ = ref.BalancedMoE(X, W_g, 1, experts, 1, T=vec(0.7, 0.24), training=False)
    expected = torch.stack([vec(0.75, 0.25), vec(1, 0), vec(0, 1), vec(0, 1)])
    torch.testing.assert_close(G_X, expected)
    Y, G_X, importance, L = ref.BalancedMoE(X, W_g, 1, experts, 1, T=vec(0.7, 0.4), training=False)
    assert G_X.tolist() == [[1, 0], [1, 0], [0, 0], [0, 1]]
    torch.testing.assert_close(Y[:, 0], X[:, 0] * vec(1, 1, 0, 10))
    assert importance.tolist() == [2, 1] and L is None


@pytest.mark.equation("App. F")
def test_balanced_moe_gives_every_expert_m_rows():
    generator = torch.Generator().manual_seed(10)
    X, W_g = matrix(generator, 11, 3), matrix(generator, 3, 4)
    experts = [lambda x: x] * 4
    Y, G_X, importance, L = ref.BalancedMoE(X, W_g, 1, experts, 3)
    assert (G_X > 0).sum(0).tolist() == [3] * 4  # 11 / 4 = 2.75
    chosen = (G_X > 0).any(1).double()
    assert 0 < chosen.sum() < 11  # no expert selects some rows: their output is 0
    torch.testing.assert_close(G_X.sum(1), chosen)
    torch.testing.assert_close(Y, X * chosen[:, None])
    assert float(importance.sum()) == pytest.approx(float(chosen.sum())) and L is None


@pytest.mark.equation("App. F")
def test_thresholds_between_the_ranks_give_the_gates_of_training():
    generator = torch.Generator().manual_seed(11)
    X, W_g, m = matrix(generator, 9, 3), matrix(generator, 3, 4), 5
    ranked = torch.softmax(X @ W_g, 1).sort(0, descending=True).values
    T = (ranked[m - 1] + ranked[m]) / 2
    G_X, M, L = ref.balanced_gates(X, W_g, 2, T)
    assert float(L) == 0
    evaluated, mask, _ = ref.balanced_gates(X, W_g, 2, T, training=False)
    assert mask.equal(M) and evaluated.equal(G_X)
    alone, _, _ = ref.balanced_gates(X[3:4], W_g, 2, T, training=False)
    torch.testing.assert_close(alone[0], G_X[3], rtol=1e-14, atol=0)  # for any other gates


@pytest.mark.equation("App. F")
def test_thresholds_alone_are_trained_by_l_batchwise():
    generator = torch.Generator().manual_seed(12)
    X, W_g = matrix(generator, 6, 3), matrix(generator, 3, 4).requires_grad_()
    T = vec(0.1, 0.2, 0.3, 0.4).requires_grad_()
    G_X, _, L = ref.balanced_gates(X, W_g, 2, T)
    grads = torch.autograd.grad(L, [T, W_g], allow_unused=True)
    count = (torch.softmax(X @ W_g, 1) > T).sum(0)
    assert grads[0].equal(3.0 - count) and grads[1] is None
    assert torch.autograd.grad(G_X.square().sum(), T, allow_unused=True) == (None,)


@pytest.mark.equation("App. F")
def test_balanced_moe_of_no_rows():
    X, W_g, T = torch.zeros(0, 3).double(), torch.zeros(3, 4).double(), torch.zeros(4).double()
    for training in (True, False):
        Y, G_X, importance, _ = ref.BalancedMoE(X, W_g, 2, [None] * 4, 5, T, training=training)
        assert Y.shape == (0, 5) and G_X.shape == (0, 4) and importance.tolist() == [0] * 4


@pytest.mark.equation("App. F", "App. B")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["primary", "secondary"])
def test_balanced_hierarchy_of_one_group_or_of_groups_of_one(level, training):
    generator = torch.Generator().manual_seed(13)
    X, W_g, T = matrix(generator, 9, 3), matrix(generator, 3, 4), vec(0.2, 0.3, 0.1, 0.25)
    one, below = torch.zeros(3, 1).double(), vec(0.5)
    experts = [lambda x, s=1 + i: s * x for i in range(4)]
    expected = ref.BalancedMoE(X, W_g, 2, experts, 3, T, training=training)
    if level == "primary":
        gates, k = (X, W_g, [one] * 4), (2, 1)
        grouped, thresholds = [[E] for E in experts], (T, [below] * 4)
    else:
        gates, k = (X, one, [W_g]), (1, 2)
        grouped, thresholds = [experts], (below, [T])
    Y, G_X, importance, L = ref.HierarchicalBalancedMoE(
        *gates, *k, grouped, 3, *thresholds, training=training
    )
    assert G_X.equal(expected[1])
    torch.testing.assert_close(Y, expected[0])
    torch.testing.assert_close(importance.flatten(), expected[2])
    # a gate with a single expert selects all its rows by both masks: its loss is 0
    assert expected[3] == L


@pytest.mark.equation("App. F", "App. B")
def test_balanced_hierarchy_gives_every_expert_m2_rows():
    generator = torch.Generator().manual_seed(14)
    X, primary = matrix(generator, 12, 3), matrix(generator, 3, 4)
    secondary = list(matrix(generator, 4, 3, 2))
    k1, k2, m1, m2 = 2, 1, 6, 3
    T = vec(0.2, 0.3, 0.1, 0.25), [vec(0.5, 0.4)] * 4
    Y, G_X, importance, L = ref.HierarchicalBalancedMoE(
        X, primary, secondary, k1, k2, scaling_experts(4, 2), 3, *T
    )
    assert (G_X > 0).sum(0).tolist() == [m2] * 8
    torch.testing.assert_close(importance, G_X.sum(0).view(4, 2))
    torch.testing.assert_close(Y, X * (G_X @ torch.arange(1.0, 9).double())[:, None])

    scores = torch.softmax(X @ primary, 1)
    M = ref.M_batchwise(scores, m1)
    expected = ref.L_batchwise(scores, T[0], m1)
    for i in range(4):
        rows = M[:, i] == 1
        assert int(rows.sum()) == m1
        inside = torch.softmax(X[rows] @ secondary[i], 1)
        expected = expected + ref.L_batchwise(inside, T[1][i], m2)
        # both levels select: a group its rows, and each of its experts the top m2 of these
        both = ref.M_batchwise(inside, m2)
        assert (G_X[rows][:, 2 * i : 2 * i + 2] > 0).equal(both == 1)
        assert not G_X[~rows][:, 2 * i : 2 * i + 2].any()
    assert float(L) == pytest.approx(float(expected))


@pytest.mark.equation("App. F", "App. B")
def test_balanced_hierarchy_breaks_ties_by_priority():
    """At the symmetric start, all scores tie; the secondary priority has the rows of the group."""
    X = torch.ones(4, 1).double()
    primary = torch.tensor([[3, 0], [1, 1], [0, 2], [2, 3]])
    secondary = [torch.tensor([[0, 1], [1, 0]])] * 2
    _, G_X, _, _ = ref.HierarchicalBalancedMoE(
        X,
        torch.zeros(1, 2).double(),
        [torch.zeros(1, 2).double()] * 2,
        1,
        1,
        scaling_experts(2, 2),
        1,
        priority_primary=primary,
        priority_secondary=secondary,
    )
    # group 0 selects rows 1, 2, group 1 selects rows 0, 1; each expert selects one of the two rows
    assert G_X.tolist() == [[0, 0, 1, 0], [0.5, 0, 0, 0.5], [0, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.equation("App. D")
def test_factored_adam_by_hand():
    w, g = torch.zeros(2, 2).double(), torch.stack([vec(1, 2), vec(3, 0)])
    state = torch.zeros(2).double(), torch.zeros(2).double()
    # means of g²: rows 2.5, 4.5, columns 5, 2, all 3.5; the first correction cancels 1 - beta2
    w, vr, vc = ref.FactoredAdam(w, g, *state, 1, lr=0.1, beta2=0.98, eps=0)
    torch.testing.assert_close(vr, 0.02 * vec(2.5, 4.5))
    torch.testing.assert_close(vc, 0.02 * vec(5, 2))
    V = torch.stack([vec(12.5, 5), vec(22.5, 9)]) / 3.5
    torch.testing.assert_close(w, -0.1 * g / V.sqrt())
    again, vr, vc = ref.FactoredAdam(w, 2 * g, vr, vc, 2, lr=0.1, beta2=0.98, eps=1e-3)
    # the second means are (0.98·1 + 4) / (0.98 + 1) times the first
    torch.testing.assert_close(vr, 0.02 * 4.98 * vec(2.5, 4.5))
    expected = w - 0.2 * g / ((V * 4.98 / 1.98).sqrt() + 1e-3)
    torch.testing.assert_close(again, expected)


def rank_one_gradients(steps):
    """Makes matrices with random signs whose squares are multiples of one outer product."""
    generator = torch.Generator().manual_seed(15)
    u, v = matrix(generator, 3), matrix(generator, 5)
    for _ in range(steps):
        yield matrix(generator, 1) * u[:, None] * v * matrix(generator, 3, 5).sign()


@pytest.mark.equation("App. D")
def test_factoring_is_exact_for_squares_of_rank_one():
    w = {rule: torch.ones(3, 5).double() for rule in ("adam", "factored", "adagrad", "sums")}
    vr, vc, sr, sc = (torch.zeros(n).double() for n in (3, 5, 3, 5))
    v, s = torch.zeros(2, 3, 5).double()
    for t, g in enumerate(rank_one_gradients(4), 1):
        w["adam"], v = ref.Adam(w["adam"], g, v, t, 0.1, 0.9, 1e-4)
        w["factored"], vr, vc = ref.FactoredAdam(w["factored"], g, vr, vc, t, 0.1, 0.9, 1e-4)
        w["adagrad"], s = ref.Adagrad(w["adagrad"], g, s, 0.1, 1e-4)
        w["sums"], sr, sc = ref.FactoredAdagrad(w["sums"], g, sr, sc, 0.1, 1e-4)
        torch.testing.assert_close(ref.V_factored(vr, vc), v)
        torch.testing.assert_close(ref.V_factored(sr, sc), s)
    torch.testing.assert_close(w["factored"], w["adam"])
    torch.testing.assert_close(w["sums"], w["adagrad"])
    assert not w["sums"].allclose(w["factored"])


@pytest.mark.equation("App. D")
def test_factors_keep_the_averages():
    """For any gradients, the row and column means of V are those of the squares."""
    generator = torch.Generator().manual_seed(16)
    w, v = torch.zeros(2, 3, 5).double()
    vr, vc = torch.zeros(3).double(), torch.zeros(5).double()
    for t in range(1, 4):
        g = matrix(generator, 3, 5)
        _, v = ref.Adam(w, g, v, t, 0.1, 0.9, 1e-8)
        w, vr, vc = ref.FactoredAdam(w, g, vr, vc, t, 0.1, 0.9, 1e-8)
    V = ref.V_factored(vr, vc)
    torch.testing.assert_close(V.mean(1), v.mean(1))
    torch.testing.assert_close(V.mean(0), v.mean(0))
    assert not V.allclose(v)


@pytest.mark.equation("App. D")
def test_diet_denominator():
    """The denominator is the paper's times sqrt(mean vc) / mean sqrt(vc), one factor per matrix."""
    w, g = torch.zeros(2, 2).double(), torch.stack([vec(1, 2), vec(3, 0)])
    step = {"w": w, "g": g, "vr": w[0], "vc": w[0], "t": 1, "lr": 0.1, "beta2": 0.98}
    paper, vr, vc = ref.FactoredAdam(**step, eps=0)
    diet, *state = ref.FactoredAdam(**step, eps=0, denominator="diet")
    assert state[0].equal(vr) and state[1].equal(vc)
    constant = math.sqrt(3.5) / ((math.sqrt(5) + math.sqrt(2)) / 2)
    assert constant > 1
    torch.testing.assert_close(diet * constant, paper)
    # eps = 1 is added to each root: (sqrt(2.5) + 1)(sqrt(5) + 1) / (mean sqrt(vc) + 1) for g_00
    diet, _, _ = ref.FactoredAdam(**step, eps=1, denominator="diet")
    d = (math.sqrt(2.5) + 1) * (math.sqrt(5) + 1) / ((math.sqrt(5) + math.sqrt(2)) / 2 + 1)
    assert float(diet[0, 0]) == pytest.approx(-0.1 / d)


@pytest.mark.equation("App. D")
@pytest.mark.parametrize("denominator", ["paper", "diet"])
def test_a_matrix_without_gradient_stays(denominator):
    """No 0 / 0 occurs before the first gradient; later the moments decay."""
    w, zero = torch.ones(2, 3).double(), torch.zeros(3).double()
    step = {"g": 0 * w, "lr": 0.1, "beta2": 0.5, "eps": 1e-8, "denominator": denominator}
    same, vr, vc = ref.FactoredAdam(w, vr=zero[:2], vc=zero, t=1, **step)
    assert same.equal(w) and not vr.any() and not vc.any()
    same, vr, vc = ref.FactoredAdam(w, vr=zero[:2] + 1, vc=zero + 1, t=2, **step)
    assert same.equal(w) and vr.tolist() == [0.5] * 2 and vc.tolist() == [0.5] * 3
    same, _, _ = ref.FactoredAdagrad(w, 0 * w, zero[:2], zero, 0.1, 1e-8)
    assert same.equal(w)


@pytest.mark.equation("App. D")
def test_unfactored_rules_are_those_of_torch():
    generator = torch.Generator().manual_seed(17)
    w, v, sums = matrix(generator, 5), torch.zeros(5).double(), torch.zeros(5).double()
    adam, adagrad = w.clone().requires_grad_(), w.clone().requires_grad_()
    optimizers = [
        torch.optim.Adam([adam], lr=0.1, betas=(0.0, 0.98), eps=1e-3),
        torch.optim.Adagrad([adagrad], lr=0.1, eps=1e-3),
    ]
    other = w
    for t in range(1, 4):
        g = matrix(generator, 5)
        adam.grad, adagrad.grad = g.clone(), g.clone()
        for optimizer in optimizers:
            optimizer.step()
        w, v = ref.Adam(w, g, v, t, 0.1, 0.98, 1e-3)
        other, sums = ref.Adagrad(other, g, sums, 0.1, 1e-3)
    torch.testing.assert_close(w, adam.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(other, adagrad.detach(), rtol=1e-13, atol=0)


@pytest.mark.equation("Sec. 3.1")
def test_recurrent_mixture_by_hand():
    """Uses a single unit: each gate's preactivation is the bias; the mixture adds 0 or not."""
    X, h, c = vec(2)[None], vec(3)[None], vec(0.5)[None]
    b = vec(
        math.log(3), -math.log(3), math.atanh(0.5), 0
    )  # i = 3/4, f = 1/4, tanh(j) = 1/2, o = 1/2
    W_g = torch.zeros(2, 2).double()
    experts = [lambda x: x[0] * vec(0, 0, 0, 0), lambda x: x[1] * vec(0, 0, 0, math.log(3) / 3)]
    gates = X, h, c, W_g, None, None
    h1, c1, G_X, importance, load = ref.MoELSTM_step(*gates, 1, experts, b)
    assert float(c1) == pytest.approx(0.125 + 0.375)
    assert float(h1) == pytest.approx(0.5 * math.tanh(0.5))
    assert G_X.tolist() == [[1, 0]] and importance.tolist() == [1, 0] and load is None
    h1, c1, _, _, _ = ref.MoELSTM_step(*gates, 1, experts[::-1], b)  # o = sigmoid(ln 3)
    assert float(h1) == pytest.approx(0.75 * math.tanh(0.5))


@pytest.mark.equation("Sec. 3.1")
@pytest.mark.parametrize("n, k", [(1, 1), (3, 2)])
def test_recurrent_mixture_is_an_lstm_with_the_mixed_matrix(n, k):
    generator = torch.Generator().manual_seed(18)
    d_in, u = 3, 2
    x, h, c = matrix(generator, 1, d_in), matrix(generator, 1, u), matrix(generator, 1, u)
    W = matrix(generator, n, d_in + u, 4 * u)
    b, W_g, W_noise = matrix(generator, 4 * u), *matrix(generator, 2, d_in + u, n)
    experts = [lambda x, i=i: ref.E_i(x, [W[i]]) for i in range(n)]
    noise = matrix(generator, 1, n)
    h1, c1, G_X, importance, load = ref.MoELSTM_step(x, h, c, W_g, W_noise, noise, k, experts, b)
    mixed = (G_X[0][:, None, None] * W).sum(0)
    expected = torch.lstm_cell(x, (h, c), mixed[:d_in].T, mixed[d_in:].T, b, torch.zeros_like(b))
    torch.testing.assert_close((h1, c1), expected)
    assert importance.equal(G_X[0]) and (G_X > 0).sum() == k
    assert load.equal(ref.MoE(torch.cat([x, h], 1), W_g, W_noise, noise, k, experts)[3])


@pytest.mark.equation("Sec. 3.1")
def test_forward_steps_are_those_of_optimal_checkpointing():
    """Griewank and Walther 2000: (r + 1) t - binomial(m + r, r - 1), binomial(m + r, r) >= t."""
    for t in range(1, 40):
        for m in range(1, 45):
            r = next(r for r in range(t) if math.comb(m + r, r) >= t)
            expected = (r + 1) * t - (math.comb(m + r, r - 1) if r else 0)
            assert ref.C(t, m) == expected


@pytest.mark.equation("App. G")
def test_attention_by_hand():
    """Uses tanh(artanh a) = a and tanh(artanh a + artanh b) = (a + b) / (1 + a b)."""
    U, W, V = vec(1, 0)[None], vec(1, 2)[None], vec(10, 7)  # the second column of x U is 0
    x, y = vec(math.atanh(0.5)), vec(math.atanh(0.2))
    assert float(ref.A(x, y, U, W, V)) == pytest.approx(10 * 0.5 * 0.2, rel=1e-15)
    first, second = 10 * 0.7 / 1.1, 7 * 0.4 / 1.04
    assert float(ref.A_GNMT(x, y, U, W, V)) == pytest.approx(first + second, rel=1e-15)
    # Scores ln 3 and 0: weights 3 : 1.
    X = torch.stack([vec(math.atanh(math.log(3) / 2)), vec(0)])
    p, context = ref.attend(ref.A, X, y, U, W, V)
    torch.testing.assert_close(p, vec(3, 1) / 4, rtol=1e-15, atol=0)
    torch.testing.assert_close(context, 0.75 * X[0], rtol=1e-15, atol=0)
