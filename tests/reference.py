"""The paper's equations, one function each, in plain loops, with the paper's symbols as names.

The tests hold the package against this file, so it shares nothing with it: no import, no
vectorised shortcut. Numbers are float64 torch scalars, so that autograd differentiates every
equation as it is written.

n experts, k of them chosen; x is one row of the batch X, c = x·W_g its clean logits, r = x·W_noise,
s = Softplus(r) + nu the standard deviation of its noise, and h = H(x). Ties go to the lower index.
"""

import math

import torch


def Softplus(v):
    """log(1 + exp(v)), the form that neither overflows nor switches to a line far from 0."""
    return torch.logaddexp(v, torch.zeros_like(v))


def Phi(z):
    """Cumulative distribution of the standard normal, exact in the lower tail too."""
    return torch.special.erfc(-z / math.sqrt(2)) / 2


def Softmax(v):
    highest = max(v, key=float).detach()  # a common shift changes nothing
    e = [torch.exp(v_i - highest) for v_i in v]
    return torch.stack([e_i / sum(e) for e_i in e])


def G_sigma(x, W_g):
    """Eq. 2: softmax gating."""
    return Softmax(x @ W_g)


def top_k(v, k):
    """Indices of the k highest components, highest first; NaN ranks below every number."""
    v = [float(v_i) for v_i in v]
    return sorted(range(len(v)), key=lambda i: (math.isnan(v[i]), -v[i], i))[:k]


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
    """App. A: the k-th highest component of v, excluding component i; -inf where there is none."""
    others = [v[j] for j in range(len(v)) if j != i]
    if k > len(others):
        return torch.full_like(v[i], -math.inf)
    return others[top_k(others, k)[-1]]


def P(c, s, h, k, i):
    """App. A, Eq. 8-9: the probability that i is in the top k under fresh noise on i only."""
    if k == len(c):
        return torch.ones_like(c[i])  # whatever is drawn, all n are in the top n
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
    "gelu": lambda v: v * Phi(v),
    "silu": lambda v: v / (1 + torch.exp(-v)),
    "tanh": torch.tanh,
    "sigmoid": lambda v: 1 / (1 + torch.exp(-v)),
}
GATED = {"reglu": "relu", "geglu": "gelu", "swiglu": "silu"}


def activate(v, activation):
    """An activation; the gated ones multiply the activated first half of v by its second half."""
    if activation not in GATED:
        return ACTIVATIONS[activation](v)
    half = len(v) // 2
    return ACTIVATIONS[GATED[activation]](v[:half]) * v[half:]


def E_i(x, W, b=None, activation="relu"):
    """Sec. 3.2: one feed-forward expert; W its matrices, an activation between each two of them."""
    for layer, matrix in enumerate(W):
        x = sum(x[d] * matrix[d] for d in range(len(x)))
        if b is not None:
            x = x + b[layer]
        if layer < len(W) - 1:
            x = activate(x, activation)
    return x


def MoE(X, W_g, W_noise, noise, k, experts, nu=1e-2):
    """Eq. 1: y = sum_i G(x)_i E_i(x), and the batch's G, Importance and Load; noise None: H = c."""
    C = X @ W_g
    if noise is None:
        H_X = C
    else:
        S = Softplus(X @ W_noise) + nu
        H_X = [H(c, x @ W_noise, e, nu) for c, x, e in zip(C, X, noise, strict=True)]
    G_X = torch.stack([G(h, k) for h in H_X])
    Y = []
    for x, g, h in zip(X, G_X, H_X, strict=True):
        Y.append(sum(g[i] * experts[i](x) for i in top_k(h, k)))  # the others are not computed
    load = None if noise is None else Load(C, S, H_X, k)
    return torch.stack(Y), G_X, Importance(G_X), load
