"""The paper's equations, one function each, as plain loops with the paper's symbols as names.

The tests compare the package with this file, so it shares nothing with it: no import and no
vectorized shortcut. Numbers are float64 torch scalars, so that autograd differentiates every
equation as it is written.

There are n experts, of which k are selected. A row of the batch X is x, its clean logits are
c = x·W_g, and h = H(x). With r = x·W_noise, its noise has the standard deviation Softplus(r) + nu,
or s. The lower index wins a tie.

A hierarchy has a groups of b experts. The rows X^(i) are those that selected group i. Expert j of
group i has the flat index i·b + j.
"""

import functools
import math
from fractions import Fraction

import torch


def Softplus(v):
    """log(1 + exp(v)) in a form that neither overflows nor approximates far from 0."""
    return torch.logaddexp(v, torch.zeros_like(v))


def Phi(z):
    """Cumulative distribution function of the standard normal, accurate in the lower tail too."""
    return torch.special.erfc(-z / math.sqrt(2)) / 2


def Softmax(v):
    highest = max(v_i.detach() for v_i in v)  # a common shift changes nothing
    e = [torch.exp(v_i - highest) for v_i in v]
    return torch.stack([e_i / sum(e) for e_i in e])


def G_sigma(x, W_g):
    """Eq. 2: softmax gating."""
    return Softmax(x @ W_g)


def top_k(v, k, priority=None):
    """Indices of the k highest components, highest first; NaN ranks below every number.

    The smaller priority, if given, wins a tie, then the lower index.
    """
    v = [float(torch.as_tensor(v_i).detach()) for v_i in v]
    first = [0] * len(v) if priority is None else priority.tolist()
    is_nan = [math.isnan(v_i) for v_i in v]
    v = [0 if nan else v_i for v_i, nan in zip(v, is_nan, strict=True)]  # equal to each other
    return sorted(range(len(v)), key=lambda i: (is_nan[i], -v[i], first[i], i))[:k]


def KeepTopK(v, k):
    """Eq. 5: v_i if it is among the top k, -inf otherwise."""
    kept = top_k(v, k)
    return [v[i] if i in kept else torch.full_like(v[i], -math.inf) for i in range(len(v))]


def H(c, r, noise, nu):
    """Eq. 4, for one row: c_i + StandardNormal()_i · (Softplus(r_i) + nu)."""
    return torch.stack([c[i] + noise[i] * (Softplus(r[i]) + nu) for i in range(len(c))])


def G(h, k):
    """Eq. 3: Softmax(KeepTopK(H(x), k)), dense, exactly 0 outside the top k."""
    return Softmax(KeepTopK(h, k))


def kth_excluding(v, k, i):
    """App. A: the k-th highest component of v without component i; -inf if there is none."""
    rest = [v[j] for j in range(len(v)) if j != i]
    if k > len(rest):
        return torch.full_like(v[i], -math.inf)
    return rest[top_k(rest, k)[-1]]


def P(c, s, h, k, i):
    """App. A, Eq. 8-9: the probability that i is in the top k when only its noise is redrawn."""
    if k == len(c):
        return torch.ones_like(c[i])  # all n are always in the top n
    return Phi((c[i] - kth_excluding(h, k, i)) / s[i])


def Load(C, S, H_X, k):
    """App. A, Eq. 10: Load(X)_i = sum over x of P(x, i)."""
    n = C.shape[1]
    load = [C.new_zeros(()) for _ in range(n)]
    for c, s, h in zip(C, S, H_X, strict=True):
        for i in range(n):
            load[i] = load[i] + P(c, s, h, k, i)
    return torch.stack(load)


def Importance(G_X):
    """Eq. 6: Importance(X) = sum over x of G(x)."""
    importance = torch.zeros_like(G_X[0]) if len(G_X) else G_X.new_zeros(G_X.shape[1])
    for g in G_X:
        importance = importance + g
    return importance


def CV_squared(v):
    """Square of the coefficient of variation: population variance / mean²; 0 for all zeros."""
    n = len(v)
    mean = sum(v) / n
    if mean == 0:
        return mean * 0
    return sum((v_i - mean) ** 2 for v_i in v) / n / mean**2


def L_importance(importance, w_importance):
    """Eq. 7."""
    return w_importance * CV_squared(importance)


def L_load(load, w_load):
    """App. A, Eq. 11."""
    return w_load * CV_squared(load)


def zero_computation(x, g, experts, num_identity):
    """Jin et al. 2024 (arXiv 2410.07348), Sec. 3.1: feed-forward, then identity, then null experts.

    g are the gates of all experts for one row x, exactly 0 for those that are not chosen. `experts`
    are the feed-forward ones.
    """
    y = torch.zeros_like(x)
    for i in range(len(g)):
        if i < len(experts) and g[i] != 0:
            y = y + g[i] * experts[i](x)
        elif len(experts) <= i < len(experts) + num_identity:
            y = y + g[i] * x
    return y


def kept_by_capacity(G_X, chosen, k, capacity_factor, drop):
    """Fedus et al. 2021 (arXiv 2101.03961), Sec. 2.2: which chosen experts compute each row.

    Each expert computes at most C = ceil(k T / n · capacity_factor) rows: its first ones. With
    drop="score" it computes the rows with its largest gates; the first row wins a tie.
    """
    T, n = len(G_X), len(G_X[0])
    C = math.ceil(k * T * Fraction(str(capacity_factor)) / n)
    kept = [[False] * n for _ in range(T)]
    for i in range(n):
        rows = [t for t in range(T) if i in chosen[t]]
        if drop == "score":
            rows.sort(key=lambda t: (-float(G_X[t][i].detach()), t))
        for t in rows[:C]:
            kept[t][i] = True
    return kept


def L_switch(P_X, chosen):
    """Fedus et al. 2021 (arXiv 2101.03961), Eqs. 4-6: n · sum of f_i P_i over the experts.

    P_X[t] are the probabilities of row t, chosen[t] its experts. f is a share of the assignments.
    """
    n, T = len(P_X[0]), len(P_X)
    k_T = sum(len(experts) for experts in chosen)
    loss = 0
    for i in range(n):
        f_i = sum(i in experts for experts in chosen) / k_T
        P_i = sum(p[i] for p in P_X) / T
        loss = loss + f_i * P_i
    return n * loss


def L_z(logits):
    """Zoph et al. 2022 (arXiv 2202.08906), Eq. 5: the mean of log(sum of exp)² over the rows."""
    return sum(torch.log(sum(torch.exp(v_i) for v_i in v)) ** 2 for v in logits) / len(logits)


def dispatch(expert_index, n):
    """Sec. 3.1: the batch of each expert, as (token, slot) pairs in token order."""
    batches = [[] for _ in range(n)]
    for t, chosen in enumerate(expert_index.tolist()):
        for j, i in enumerate(chosen):
            batches[i].append((t, j))
    return batches


def combine(outputs, batches, gates, d_output):
    """Eq. 1, expert by expert: y_t = sum of gate · output over the pairs of token t."""
    y = [gates.new_zeros(d_output) for _ in gates]
    for output, batch in zip(outputs, batches, strict=True):
        for row, (t, j) in zip(output, batch, strict=True):
            y[t] = y[t] + gates[t, j] * row
    return torch.stack(y) if y else gates.new_zeros(0, d_output)


ACTIVATIONS = {
    "identity": lambda v: v,
    "relu": lambda v: v * (v > 0),
    "relu_squared": lambda v: v**2 * (v > 0),
    "gelu": lambda v: v * Phi(v),
    "gelu_tanh": lambda v: v / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
    "silu": lambda v: v / (1 + torch.exp(-v)),
    "tanh": torch.tanh,
    "sigmoid": lambda v: 1 / (1 + torch.exp(-v)),
}
GATED = {"glu": "sigmoid", "reglu": "relu", "geglu": "gelu", "swiglu": "silu"}
GATED |= {"geglu_tanh": "gelu_tanh"}


def clamped_swiglu(a, b, limit, alpha, offset):
    """The product g · sigmoid(alpha · g) · (u + offset), where a and b are clamped to g and u."""
    g, u = torch.clamp(a, max=limit), torch.clamp(b, -limit, limit)
    return g * ACTIVATIONS["sigmoid"](alpha * g) * (u + offset)


def activate(v, activation, args=None):
    """An activation. Gated ones multiply the activated first half of v by its second half."""
    if activation == "interleaved_clamped_swiglu":
        return clamped_swiglu(v[0::2], v[1::2], *args)
    half = len(v) // 2
    if activation == "clamped_swiglu":
        return clamped_swiglu(v[:half], v[half:], *args)
    if activation not in GATED:
        return ACTIVATIONS[activation](v)
    return ACTIVATIONS[GATED[activation]](v[:half]) * v[half:]


def E_i(x, W, b=None, activation="relu", args=None):
    """Sec. 3.2: one feed-forward expert with the matrices W and an activation between them."""
    for layer, matrix in enumerate(W):
        x = sum((x[d] * matrix[d] for d in range(len(x))), matrix.new_zeros(matrix.shape[1]))
        if b is not None:
            x = x + b[layer]
        if layer < len(W) - 1:
            x = activate(x, activation, args)
    return x


def noisy_logits(X, W_g, W_noise, noise, nu):
    """C, S and H(X) of a batch. With noise None, H = C and there is no S."""
    C = X @ W_g
    if noise is None:
        return C, None, C
    S = Softplus(X @ W_noise) + nu
    H_X = [H(c, x @ W_noise, e, nu) for c, x, e in zip(C, X, noise, strict=True)]
    return C, S, H_X


def MoE(X, W_g, W_noise, noise, k, experts, nu=1e-2):
    """Eq. 1: y = sum_i G(x)_i E_i(x); G, Importance and Load of the batch. Noise None: H = c."""
    C, S, H_X = noisy_logits(X, W_g, W_noise, noise, nu)
    G_X = torch.stack([G(h, k) for h in H_X])
    Y = []
    for x, g, h in zip(X, G_X, H_X, strict=True):
        Y.append(sum(g[i] * experts[i](x) for i in top_k(h, k)))  # skips the other experts
    load = None if noise is None else Load(C, S, H_X, k)
    return torch.stack(Y), G_X, Importance(G_X), load


# Appendix B: hierarchical mixtures


def G_H(g_primary, g_secondary):
    """App. B: the gates of one row over the a·b experts, G_primary(x)_i · G_i(x)_j.

    Eq. 12 is Eq. 1 with these gates, and Importance_H is their sum over the rows.
    """
    a, b = len(g_secondary), len(g_secondary[0])
    return torch.stack([g_primary[i] * g_secondary[i][j] for i in range(a) for j in range(b)])


def Load_H(load_primary, load_secondary, sizes):
    """App. B: Load_H(X)_ij = Load_primary(X)_i · Load_i(X^(i))_j / |X^(i)|; 0 for an empty group.

    sizes[i] = |X^(i)| counts rows and has no gradient. Load_i(X^(i))_j alone would have no gradient
    for the primary gate.
    """
    a, b = len(load_secondary), len(load_secondary[0])
    load = load_primary.new_zeros(a, b)
    for i in range(a):
        for j in range(b):
            if sizes[i] > 0:
                load[i, j] = load_primary[i] * load_secondary[i][j] / sizes[i]
    return load


def hierarchical_gates(
    X, W_g_primary, W_noise_primary, W_g_secondary, W_noise_secondary, noise_primary,
    noise_secondary, k1, k2, nu=1e-2,
):  # fmt: skip
    """App. B: G_primary(X) [T, a] and G_i(X) [T, a, b], 0 for the groups that x did not select.

    Also returns the factors of Load_H: Load_primary(X), all Load_i(X^(i)) and all |X^(i)|.
    noise_secondary is [T, k1, b]: slot s of a row belongs to the group with its s-th highest
    primary H.
    """
    a, b = len(W_g_secondary), W_g_secondary[0].shape[1]
    C, S, H_X = noisy_logits(X, W_g_primary, W_noise_primary, noise_primary, nu)
    G_primary_X = torch.stack([G(h, k1) for h in H_X])
    groups = dispatch(torch.tensor([top_k(h, k1) for h in H_X]), a)

    G_secondary_X = [[X.new_zeros(b) for _ in range(a)] for _ in X]
    load_secondary = []
    for i, rows in enumerate(groups):
        X_i = X[[t for t, _ in rows]]
        noise_i = None if noise_secondary is None else [noise_secondary[t, s] for t, s in rows]
        W_noise_i = None if noise_secondary is None else W_noise_secondary[i]
        C_i, S_i, H_i = noisy_logits(X_i, W_g_secondary[i], W_noise_i, noise_i, nu)
        for (t, _), h in zip(rows, H_i, strict=True):
            G_secondary_X[t][i] = G(h, k2)
        if noise_secondary is not None:
            load_secondary.append(Load(C_i, S_i, H_i, k2))

    G_secondary_X = torch.stack([torch.stack(gates) for gates in G_secondary_X])
    load_primary = None if noise_primary is None else Load(C, S, H_X, k1)
    return G_primary_X, G_secondary_X, load_primary, load_secondary, [len(r) for r in groups]


# Appendix C.1: the softmax over V words. W has a row for each word; y is the target's index.


def Logits(x, W, b=None, c=None):
    """x·W_v + b_v of each word; c tanh(./c) of it if a softcap c is given."""
    logits = [x @ W[v] if b is None else x @ W[v] + b[v] for v in range(len(W))]
    return torch.stack(logits if c is None else [c * torch.tanh(l_v / c) for l_v in logits])


def CrossEntropy(logits, y, eps=0.0, z=0.0):
    """-sum_v q_v log p_v + z lse^2 with p = Softmax(logits); q mixes the target and 1 / V."""
    V = len(logits)
    lse = torch.logsumexp(logits, 0)
    q = [eps / V + (1 - eps if v == y else 0) for v in range(V)]
    return sum(q[v] * (lse - logits[v]) for v in range(V)) + z * lse**2


# Appendix C.1: the LSTM with a projection (Sak et al. 2014). W and R have the rows of all gates i,
# then those of f, j and o.


def LSTM(x, W, R, b, P, m, c):
    """m_t of each x_t, and the last m and c. Without P, m_t is o_t tanh(c_t)."""
    sigmoid = ACTIVATIONS["sigmoid"]
    outputs = []
    for x_t in x:
        z = W @ x_t + R @ m + b
        i, f, j, o = z.split(len(c))
        c = sigmoid(f) * c + sigmoid(i) * torch.tanh(j)
        r = sigmoid(o) * torch.tanh(c)
        m = r if P is None else P @ r
        outputs.append(m)
    return outputs, m, c


# Appendix F: strictly balanced gating. X is the batch of softmax gates, G_sigma(x) its rows.


def M_batchwise(X, m, priority=None):
    """App. F: 1 for the top m rows of each expert; the smaller priority [T, n] wins a tie."""
    M = torch.zeros_like(X)
    for i in range(X.shape[1]):
        for t in top_k(X[:, i], m, None if priority is None else priority[:, i]):
            M[t, i] = 1
    return M


def M_threshold(X, T):
    """App. F: 1 where x_i > T_i."""
    M = torch.zeros_like(X)
    for t in range(X.shape[0]):
        for i in range(X.shape[1]):
            M[t, i] = 1 if X[t, i] > T[i] else 0
    return M


def rows_per_expert(k, size, n):
    """App. F: m = k|X| / n, rounded to the nearest integer (half up); at least 1, at most |X|."""
    return min(max((2 * k * size + n) // (2 * n), 1), size)


def G_strict(g_sigma, M):
    """App. F: G_sigma(x)_i M_i / sum_j G_sigma(x)_j M_j; 0 for a row that no expert selected."""
    n = len(g_sigma)
    if not any(M):
        return torch.zeros_like(g_sigma)
    total = sum(g_sigma[j] * M[j] for j in range(n))
    return torch.stack([g_sigma[i] * M[i] / total for i in range(n)])


def L_batchwise(X, T, m):
    """App. F: sum_j sum_i (M_threshold(X_j, T)_i - M_batchwise(X, m)_ji) (X_ji - T_i)."""
    threshold, batchwise = M_threshold(X, T), M_batchwise(X, m)
    L = T.new_zeros(())
    for j in range(X.shape[0]):
        for i in range(X.shape[1]):
            L = L + (threshold[j, i] - batchwise[j, i]) * (X[j, i] - T[i])
    return L


def expert_choice_gates(X, W_g, k):
    """Zhou et al. 2022 (arXiv 2202.09368), Eq. 1: the scores of each expert's top m rows."""
    G_sigma_X = torch.stack([G_sigma(x, W_g) for x in X])
    m = rows_per_expert(k, len(X), W_g.shape[1])
    return G_sigma_X * M_batchwise(G_sigma_X, m)


def relu_gates(X, W_g):
    """Wang et al. 2024 (arXiv 2412.14711), Eq. 5: R(x) = ReLU(x W_g)."""
    R_X = X.new_zeros(len(X), W_g.shape[1])
    for t in range(len(X)):
        for e in range(W_g.shape[1]):
            score = X[t] @ W_g[:, e]
            if score > 0:
                R_X[t, e] = score
    return R_X


def L_reg_lb(R_X, k):
    """arXiv 2412.14711, Eqs. 10 and 11 for one layer: 1/T sum_t sum_e f_e R(x_t)_e."""
    T, E = R_X.shape
    L = R_X.new_zeros(())
    for e in range(E):
        f = E / (k * T) * sum(1 for t in range(T) if R_X[t, e] > 0)
        for t in range(T):
            L = L + f * R_X[t, e]
    return L / T


def balanced_gates(X, W_g, k, T, training=True):
    """App. F for a batch X of inputs: G(X), the mask M and L_batchwise.

    Training selects by M_batchwise, evaluation by M_threshold. L_batchwise trains only T.
    """
    n = W_g.shape[1]
    G_sigma_X = [G_sigma(x, W_g) for x in X]
    G_sigma_X = torch.stack(G_sigma_X) if G_sigma_X else X.new_zeros(0, n)
    m = rows_per_expert(k, len(X), n)
    M = M_batchwise(G_sigma_X, m) if training else M_threshold(G_sigma_X, T)
    G_X = [G_strict(g_sigma, M_x) for g_sigma, M_x in zip(G_sigma_X, M, strict=True)]
    G_X = torch.stack(G_X) if G_X else X.new_zeros(0, n)
    return G_X, M, L_batchwise(G_sigma_X.detach(), T, m)


def hierarchical_balanced_gates(
    X, W_g_primary, W_g_secondary, k1, k2, T_primary, T_secondary, training=True
):
    """App. B with the gates of App. F: the gates [T, a·b] and L.

    Each group selects m1 = k1|X| / a rows of the batch; each of its experts selects m2 = k2·m1 / b
    of these. L is the sum of the L_batchwise of all a + 1 gates.
    """
    a, b = len(W_g_secondary), W_g_secondary[0].shape[1]
    G_primary_X, M, L = balanced_gates(X, W_g_primary, k1, T_primary, training)
    G_secondary_X = X.new_zeros(len(X), a, b)
    for i in range(a):
        rows = [t for t in range(len(X)) if M[t, i]]
        G_i, _, L_i = balanced_gates(X[rows], W_g_secondary[i], k2, T_secondary[i], training)
        for t, g in zip(rows, G_i, strict=True):
            G_secondary_X[t, i] = g
        L = L + L_i
    rows = zip(G_primary_X, G_secondary_X, strict=True)
    return torch.stack([G_H(*row) for row in rows]), L


# Routers of later models. s are the scores of one token, b is the selection bias.


def scores(logits, score):
    """softmax; sigmoid (DeepSeek-V3, arXiv 2412.19437); sqrt(softplus)."""
    if score == "softmax":
        return Softmax(logits)
    if score == "sigmoid":
        return torch.stack([1 / (1 + torch.exp(-v)) for v in logits])
    return torch.stack([torch.sqrt(Softplus(v)) for v in logits])


def best_groups(biased, num_groups, per_token, score_k):
    """Group-limited routing (DeepSeek-V2, arXiv 2405.04434): the groups of one token.

    A group's score is the sum of its score_k largest biased scores, where NaN counts as -inf.
    """
    size = len(biased) // num_groups
    group_scores = []
    for g in range(num_groups):
        group = [
            -math.inf if math.isnan(v) else float(v) for v in biased[g * size : (g + 1) * size]
        ]
        group_scores.append(sum(group[i] for i in top_k(group, score_k)))
    return sorted(top_k(group_scores, per_token))


def route(logits, k, b, score, num_groups, per_token, score_k):
    """The k experts of one token: the largest s + b (arXiv 2408.15664) in its best groups.

    The logits have the order of the scores; without bias and groups, they are compared.
    """
    biased = logits if b is None and num_groups == 1 else scores(logits, score).detach()
    biased = biased if b is None else biased + b
    candidates = list(range(len(logits)))
    if num_groups > 1:
        size = len(logits) // num_groups
        chosen = best_groups(biased, num_groups, per_token, score_k)
        candidates = [g * size + i for g in chosen for i in range(size)]
    return [candidates[i] for i in top_k([biased[i] for i in candidates], k)]


def gates_of(logits, chosen, score, renormalize, scale):
    """The gates of the chosen experts of one token: the bias does not enter them."""
    s = scores(logits, score)[chosen]
    if score == "softmax" and renormalize:  # does not underflow
        s = Softmax(logits[chosen])
    elif renormalize:
        s = s / (sum(s) + 1e-20)
    return scale * s


# Appendix D: optimizers of the experts. w is one matrix and g its gradient; the functions return
# the new w and the new state.


def row_means(A):
    """The mean of each row; row_means(A.T) has those of the columns."""
    return torch.stack([sum(row) / len(row) for row in A])


def V_factored(vr, vc):
    """App. D: outer product of the row and column means, divided by their common mean."""
    mean = sum(vr) / len(vr)
    if mean == 0:
        return vr.new_zeros(len(vr), len(vc))
    return torch.stack([torch.stack([r * c / mean for c in vc]) for r in vr])


def FactoredAdam(w, g, vr, vc, t, lr, beta2, eps, denominator="paper"):
    """App. D: Adam with beta1 = 0 and a factored second moment; step t = 1, 2, ...

    With denominator "diet", divides by the mean of the square roots, not the root of the mean.
    """
    vr = beta2 * vr + (1 - beta2) * row_means(g**2)
    vc = beta2 * vc + (1 - beta2) * row_means((g**2).T)
    correction = 1 - beta2**t  # V lacks this factor once: vr, vc and their mean each lack it once
    if denominator == "paper":
        d = torch.sqrt(V_factored(vr, vc) / correction) + eps
    else:
        root_r = [torch.sqrt(r / correction) + eps for r in vr]
        root_c = [torch.sqrt(c / correction) + eps for c in vc]
        mean = sum(root_c) / len(root_c)
        d = torch.stack([torch.stack([r * c / mean for c in root_c]) for r in root_r])
    return w - lr * g / d, vr, vc


def FactoredAdagrad(w, g, vr, vc, lr, eps):
    """App. D: the same for Adagrad, which sums over time."""
    vr = vr + row_means(g**2)
    vc = vc + row_means((g**2).T)
    return w - lr * g / (torch.sqrt(V_factored(vr, vc)) + eps), vr, vc


# Section 3.1, last paragraph: recurrent mixtures


def MoELSTM_step(x, h, c, W_g, W_noise, noise, k, experts, b, nu=1e-2):
    """Sec. 3.1: h', c' of an LSTM whose weight matrix is a MoE of matrices [d_in + d_rec, 4u].

    One step of a batch with inputs [x, h]. b [4u] is the bias; i, f, j, o is the order of the
    gates. Also returns G, Importance and Load of the MoE.
    """
    z, G_X, importance, load = MoE(torch.cat([x, h], 1), W_g, W_noise, noise, k, experts, nu)
    sigmoid = ACTIVATIONS["sigmoid"]
    i, f, j, o = (z + b).split(c.shape[1], 1)
    c = sigmoid(f) * c + sigmoid(i) * torch.tanh(j)
    return sigmoid(o) * torch.tanh(c), c, G_X, importance, load


@functools.cache
def C(t, m):
    """Gruslys et al. 2016: minimum number of forward steps for backward over t steps with m states.

    Run y steps and store the state. Solve the t - y steps on the right with m - 1 states, then the
    y steps on the left with m. The first state is one of the m.
    """
    if m == 1:
        return t * (t + 1) // 2
    if m >= t:
        return 2 * t - 1
    return min(y + C(t - y, m - 1) + C(y, m) for y in range(1, t))


# Appendix G and Wu et al. 2016: attention. x_i is a source vector, y_j a target vector


def A(x, y, U, W, V):
    """App. G: sum_d V_d tanh((x U)_d) tanh((y W)_d)."""
    xU, yW = x @ U, y @ W
    return sum(V[d] * torch.tanh(xU[d]) * torch.tanh(yW[d]) for d in range(len(V)))


def A_GNMT(x, y, U, W, V):
    """App. G: sum_d V_d tanh((x U)_d + (y W)_d)."""
    xU, yW = x @ U, y @ W
    return sum(V[d] * torch.tanh(xU[d] + yW[d]) for d in range(len(V)))


def attend(A, X, y, U, W, V):
    """Wu et al., Eq. 4: p_i = softmax_i A(x_i, y) and the context sum_i p_i x_i of one y."""
    p = Softmax(torch.stack([A(x, y, U, W, V) for x in X]))
    return p, sum(p[i] * X[i] for i in range(len(X)))
