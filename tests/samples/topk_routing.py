"""Samples of `topk_routing`."""

import math

import reference as ref
import torch
from samples import draw, wrong
from samples.draw import E
from samples.row import Operator

from moe_ext import ops

SCORES = ["softmax", "sigmoid", "sqrt_softplus"]


def make_topk_routing(dtype, T, E, k, bias=False, ties=False, groups=(), given=False, **options):
    logits = draw.normal(T, E, dtype=dtype)
    if ties:
        logits = torch.randint(0, 3, (T, E)).to(dtype)
    names = "num_groups", "groups_per_token", "group_score_k"
    return dict(
        logits=logits,
        k=k,
        bias=draw.normal(E, dtype=draw.wide(dtype)) / 4 if bias else None,
        expert_index=draw.routing(T, E, k)["expert_index"] if given else None,
        **dict(zip(names, groups, strict=False)),
        **options,
    )


def reference_topk_routing(
    logits, k, bias=None, score="softmax", renormalize=True, scale=1.0,
    num_groups=1, groups_per_token=1, group_score_k=2, expert_index=None,
):  # fmt: skip
    groups = num_groups, groups_per_token, group_score_k
    index = expert_index
    if index is None:
        index = [ref.route(row, k, bias, score, *groups) for row in logits]
        index = torch.tensor(index, dtype=torch.int64).reshape(len(logits), k)
    gates = [
        ref.gates_of(row, chosen, score, renormalize, scale)
        for row, chosen in zip(logits, index, strict=True)
    ]
    return torch.stack(gates) if gates else logits.sum() * 0 + logits.new_empty(0, k), index


def plain_topk_routing(
    logits, k, bias=None, score="softmax", renormalize=True, scale=1.0,
    num_groups=1, groups_per_token=1, group_score_k=2, expert_index=None,
):  # fmt: skip
    functions = {
        "softmax": lambda x: x.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrt_softplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    }
    s = functions[score](logits)
    biased = s.detach() if bias is None else s.detach() + bias
    if num_groups > 1:
        groups = biased.view(len(s), num_groups, -1)
        best = groups.topk(group_score_k).values.sum(-1).topk(groups_per_token).indices
        kept = torch.zeros(len(s), num_groups).scatter(1, best, 1).bool()
        biased = groups.masked_fill(~kept[..., None].to(s.device), -math.inf).flatten(1)
    index = biased.topk(k).indices if expert_index is None else expert_index.long()
    gates = s.gather(1, index)
    if renormalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates * scale, index


# fmt: off
TABLE = {
    "topk_routing": Operator(
        function=ops.topk_routing, make=make_topk_routing,
        reference=reference_topk_routing, plain=plain_topk_routing,
        equations=("arXiv 2408.15664", "arXiv 2412.19437", "arXiv 2405.04434"),
        differentiable=("logits",), backward="_topk_routing_backward",
        autocast=torch.float32, lacks={"nan": "it ranks last, see the tests of ties"},
        # Every pair of options occurs, with groups and without.
        samples=[
            sizes | dict(score=SCORES[i % 3], renormalize=i < 3, scale=2.5) | options
            for number, sizes in enumerate(draw.EDGES) for i in range(6)
            for options in [(dict(), dict(bias=True), dict(given=True))[(i + i // 3 + number) % 3]]
        ]
        + [dict(T=9, E=12, k=4, bias=True, score="sigmoid", groups=(4, 2, 2), given=True)]
        + [
            dict(T=9, E=12, k=k, bias=bias, score=SCORES[i % 3], groups=groups, ties=i < 3)
            for number, (k, groups) in enumerate([
                (2, (3, 1, 1)), (4, (4, 2, 2)), (6, (6, 3, 2)), (3, (2, 2, 6)), (3, (12, 4, 1)),
                (12, (3, 3, 4)),
            ])
            for i in range(6) for bias in [(i + number) % 2 == 0]
        ]
        + [dict(T=9, E=8, k=k, bias=bias, ties=True) for k in (1, 3, 8) for bias in (False, True)]
        + [dict(T=5, E=70, k=66, score="sigmoid"), dict(T=3, E=72, k=30, groups=(9, 4, 7))],
        typical=[
            draw.TYPICAL[0] | dict(bias=True, score="sigmoid", given=True), *draw.TYPICAL,
            draw.TYPICAL[0] | dict(bias=True, score="sigmoid"),
            dict(T=5, E=6, k=2, renormalize=False, given=True), dict(T=0, E=4, k=2, given=True),
            dict(T=6, E=8, k=3, bias=True, score="sigmoid", scale=2.5, groups=(4, 2, 2)),
            dict(T=5, E=6, k=2, renormalize=False, groups=(3, 2, 1)),
            dict(T=5, E=6, k=2, score="sqrt_softplus", renormalize=False),
        ],
        limits=[
            *(dict(T=3, E=E, k=k, score="sigmoid", bias=True)
              for E in (1, 17, 64, 255, 256, 257, 1000, 4096) for k in (1, 17, 64) if k <= E),
            *(dict(T=3, E=E, k=8, score="sigmoid", bias=True, groups=(E // 8, E // 16, 2))
              for E in (64, 1024, 4096, 8192)),
            *draw.shapes(*((n, 4, 2) for n in draw.MANY)),
            *(dict(T=3, E=E, k=k, renormalize=False, given=True)
              for E, k in ((1, 1), (257, 257), (4096, 64))),
            dict(T=draw.MANY[-1], E=4, k=2, given=True),
        ],
        large=[dict(T=1000, E=64, k=4), dict(T=1000, E=64, k=4, renormalize=False),
               dict(T=1000, E=64, k=4, renormalize=False, given=True),
               dict(T=1000, E=64, k=6, bias=True, score="sigmoid", groups=(8, 4, 2))],
        precise=[
            dict(T=200, E=32, k=4, bias=True, score=score, renormalize=renormalize, groups=groups)
            for score in SCORES for renormalize in (False, True) for groups in ((), (4, 2, 2))
        ]
        + [
            dict(T=200, E=32, k=4, score=score, renormalize=renormalize, given=True)
            for score in SCORES for renormalize in (False, True)
        ]
        + draw.shapes((200, 8, 1), (200, 64, 17), (301, 37, 3)),
        bad=[
            *wrong.numbers("k", -1, 0, E + 1, 1000),
            *wrong.sizes("bias"), *wrong.doubles("bias"),
            *wrong.numbers("score", "relu", ""),
            *wrong.numbers("scale", 0, -1, math.nan, math.inf, 1e-60),
            *wrong.numbers("num_groups", 0, -1, 2, 6),
            *wrong.numbers("groups_per_token", 0, 2),
            (ValueError, "groups_per_token", dict(num_groups=5, groups_per_token=6), 6),
            (ValueError, "k", dict(num_groups=5, groups_per_token=1, group_score_k=1), 2),
            *((ValueError, "group_score_k",
               dict(num_groups=5, groups_per_token=3, group_score_k=value), value)
              for value in (0, 2)),
            *wrong.sizes("expert_index", axes=(0, 1)),
            *wrong.out_of_range("expert_index", E),
            wrong.TWICE,
        ],
        backward_bad=[
            *wrong.out_of_range("expert_index", E),
            (ValueError, "grad_gates", wrong.shorter("grad_gates")),
            *wrong.numbers("score", "relu"),
            *wrong.numbers("scale", 0, 1e-60),
            (ValueError, "expert_index", lambda a: dict(expert_index=a["expert_index"][:, :0]), 0),
        ],
    ),
}
