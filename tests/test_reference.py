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
DOUBLE = [lambda x: 2 * x]  # with one identity expert and one null expert
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


@pytest.mark.equation("App. B", "Eq. 12")
def test_hierarchy_by_hand():
    X = torch.tensor([[1.0], [-1.0]]).double()
    primary = vec(math.log(3), 0)[None]
    secondary = [vec(0, math.log(4))[None], vec(0, 0)[None]]

    def gates(k1, k2):
        level_gates = ref.hierarchical_gates(X, primary, None, secondary, None, None, None, k1, k2)
        return torch.stack([ref.G_H(*row) for row in zip(*level_gates[:2], strict=True)])

    # primary gates 3/4, 1/4 and 1/4, 3/4; in group 0 1/5, 4/5 and 4/5, 1/5; in group 1 1/2
    expected = torch.stack([vec(0.15, 0.6, 0.125, 0.125), vec(0.2, 0.05, 0.375, 0.375)])
    torch.testing.assert_close(gates(2, 2), expected)
    # k = 1 + 1: one gate of 1; row 0 selects expert (0, 1), row 1 the first of the tie in group 1
    assert gates(1, 1).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]


@pytest.mark.equation("App. B")
def test_secondary_noise_belongs_to_the_slot():
    """The slots of a row are ordered by decreasing primary H."""
    X = torch.tensor([[1.0], [-1.0]]).double()
    zeros = torch.zeros(1, 2).double()
    noise = torch.zeros(2, 2, 2).double()
    noise[:, 0, 1] = 1
    gates = X, vec(1, 0)[None], zeros, [zeros] * 2, [zeros] * 2, torch.zeros(2, 2).double(), noise
    _, secondary, *_ = ref.hierarchical_gates(*gates, 2, 1)
    # the noise raises expert 1 of the first slot's group: group 0 for row 0, group 1 for row 1
    assert secondary.tolist() == [[[0, 1], [1, 0]], [[1, 0], [0, 1]]]


@pytest.mark.equation("App. B")
def test_load_h_of_one_row():
    """In a group without rows, every expert has load 0, and no gradient is NaN."""
    zeros = torch.zeros(1, 2).double()
    primary = vec(1, 0)[None].requires_grad_()
    secondary = [vec(0, 2)[None].requires_grad_(), vec(1, 1)[None].requires_grad_()]
    noise = torch.zeros(1, 2).double(), torch.zeros(1, 1, 2).double()
    gates = vec(1)[None], primary, zeros, secondary, [zeros] * 2, *noise
    load = ref.Load_H(*ref.hierarchical_gates(*gates, 1, 1)[2:])
    s = math.log(2) + 0.01
    phi = [0.5 * math.erfc(-z / s / math.sqrt(2)) for z in (1, -2, 2)]
    expected = vec(phi[0] * phi[1], phi[0] * phi[2], 0, 0)
    torch.testing.assert_close(load.flatten(), expected, rtol=1e-14, atol=0)
    grads = torch.autograd.grad(ref.CV_squared(load.flatten()), [primary, secondary[0]])
    assert all(g.isfinite().all() and g.abs().max() > 0 for g in grads)


@pytest.mark.equation("App. C.1")
@pytest.mark.parametrize("projected", [True, False])
def test_lstm_is_torchs(projected):
    """The order of the gates of torch is i, f, j, o as well."""
    lstm = torch.nn.LSTM(3, 4, proj_size=2 if projected else 0).double()
    x, m, c = (
        torch.randn(5, 3).double(),
        torch.randn(2 if projected else 4).double(),
        vec(1, 2, 3, 4),
    )
    expected, (m_last, c_last) = lstm(x, (m[None], c[None]))
    bias = lstm.bias_ih_l0 + lstm.bias_hh_l0
    P = lstm.weight_hr_l0 if projected else None
    outputs, *last = ref.LSTM(x, lstm.weight_ih_l0, lstm.weight_hh_l0, bias, P, m, c)
    torch.testing.assert_close(torch.stack(outputs), expected)
    torch.testing.assert_close(last, [m_last[0], c_last[0]])


@pytest.mark.equation("App. F")
def test_balanced_gates_by_hand():
    # softmax gates of [x, 0]: 3/4, 1/4 for x = ln 3; m = 1·4 / 2
    X, W_g = vec(math.log(3), math.log(4), math.log(2), -math.log(2))[:, None], vec(1, 0)[None]
    G_X, M, L = ref.balanced_gates(X, W_g, 1, vec(0.7, 0.3))
    assert G_X.tolist() == M.tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]] and float(L) == 0
    # evaluation: compares the gates 3/4, 1/4; 4/5, 1/5; 2/3, 1/3; 1/3, 2/3 with the thresholds
    G_X, _, _ = ref.balanced_gates(X, W_g, 1, vec(0.7, 0.24), training=False)
    torch.testing.assert_close(G_X, matrix_of([0.75, 0.25], [1, 0], [0, 1], [0, 1]))
    G_X, _, _ = ref.balanced_gates(X, W_g, 1, vec(0.7, 0.4), training=False)
    assert G_X.tolist() == [[1, 0], [1, 0], [0, 0], [0, 1]]
    for training in (True, False):
        G_X, _, L = ref.balanced_gates(X[:0], W_g, 1, vec(0.7, 0.4), training)
        assert G_X.shape == (0, 2) and float(L) == 0


@pytest.mark.equation("App. F", "App. B")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("level", ["primary", "secondary"])
def test_balanced_hierarchy_of_one_group_or_of_groups_of_one(level, training):
    """A gate with a single expert selects all its rows by both masks: its loss is 0."""
    X, W_g, T = torch.randn(9, 3).double(), torch.randn(3, 4).double(), vec(0.2, 0.3, 0.1, 0.25)
    one, below = torch.zeros(3, 1).double(), vec(0.5)
    if level == "primary":
        gates = W_g, [one] * 4, 2, 1, T, [below] * 4
    else:
        gates = one, [W_g], 1, 2, below, [T]
    G_X, L = ref.hierarchical_balanced_gates(X, *gates, training=training)
    expected, _, expected_L = ref.balanced_gates(X, W_g, 2, T, training=training)
    assert G_X.equal(expected) and float(L) == pytest.approx(float(expected_L))


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


@pytest.mark.equation("App. D")
def test_factoring_is_exact_for_squares_of_rank_one():
    """Both rules are then those of torch, which store the full second moment."""
    u, v = torch.randn(3).double(), torch.randn(5).double()
    adam, adagrad = (torch.ones(3, 5).double().requires_grad_() for _ in range(2))
    optimizers = [
        torch.optim.Adam([adam], lr=0.1, betas=(0.0, 0.9), eps=1e-4),
        torch.optim.Adagrad([adagrad], lr=0.1, eps=1e-4),
    ]
    w = sums = adam.detach().clone()
    vr, vc, sr, sc = (torch.zeros(n).double() for n in (3, 5, 3, 5))
    for t in range(1, 5):
        g = t * u[:, None] * v * torch.randn(3, 5).double().sign()
        adam.grad, adagrad.grad = g.clone(), g.clone()
        for optimizer in optimizers:
            optimizer.step()
        w, vr, vc = ref.FactoredAdam(w, g, vr, vc, t, 0.1, 0.9, 1e-4)
        sums, sr, sc = ref.FactoredAdagrad(sums, g, sr, sc, 0.1, 1e-4)
    torch.testing.assert_close(w, adam.detach())
    torch.testing.assert_close(sums, adagrad.detach())


@pytest.mark.equation("App. D")
def test_diet_denominator():
    """The denominator is the paper's times sqrt(mean vc) / mean sqrt(vc), one factor per matrix."""
    w, g = torch.zeros(2, 2).double(), torch.stack([vec(1, 2), vec(3, 0)])
    step = {"w": w, "g": g, "vr": w[0], "vc": w[0], "t": 1, "lr": 0.1, "beta2": 0.98}
    paper, _, _ = ref.FactoredAdam(**step, eps=0)
    diet, _, _ = ref.FactoredAdam(**step, eps=0, denominator="diet")
    constant = math.sqrt(3.5) / ((math.sqrt(5) + math.sqrt(2)) / 2)
    torch.testing.assert_close(diet * constant, paper)
    # eps = 1 is added to each root: (sqrt(2.5) + 1)(sqrt(5) + 1) / (mean sqrt(vc) + 1) for g_00
    diet, _, _ = ref.FactoredAdam(**step, eps=1, denominator="diet")
    d = (math.sqrt(2.5) + 1) * (math.sqrt(5) + 1) / ((math.sqrt(5) + math.sqrt(2)) / 2 + 1)
    assert float(diet[0, 0]) == pytest.approx(-0.1 / d)
    for denominator in ("paper", "diet"):  # no 0 / 0 before the first gradient
        step |= {"g": 0 * g, "eps": 1e-8, "denominator": denominator}
        assert ref.FactoredAdam(**step)[0].equal(w)


@pytest.mark.equation("Sec. 3.1")
@pytest.mark.parametrize("n, k", [(1, 1), (3, 2)])
def test_recurrent_mixture_is_an_lstm_with_the_mixed_matrix(n, k):
    d_in, u = 3, 2
    x, h, c = (torch.randn(1, size).double() for size in (d_in, u, u))
    W, b = torch.randn(n, d_in + u, 4 * u).double(), torch.randn(4 * u).double()
    W_g, W_noise = torch.randn(2, d_in + u, n).double()
    experts = [lambda x, i=i: ref.E_i(x, [W[i]]) for i in range(n)]
    noise = torch.randn(1, n).double()
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
