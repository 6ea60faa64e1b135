"""Samples of `batchwise_topm` and `selected_softmax`."""

import math

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E, K, T
from samples.row import NO_GRADIENT, Operator

from moe_ext import ops


def tie_break(column, row):
    """Breaks ties of batchwise_topm: among equal scores, the larger value wins."""
    hash = (column * 0x9E3779B9 + row) % 2**32
    hash = (hash ^ (hash >> 16)) * 0x7FEB352D % 2**32
    hash = (hash ^ (hash >> 15)) * 0x846CA68B % 2**32
    return (hash ^ (hash >> 16)) >> 2


def make_topm(dtype, G, N, E, m, kind="normal"):
    scores = torch.randn(G, N, E)
    if kind == "ties":  # -0 equals 0
        values = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf])
        scores = values[torch.randint(6, (G, N, E))]
    if kind == "nan":
        scores[torch.rand(G, N, E) < 0.3] = math.nan
        scores[0, N // 2] = -math.inf
    if kind == "equal":
        scores.fill_(0.5)
    if kind == "distinct":
        scores = torch.rand(G, E, N).argsort(-1).mT - N / 2
    return dict(scores=(scores if G != 1 or kind != "normal" else scores[0]).to(dtype), m=m)


def reference_topm(scores, m, first_expert=0, num_experts=None):
    """Computes M_batchwise of each batch; among equal scores, the larger tie_break wins."""
    batches = scores if scores.dim() == 3 else scores[None]
    G, N, E = batches.shape
    rows, mth = torch.empty(G, E, m, dtype=torch.int64), scores.new_full((G, E), math.inf)
    for g, X in enumerate(batches):
        columns = [g * (num_experts or E) + first_expert + e for e in range(E)]
        priority = torch.tensor([[-tie_break(c, row) for c in columns] for row in range(N)])
        M = ref.M_batchwise(X, m, priority.view(N, E))
        for e in range(E):
            rows[g, e] = M[:, e].nonzero()[:, 0]
            if m:
                mth[g, e] = X[ref.top_k(X[:, e], m)[-1], e]
    return (rows, mth) if scores.dim() == 3 else (rows[0], mth[0])


def plain_topm(scores, m):
    """Computes batchwise_topm for scores without ties."""
    best = scores.topk(m, dim=-2)
    return best.indices.sort(-2).values.mT, best.values[..., -1, :]


def make_selection(dtype, T, E, p=0.5):
    """Makes a random mask, in which some tokens have no expert, and its slots."""
    mask = torch.rand(T, E) < p
    mask[3::4] = False
    return dict(
        logits=draw.normal(T, E, dtype=dtype),
        expert_index=mask.nonzero()[:, 1],
        token_offsets=draw.offsets_of(mask.sum(1).tolist()),
    )


def reference_selection(logits, expert_index, token_offsets):
    gates = [logits.new_zeros(0) + 0 * logits.sum()]  # differentiable even if empty
    for x, chosen in zip(logits, draw.per_token(expert_index, token_offsets), strict=True):
        M = torch.zeros(len(x)).scatter(0, chosen, 1)
        gates.append(ref.G_strict(ref.Softmax(x), M.to(x))[chosen])
    return torch.cat(gates)


def plain_selection(logits, expert_index, token_offsets):
    """Computes the gates from the softmax over all experts."""
    token = draw.token_of_slot(expert_index, token_offsets)
    p = torch.softmax(logits, 1)[token, expert_index]
    return p / p.new_zeros(len(logits)).index_add(0, token, p)[token]


# fmt: off
TABLE = {
    "batchwise_topm": Operator(
        function=ops.batchwise_topm, make=make_topm, reference=reference_topm, plain=plain_topm,
        equations=("App. F",),
        lacks=NO_GRADIENT | {"nan": "it ranks last"},
        samples=[dict(G=2, N=N, E=E, m=m) for N, E, m in [
            (1, 1, 1), (5, 3, 2), (7, 16, 3), (16, 17, 16), (40, 5, 7), (33, 32, 1), (100, 40, 31)
        ]]
        + [dict(G=1, N=30, E=5, m=m) for m in (0, 1, 29, 30)]
        + [dict(G=G, N=N, E=E, m=0) for G, N, E in ((0, 5, 3), (2, 0, 3), (2, 5, 0))]
        + [dict(G=2, N=20, E=6, m=m, kind=kind)
           for m in (1, 8, 15, 20) for kind in ("ties", "nan", "equal")],
        typical=[dict(G=2, N=T, E=E, m=K), dict(G=1, N=7, E=5, m=2), dict(G=2, N=0, E=4, m=0)],
        limits=[dict(G=1, N=n, E=4, m=n // 2, kind="distinct") for n in draw.MANY],
        large=[dict(G=1, N=2000, E=80, m=100), dict(G=1, N=2000, E=20, m=100, kind="ties")],
        precise=[dict(G=1, N=200, E=20, m=10), dict(G=1, N=301, E=37, m=29, kind="ties"),
                 dict(G=2, N=50, E=7, m=9, kind="nan")],
        bad=[*wrong.numbers("m", -1, T + 1, 1000), *wrong.numbers("first_expert", -1),
             *wrong.numbers("num_experts", E - 1)],
    ),
    "selected_softmax": Operator(
        function=ops.selected_softmax, make=make_selection,
        reference=reference_selection, plain=plain_selection,
        equations=("App. F",),
        differentiable=("logits",), backward="_selected_softmax_backward",
        lacks={"nan": "it reads the selected logits alone; plain torch reads all"},
        samples=[dict(T=T, E=E, p=p) for T, E, p in [
            (1, 1, 1), (9, 5, 0.5), (9, 5, 1), (8, 40, 0.2), (6, 4, 0), (0, 5, 1)
        ]],
        typical=[dict(T=T, E=E, p=1), dict(T=7, E=5), dict(T=0, E=4)],
        limits=[dict(T=n, E=4) for n in draw.MANY],
        large=[dict(T=4000, E=64, p=0.1)],
        precise=[dict(T=300, E=20), dict(T=301, E=37, p=0.1)],
        bad=[
            *wrong.out_of_range("expert_index", E),
            *wrong.sizes("token_offsets"),
            *wrong.vectors("token_offsets", [1, 5, 10, 10, 15], [0, 10, 5, 10, 15],
                           [0, 5, 10, 10, 16]),
        ],
    ),
}
