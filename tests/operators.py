"""The table of operators. ops/test_operators.py checks every generic property for every row.

A row defines the arguments of an operator, the expected results from reference.py, and the
properties that it lacks, with the reason. Arguments come from torch's CPU generator, which
conftest.py seeds. The arguments of a backward operator are those that autograd passes to it.

`python operators.py` prints a hash of each operator's results, to compare instruction sets. Random
numbers differ between x86-64 and Arm; with --save and --load both have the same arguments.
"""

import argparse
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

import reference as ref
import torch
from assertions import gradients, recorded_ops
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_ext import ops

HALF = [torch.bfloat16, torch.float16]
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "glu": "sigmoid"}
GATED |= {"geglu_tanh": "gelu_tanh"}
SCORES = ["softmax", "sigmoid", "sqrt_softplus"]
CLAMPED = ["clamped_swiglu", "interleaved_clamped_swiglu"]
ACTIVATIONS = ["relu", "relu_squared", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid", "identity"]
ACTIVATIONS += [*GATED, *CLAMPED]
# limit, alpha and offset; the limit clamps some of the samples.
ACTIVATION_ARGS = dict.fromkeys(CLAMPED, (0.75, 1.5, 0.25))


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One row of the table."""

    function: Callable  # Takes the arguments by name, as users call it.
    make: Callable  # Maps (dtype, **sizes) to the arguments of one sample.
    reference: Callable  # Maps float64 arguments to the outputs of reference.py.
    samples: list[dict]  # Sizes for the reference and the gradients, including edge cases.
    typical: list[dict]  # Few sizes for expensive checks. The first one is used for the errors.
    large: list[dict]  # Sizes that several threads share.
    limits: list[dict] = field(default_factory=list)  # Sizes that overflow narrow counters.
    precise: list[dict]  # Sizes for the measurement of rounding errors.
    plain: Callable | None = None  # The same in plain torch, in the dtype of the arguments.
    differentiable: tuple[str, ...] = ()
    constant: tuple[int, ...] = ()  # The floating-point outputs without a gradient.
    backward: str | None = None  # The operator that computes the gradients.
    autocast: torch.dtype | None = None  # The dtype of floating-point arguments under autocast.
    products: bool = False  # Uses GEMMs: bits depend on instruction set and device.
    equations: tuple[str, ...] = ()
    lacks: dict[str, str] = field(default_factory=dict)  # Property -> why it is lacking.
    # Errors apart from wrong dtypes, devices and numbers of dimensions of every tensor:
    # (exception, argument in the message, changed arguments or a function that changes valid ones,
    # value in the message or a function of the changed arguments)
    bad: list[tuple] = field(default_factory=list)
    backward_bad: list[tuple] = field(default_factory=list)
    free: dict[str, tuple] = field(default_factory=dict)  # arguments of any "type" or "dimensions"


def moved(values, device=None, dtype=None):
    """Copies all tensors; converts those of floating-point dtypes to `dtype`."""

    def move(x):
        return x.to(device, dtype if x.is_floating_point() else None, copy=True)

    return changed(move, values)


def changed(function, values):
    """Applies `function` to every tensor in the values."""
    return tree_map_only(torch.Tensor, function, values)


def tensors_in(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def sample(name, device="cpu", dtype=torch.float64, **sizes):
    """Makes the arguments of one sample."""
    return moved(ROWS[name].make(dtype, **sizes), device)


def as_tuple(outputs):
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def with_leaves(arguments, names, needed=None):
    """Replaces the named floating-point tensors by leaves; returns the arguments and the leaves.

    `needed` lists the indices of the leaves that require a gradient; None means all.
    """
    leaves = []

    def leaf(x):
        leaves.append(x.detach().clone().requires_grad_(needed is None or len(leaves) in needed))
        return leaves[-1]

    fresh = {name: changed(leaf, arguments[name]) for name in names if name in arguments}
    return arguments | fresh, leaves


def upstream_of(outputs):
    """Makes a gradient for each floating-point output, the same in every call."""
    draw = torch.Generator().manual_seed(5)
    return [
        torch.randn(y.shape, dtype=torch.float64, generator=draw).to(y.device, y.dtype)
        for y in outputs
        if y.is_floating_point()
    ]


def evaluate(row, arguments, function=None, upstream=None):
    """Returns the outputs, and the gradients of the differentiable arguments for `upstream`."""
    arguments, leaves = with_leaves(arguments, row.differentiable)
    outputs = as_tuple((function or row.function)(**arguments))
    floats = [y for y in outputs if y.is_floating_point()]
    grads = gradients(floats, leaves, upstream or upstream_of(outputs)) if leaves else []
    return [y.detach() for y in outputs], grads


def call_of(name, arguments):
    """Returns the operator `name` and the arguments of its call, in forward or backward."""
    row = ROWS[name]
    with recorded_ops() as calls:
        evaluate(row, arguments)
    called = {each: (op, args) for each, op, args, kwargs in calls}
    assert set(called) == {name for name, other in ROWS.items() if other is row}
    op, args = called[name]
    return op, changed(torch.Tensor.detach, list(args))


def written(op):
    """Returns for each argument whether the operator writes to it."""
    return [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]


def run(op, args):
    """Returns the results of a call as tensors, including copies of arguments that it writes to."""
    args = [x.clone() if w else x for x, w in zip(args, written(op), strict=False)]
    return tensors_in(op(*args)) + [x for x, w in zip(args, written(op), strict=False) if w]


# Random arguments


def normal(*shape, device="cpu", dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(device)


def offsets_of(counts, device="cpu"):
    return torch.tensor([0, *counts], device=device).cumsum(0)


def wide(dtype):
    return torch.promote_types(dtype, torch.float32)


def shapes(*values):
    """Makes the sizes of T tokens with k of E experts each."""
    return [dict(T=T, E=E, k=k) for T, E, k in values]


EDGES = shapes(
    (1, 1, 1), (3, 2, 1), (3, 2, 2), (7, 8, 1), (7, 8, 2), (7, 8, 7), (7, 8, 8), (40, 5, 3),
    (0, 4, 2),
)  # fmt: skip
TYPICAL = shapes((4, 5, 2), (5, 6, 6), (0, 4, 2))
# The experts of each token, in slot order.
ROUTES = [[[2], [], [0, 4, 1], [0], [4, 2], []], [[], [], []], []]
RAGGED = [dict(routes=routes, E=5) for routes in ROUTES]


def draw_routing(T=0, E=1, k=1, routes=None, all_to=None, skewed=0):
    """Makes expert_index, inverse, offsets, token_offsets and gates, as dispatch_plan returns them.

    Of `skewed` tokens, one expert has all, one has half, one has a single token, others have none.
    """
    token_offsets = None
    if skewed:
        routes = [[3, 1], *([0, 3] if t % 2 else [3] for t in range(1, skewed))]
    if routes is not None:
        index = torch.tensor([e for route in routes for e in route], dtype=torch.int64)
        token_offsets = offsets_of(map(len, routes))
    else:
        index = torch.rand(T, E).topk(k).indices
        index = index if all_to is None else torch.full_like(index, all_to)
    permutation = index.flatten().sort(stable=True).indices
    return dict(
        expert_index=index,
        inverse=permutation.argsort().view(index.shape),
        offsets=offsets_of(torch.bincount(index.flatten(), minlength=E).tolist()),
        token_offsets=token_offsets,
        gates=normal(*index.shape).softmax(-1),
    )


def only(values, *names):
    return {name: values[name] for name in names}


# The slots of dispatch and combine are (token, slot number) pairs, sorted by token.


def per_token(values, token_offsets):
    """Splits the values of the slots by token."""
    if token_offsets is None:
        return values
    return values.split(token_offsets.diff().tolist())


def pairs_by_row(inverse, token_offsets):
    """Returns the (token, slot number) pair of every row."""
    rows = {}
    for t, slots in enumerate(per_token(inverse, token_offsets)):
        rows |= {int(row): (t, j) for j, row in enumerate(slots)}
    return [rows[row] for row in range(len(rows))]


def token_of_slot(inverse, token_offsets):
    if token_offsets is None:
        return torch.arange(len(inverse), device=inverse.device).repeat_interleave(inverse.shape[1])
    return torch.repeat_interleave(token_offsets.diff())


# noisy_topk_gating


def make_gating(dtype, T, E, k, noisy=True, ties=False):
    clean, raw, noise = normal(3, T, E, dtype=dtype)
    if ties:
        clean = torch.randint(0, 3, (T, E)).to(dtype)
    if not noisy:
        raw = noise = None
    return dict(clean_logits=clean, raw_noise_stddev=raw, noise=noise, k=k)


def reference_gating(clean_logits, raw_noise_stddev, noise, k, noise_epsilon=1e-2):
    """Computes the five outputs."""
    T, E = clean_logits.shape
    if noise is None:
        H_X, stddev = clean_logits, clean_logits.new_empty(0, E)
    else:
        rows = zip(clean_logits, raw_noise_stddev, noise, strict=True)
        H_X = [ref.H(*row, noise_epsilon) for row in rows]
        stddev = ref.Softplus(raw_noise_stddev) + noise_epsilon
    index = torch.tensor([ref.top_k(h, k) for h in H_X], dtype=torch.int64).reshape(T, k)
    gates, threshold, threshold_index = [], [], []
    for h, chosen in zip(H_X, index, strict=True):
        order = ref.top_k(h, E)
        gates.append(ref.G(h, k)[chosen])
        # kth_excluding of any expert outside the top k, and of any expert inside.
        outside = ref.kth_excluding(h, k, order[-1]) if k < E else h[order[k - 1]]
        threshold.append(torch.stack([outside, ref.kth_excluding(h, k, order[0])]))
        threshold_index.append([order[k - 1], order[k] if k < E else -1])
    empty = clean_logits.new_empty
    return (
        torch.stack(gates) if T else empty(0, k),
        index,
        torch.stack(threshold) if T else empty(0, 2),
        torch.tensor(threshold_index, dtype=torch.int64).reshape(T, 2),
        stddev,
    )


def plain_gating(clean_logits, raw_noise_stddev, noise, k, noise_epsilon=1e-2):
    E = clean_logits.shape[1]
    H, stddev = clean_logits, clean_logits.new_empty(0, E)
    if noise is not None:
        zero = torch.zeros_like(raw_noise_stddev)
        stddev = torch.logaddexp(raw_noise_stddev, zero) + noise_epsilon
        H = clean_logits + noise * stddev
    top, index = torch.nn.functional.pad(H, (0, 1), value=-math.inf).topk(k + 1)
    threshold_index = torch.where(index < E, index, -1)[:, k - 1 :]
    return torch.softmax(top[:, :k], -1), index[:, :k], top[:, k - 1 :], threshold_index, stddev


# topk_routing


def make_topk_routing(
    dtype, T, E, k, bias=False, ties=False, nan=False, groups=(), given=False, **options
):
    logits = normal(T, E, dtype=dtype)
    if ties:
        logits = torch.randint(0, 3, (T, E)).to(dtype)
    if nan:
        logits[torch.rand(T, E) < 0.4] = math.nan
    names = "num_groups", "groups_per_token", "group_score_k"
    return dict(
        logits=logits,
        k=k,
        bias=normal(E, dtype=wide(dtype)) / 4 if bias else None,
        expert_index=draw_routing(T, E, k)["expert_index"] if given else None,
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


# load


def make_load(dtype, T, E, k, groups=None, detach=False):
    clean, raw, noise = normal(3, T, E)
    stddev = ref.Softplus(raw) + 1e-2
    order = (clean + noise * stddev).sort(descending=True)
    threshold = torch.nn.functional.pad(order.values, (0, 1), value=-math.inf)[:, k - 1 : k + 1]
    return dict(
        clean_logits=clean.to(dtype),
        noise_stddev=stddev.to(wide(dtype)),
        threshold=threshold.to(wide(dtype)),
        expert_index=order.indices[:, :k].contiguous(),
        detach_threshold=detach,
        group_offsets=None if groups is None else torch.tensor(groups),
    )


def plain_load(
    clean_logits, noise_stddev, threshold, expert_index, detach_threshold=False, group_offsets=None
):
    """Uses the given thresholds. test_load.py compares these and P(x, i) with ref.Load."""
    threshold = threshold.detach() if detach_threshold else threshold
    inside = torch.zeros_like(clean_logits, dtype=torch.bool).scatter(1, expert_index, True)
    bound = torch.where(inside, threshold[:, 1:], threshold[:, :1])
    P = ref.Phi((clean_logits - bound) / noise_stddev)
    if expert_index.shape[1] == clean_logits.shape[1]:
        P = torch.ones_like(clean_logits, dtype=threshold.dtype)
    if group_offsets is None:
        return P.sum(0)
    return torch.stack([P[begin:end].sum(0) for begin, end in pairwise(group_offsets.tolist())])


# batchwise_topm and selected_softmax


def tie_break(column, row):
    """Breaks ties of batchwise_topm: among equal scores, the larger value wins."""
    hash = (column * 0x9E3779B9 + row) % 2**32
    hash = (hash ^ (hash >> 16)) * 0x7FEB352D % 2**32
    hash = (hash ^ (hash >> 15)) * 0x846CA68B % 2**32
    return (hash ^ (hash >> 16)) >> 2


def make_topm(dtype, G, N, E, m, draw="normal"):
    scores = torch.randn(G, N, E)
    if draw == "ties":  # -0 equals 0
        values = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf])
        scores = values[torch.randint(6, (G, N, E))]
    if draw == "nan":
        scores[torch.rand(G, N, E) < 0.3] = math.nan
        scores[0, N // 2] = -math.inf
    if draw == "equal":
        scores.fill_(0.5)
    if draw == "distinct":
        scores = torch.rand(G, E, N).argsort(-1).mT - N / 2
    return dict(scores=(scores if G != 1 or draw != "normal" else scores[0]).to(dtype), m=m)


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
        logits=normal(T, E, dtype=dtype),
        expert_index=mask.nonzero()[:, 1],
        token_offsets=offsets_of(mask.sum(1).tolist()),
    )


def reference_selection(logits, expert_index, token_offsets):
    gates = [logits.new_zeros(0) + 0 * logits.sum()]  # differentiable even if empty
    for x, chosen in zip(logits, per_token(expert_index, token_offsets), strict=True):
        M = torch.zeros(len(x)).scatter(0, chosen, 1)
        gates.append(ref.G_strict(ref.Softmax(x), M.to(x))[chosen])
    return torch.cat(gates)


def plain_selection(logits, expert_index, token_offsets):
    """Computes the gates from the softmax over all experts."""
    token = token_of_slot(expert_index, token_offsets)
    p = torch.softmax(logits, 1)[token, expert_index]
    return p / p.new_zeros(len(logits)).index_add(0, token, p)[token]


# importance, dispatch_plan, dispatch and combine


def make_importance(dtype, E, **sizes):
    routing = draw_routing(E=E, **sizes)
    return dict(
        gates=routing["gates"].to(dtype), expert_index=routing["expert_index"], num_experts=E
    )


def make_cv_squared(dtype, sizes, offset=0.1):
    """Draws one vector of each size; the weights are 1, 2, …, except that the second is 0."""
    values = [(torch.rand(E, dtype=torch.float64) + offset).to(dtype) for E in sizes]
    return dict(values=values, weights=[0.0 if j == 1 else j + 1.0 for j in range(len(sizes))])


def plain_cv_squared(values, weights):
    return sum(
        w * v.var(correction=0) / v.mean() ** 2 for v, w in zip(values, weights, strict=True)
    )


def dense(gates, expert_index, num_experts):
    return gates.new_zeros(len(gates), num_experts).scatter(1, expert_index, gates)


def plain_importance_and_load(gates, expert_index, num_experts):
    ones = torch.ones_like(gates.detach())
    return tuple(dense(each, expert_index, num_experts).sum(0) for each in (gates, ones))


def make_plan(dtype, E, **sizes):
    return dict(expert_index=draw_routing(E=E, **sizes)["expert_index"], num_experts=E)


def reference_plan(expert_index, num_experts):
    slots = expert_index if expert_index.dim() == 2 else expert_index[:, None]
    batches = ref.dispatch(slots, num_experts)
    permutation = [t * slots.shape[1] + j for batch in batches for t, j in batch]
    counts = torch.tensor([len(batch) for batch in batches], dtype=torch.int64)
    permutation = torch.tensor(permutation, dtype=torch.int64)
    return permutation, permutation.argsort().view(expert_index.shape), counts, offsets_of(counts)


def plain_plan(expert_index, num_experts):
    slots = expert_index.flatten()
    permutation, counts = slots.sort(stable=True).indices, slots.bincount(minlength=num_experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return permutation, permutation.argsort().view(expert_index.shape), counts, offsets


def make_dispatch(dtype, D=3, **sizes):
    routing = draw_routing(**sizes)
    T = len(per_token(routing["inverse"], routing["token_offsets"]))
    return dict(x=normal(T, D, dtype=dtype)) | only(routing, "inverse", "token_offsets")


def reference_dispatch(x, inverse, token_offsets=None):
    pairs = pairs_by_row(inverse, token_offsets)
    return (
        torch.stack([x[t] for t, _ in pairs]) if pairs else x.new_zeros(0, x.shape[1]) + 0 * x[:0]
    )


def plain_dispatch(x, inverse, token_offsets=None):
    return x[token_of_slot(inverse, token_offsets)][inverse.flatten().argsort()]


def make_combine(dtype, D=3, gates_dtype=None, **sizes):
    routing = draw_routing(**sizes)
    gates = routing["gates"].to(gates_dtype or wide(dtype))
    output = normal(gates.numel(), D, dtype=dtype)
    slots = only(routing, "inverse", "token_offsets")
    return dict(expert_output=output, gates=gates) | slots


def reference_combine(expert_output, gates, inverse, token_offsets=None):
    """Uses ref.combine with a single expert that has all rows."""
    pairs, D = pairs_by_row(inverse, token_offsets), expert_output.shape[1]
    by_token = list(per_token(gates, token_offsets))
    padded = torch.nn.utils.rnn.pad_sequence(by_token, True) if by_token else gates.view(0, 1)
    y = ref.combine([expert_output], [pairs], padded, D)
    return y + 0 * (expert_output.sum() + gates.sum())  # differentiable even if empty


def plain_combine(expert_output, gates, inverse, token_offsets=None):
    slots = expert_output[inverse.flatten()] * gates.reshape(-1, 1)
    y = slots.new_zeros(len(per_token(inverse, token_offsets)), slots.shape[1])
    return y.index_add(0, token_of_slot(inverse, token_offsets), slots)


# experts


def make_linear(counts, D, F, device="cpu", dtype=torch.float64, bias=True):
    """Makes rows, and the weight and bias of one linear layer for each expert."""
    tensors = [
        normal(sum(counts), D, device=device, dtype=dtype),
        normal(len(counts), D, F, device=device, dtype=dtype) / math.sqrt(max(D, 1)),
    ]
    return [*tensors, normal(len(counts), F, device=device, dtype=dtype)] if bias else tensors


def make_experts(counts, widths, activation, device="cpu", dtype=torch.float64):
    """Makes rows, and the weights and biases of experts with hidden layers."""
    weights, biases = [], []
    for i, (d_in, d_out) in enumerate(pairwise(widths)):
        d_out *= 2 if activation in [*GATED, *CLAMPED] and i < len(widths) - 2 else 1
        _, w, b = make_linear(counts, d_in, d_out, device, dtype)
        weights.append(w)
        biases.append(b)
    return normal(sum(counts), widths[0], device=device, dtype=dtype), weights, biases


def make_layer(
    dtype,
    widths,
    counts=None,
    activation="relu",
    bias=False,
    even=False,
    gated=True,
    recompute=False,
    activation_args=None,
    **sizes,
):
    """Makes rows for `counts`, or the tokens of a routing, with gates if `gated`."""
    routing = {} if counts else draw_routing(**sizes)
    x, weights, biases = make_experts(counts or [0] * sizes["E"], widths, activation, dtype=dtype)
    arguments = dict(
        x=x,
        weights=weights,
        biases=biases if bias else None,
        activation=activation,
        offsets=None if even else routing.get("offsets", offsets_of(counts or [])),
        recompute=recompute,
    )
    if activation in CLAMPED:
        arguments |= dict(activation_args=activation_args or ACTIVATION_ARGS[activation])
    if not counts:
        T = len(per_token(routing["inverse"], routing["token_offsets"]))
        arguments |= dict(x=normal(T, widths[0], dtype=dtype))
        arguments |= only(routing, "inverse", "token_offsets")
        arguments |= dict(gates=routing["gates"].to(wide(dtype))) if gated else {}
    return arguments


def layer_by(expert, combine):
    """Builds Eq. 1 from a function of one expert's rows and a function that combines them."""

    def layer(
        x,
        weights,
        biases=None,
        activation="relu",
        offsets=None,
        inverse=None,
        gates=None,
        token_offsets=None,
        recompute=False,
        activation_args=None,
    ):
        rows = x if inverse is None else plain_dispatch(x, inverse, token_offsets)
        E = len(weights[0])
        counts = [len(rows) // E] * E if offsets is None else offsets.diff().tolist()
        parts = []
        for e, part in enumerate(rows.split(counts)):
            b = None if biases is None else [bias[e] for bias in biases]
            parts.append(expert(part, [w[e] for w in weights], b, activation, activation_args))
        out = torch.cat(parts)
        return out if gates is None else combine(out, gates, inverse, token_offsets).to(x.dtype)

    return layer


def reference_expert(rows, W, b, activation, args=None):
    out = [ref.E_i(x, W, b, activation, args) for x in rows]
    if out:
        return torch.stack(out)
    parameters = sum(w.sum() for w in [*W, *(b or [])])
    return 0 * (rows @ W[0].new_zeros(rows.shape[1], W[-1].shape[1]) + parameters)


def plain_activation(z, activation, args=None):
    if activation in CLAMPED:
        interleaved = activation == "interleaved_clamped_swiglu"
        a, b = (z[..., 0::2], z[..., 1::2]) if interleaved else z.chunk(2, -1)
        limit, alpha, offset = args
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + offset)
    if activation in GATED:
        a, factor = z.chunk(2, -1)
        return plain_activation(a, GATED[activation]) * factor
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(z, approximate="tanh")
    if activation == "relu_squared":
        return torch.nn.functional.relu(z).square()
    return z if activation == "identity" else getattr(torch.nn.functional, activation)(z)


def plain_expert(rows, W, b, activation, args=None):
    for layer, w in enumerate(W):
        if layer:
            rows = plain_activation(rows, activation, args)
        rows = rows @ w if b is None else rows @ w + b[layer]
    return rows


# linear_cross_entropy


def make_loss(dtype, T, D, V, bias=False, ignored=0, **options):
    """Makes T targets, of which the first ones are ignored."""
    target = torch.randint(V, (T,))
    target[:ignored] = options.get("ignore_index", -100)
    return options | dict(
        input=normal(T, D, dtype=dtype),
        linear_weight=normal(V, D, dtype=dtype) / math.sqrt(max(D, 1)),
        target=target,
        linear_bias=normal(V, dtype=dtype) if bias else None,
    )


def loss_by(losses):
    """Reduces the losses of the tokens that are not ignored."""

    def loss(
        input,
        linear_weight,
        target,
        linear_bias=None,
        reduction="mean",
        ignore_index=-100,
        label_smoothing=0.0,
        z_loss=0.0,
        softcap=None,
        recompute=False,
    ):
        kept = target != ignore_index
        options = label_smoothing, z_loss
        each = losses(input, linear_weight, target, linear_bias, softcap, kept, *options)
        each = each.to(wide(each.dtype))
        if reduction == "none":
            return each
        return each.sum() / (kept.sum() if reduction == "mean" else 1)

    return loss


def reference_losses(X, W, y, b, c, kept, eps, z):
    none = 0 * (X.sum() + W.sum() + (0 if b is None else b.sum()))  # differentiable even if empty
    losses = [
        ref.CrossEntropy(ref.Logits(x, W, b, c), int(target), eps, z) if keep else none
        for x, target, keep in zip(X, y, kept, strict=True)
    ]
    return torch.stack(losses) + none if losses else X.new_zeros(0) + none


def plain_losses(X, W, y, b, c, kept, eps, z):
    logits = torch.nn.functional.linear(X, W, b)
    logits = logits if c is None else c * torch.tanh(logits / c)
    y = torch.where(kept, y, -100)
    loss = torch.nn.functional.cross_entropy(logits, y, reduction="none", label_smoothing=eps)
    return loss + z * logits.logsumexp(1).square() * kept


# lstm


def make_lstm(
    dtype, B, S, D=3, U=4, P=None, bias=True, state=True, lengths=None, reverse=False
):  # fmt: skip
    """Makes sentences; with P, a projection."""
    width = P or U
    scale = 1 / math.sqrt(max(D + width, 1))
    return dict(
        x=normal(B, S, D, dtype=dtype),
        weight_input=normal(4 * U, D, dtype=dtype) * scale,
        weight_recurrent=normal(4 * U, width, dtype=dtype) * scale,
        bias=normal(4 * U, dtype=dtype) if bias else None,
        projection=normal(P, U, dtype=dtype) / math.sqrt(max(U, 1)) if P else None,
        m_0=normal(B, width, dtype=dtype) if state else None,
        c_0=normal(B, U, dtype=dtype) if state else None,
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int64),
        reverse=reverse,
    )


def state_of(x, weight_input, weight_recurrent, m_0, c_0, lengths):
    """Returns m_0, c_0 and lengths, also those that are None."""
    B, S, _ = x.shape
    m = x.new_zeros(B, weight_recurrent.shape[1]) if m_0 is None else m_0
    c = x.new_zeros(B, weight_input.shape[0] // 4) if c_0 is None else c_0
    return m, c, torch.full((B,), S, device=x.device) if lengths is None else lengths


def reference_lstm(
    x, weight_input, weight_recurrent, bias=None, projection=None, m_0=None, c_0=None,
    lengths=None, reverse=False,
):  # fmt: skip
    m_0, c_0, lengths = state_of(x, weight_input, weight_recurrent, m_0, c_0, lengths)
    b = weight_input.new_zeros(len(weight_input)) if bias is None else bias
    weights = [weight_input, weight_recurrent, b, *([] if projection is None else [projection])]
    none = 0 * sum(each.sum() for each in (x, m_0, c_0, *weights))  # differentiable even if empty
    y, last_m, last_c = x.new_zeros(*x.shape[:2], m_0.shape[1]) + none, m_0 + none, c_0 + none
    for n, length in enumerate(lengths.tolist()):
        tokens = [*range(length)][::-1] if reverse else range(length)
        outputs, m, c = ref.LSTM(x[n, [*tokens]], *weights[:3], projection, m_0[n], c_0[n])
        here, index = torch.tensor(n), torch.tensor([*tokens], dtype=torch.int64)
        if length:
            y = y.index_put((here, index), torch.stack(outputs))
        last_m, last_c = last_m.index_put((here,), m), last_c.index_put((here,), c)
    return y, last_m, last_c


def plain_lstm(
    x, weight_input, weight_recurrent, bias=None, projection=None, m_0=None, c_0=None,
    lengths=None, reverse=False,
):  # fmt: skip
    m, c, lengths = state_of(x, weight_input, weight_recurrent, m_0, c_0, lengths)
    linear, steps, outputs = torch.nn.functional.linear, range(x.shape[1]), {}
    for t in steps[::-1] if reverse else steps:
        z = linear(x[:, t], weight_input, bias) + linear(m, weight_recurrent)
        i, f, j, o = z.chunk(4, 1)
        next_c = f.sigmoid() * c + i.sigmoid() * j.tanh()
        r = o.sigmoid() * next_c.tanh()
        next_m = r if projection is None else linear(r, projection)
        here = (t < lengths)[:, None]
        m, c = torch.where(here, next_m, m), torch.where(here, next_c, c)
        outputs[t] = m * here
    return torch.stack([outputs[t] for t in steps], 1), m, c


# factored_step_


def factored_step(**arguments):
    """Runs the operator on copies; returns the changed tensors."""
    arguments |= {name: arguments[name].clone() for name in ("param", "row", "column")}
    torch.ops.moe_ext.factored_step_(**arguments)
    return arguments["param"], arguments["row"], arguments["column"]


def make_step(dtype, shape, rule="adam"):
    grad = normal(*shape, dtype=dtype)
    grad[..., :1, :] = 0
    if len(shape) > 2:
        grad[:1] = 0  # an expert without tokens
    beta2, t = 0.9, 2
    decay, gain, correction = (1, 1, 1) if rule == "adagrad" else (beta2, 1 - beta2, 1 - beta2**t)
    return dict(
        param=normal(*shape, dtype=dtype),
        grad=grad,
        row=torch.rand(shape[:-1]).to(wide(dtype)),
        column=torch.rand(*shape[:-2], shape[-1]).to(wide(dtype)),
        lr=torch.tensor(0.1, dtype=torch.float64),
        correction=torch.tensor(1 / correction, dtype=torch.float64),
        decay=float(decay),
        gain=float(gain),
        eps=1e-3,
        mean_of_roots=rule == "diet",
    )


def reference_step(param, grad, row, column, lr, decay, mean_of_roots, **rest):
    results = []
    matrices = zip(
        *(x.reshape(-1, *x.shape[param.dim() - 2 :]) for x in (param, grad)),
        row.reshape(-1, row.shape[-1]),
        column.reshape(-1, column.shape[-1]),
        strict=True,
    )
    for w, g, vr, vc in matrices:
        if decay == 1:
            results.append(ref.FactoredAdagrad(w, g, vr, vc, lr, rest["eps"]))
        else:
            rule = "diet" if mean_of_roots else "paper"
            results.append(ref.FactoredAdam(w, g, vr, vc, 2, lr, decay, rest["eps"], rule))
    w, vr, vc = (torch.stack(each) for each in zip(*results, strict=True))
    return w.view_as(param), vr.view_as(row), vc.view_as(column)


# The rows


def last(name, value):
    """Changes the last element of an argument."""

    def change(arguments):
        x = arguments[name].clone()
        x.view(-1)[-1] = value
        return {name: x}

    return change


def shorter(name, axis=0):
    return lambda arguments: {
        name: arguments[name].narrow(axis, 0, arguments[name].shape[axis] - 1)
    }


def shape_of(name):
    return lambda arguments: list(arguments[name].shape)


def too_short(*names):
    """Makes rows for arguments whose two axes must both have the right size."""
    return [
        (ValueError, name, shorter(name, axis), shape_of(name)) for name in names for axis in (0, 1)
    ]


def out_of_range(name, size):
    return [(IndexError, name, last(name, value), value) for value in (-1, size, 10**12)]


def numbers(name, *values):
    return [(ValueError, name, {name: value}, value) for value in values]


def vectors(name, *values):
    return [(ValueError, name, {name: torch.tensor(value).long()}) for value in values]


def token_offsets(num_tokens):
    """Makes rows for token_offsets, which must ascend from 0 to R."""
    bad = [0, *[2] * (num_tokens - 2), 5, R + 1], [0, 5, *[4] * (num_tokens - 2), R], [1] * 4 + [R]

    def change(arguments, bad):
        flat = {name: arguments[name].flatten() for name in {"inverse", "gates"} & {*arguments}}
        return flat | dict(token_offsets=torch.tensor(bad))

    return [(ValueError, "token_offsets", partial(change, bad=each)) for each in bad]


def first(name, function):
    """Replaces the first tensor of a list."""
    return lambda arguments: {name: [function(arguments[name][0]), *arguments[name][1:]]}


def double(name):
    return lambda arguments: {name: arguments[name].double()}


NO_GRADIENT = {
    each: "no output is differentiable"
    for each in ("gradients", "gradcheck", "needed", "second_derivative", "accuracy")
}
MANY, EXPERTS = [65_535, 65_536, 200_000], [1, 2, 3, 254, 255, 256, 257, 1000, 4096]
T, E, K, R = 4, 5, 2, 8  # the sizes of TYPICAL[0], which the bad arguments change
TWICE = (  # a token has an expert twice
    ValueError,
    "expert_index",
    dict(expert_index=torch.tensor([[0, 1], [2, 1], [3, 3], [4, 4]])),
    [3, 3],
)
OF_IMPORTANCE = dict(
    make=make_importance,
    equations=("Eq. 6",),
    differentiable=("gates",),
    lacks={"second_derivative": "it has one, see gradcheck"},
    samples=EDGES + [dict(T=9, E=5, k=1, all_to=3), dict(T=5, E=3, k=0)],
    typical=TYPICAL,
    limits=shapes((3, 255, 2), (3, 256, 17), (3, 257, 64), (3, 1000, 1), (3, 4096, 4096)),
    large=shapes((5000, 16, 4), (3000, 2000, 2)),
    precise=shapes((10, 8, 2), (301, 37, 3), (5000, 8, 2)),
    bad=[
        *too_short("expert_index"),
        *out_of_range("expert_index", E),
        *numbers("num_experts", 0, -1, 2**31, 2**62),
    ],
)

# fmt: off
TABLE = {
    "noisy_topk_gating": Operator(
        function=ops.noisy_topk_gating, make=make_gating,
        reference=reference_gating, plain=plain_gating,
        equations=("Eq. 3", "Eq. 4", "Eq. 5", "App. A"),
        differentiable=("clean_logits", "raw_noise_stddev"), backward="_noisy_topk_gating_backward",
        autocast=torch.float32,
        lacks={
            "half_types": "a logit's gradient is rounded for each path that it comes by",
            "int32_indices": "it takes none",
        },
        samples=[sizes | dict(noisy=noisy) for sizes in EDGES for noisy in (True, False)]
        + [dict(T=9, E=8, k=k, noisy=False, ties=True) for k in (1, 3, 7, 8)],
        typical=[*TYPICAL, dict(T=5, E=6, k=2, noisy=False)],
        limits=[
            dict(T=3, E=E, k=k, noisy=False)
            for E in (1, 2, 3, 17, 64, 255, 256, 257, 1000, 4096)
            for k in sorted({1, 2, 17, 64, E}) if k <= E
        ] + shapes(*((n, 4, 2) for n in MANY)),
        large=shapes((1000, 64, 4)),
        precise=shapes((200, 8, 1), (200, 8, 2), (200, 64, 17), (301, 37, 3)),
        bad=[
            *too_short("raw_noise_stddev", "noise"),
            *numbers("k", -1, 0, E + 1, 1000),
            *numbers("noise_epsilon", -0.1, math.nan, math.inf, 1e39),  # infinite in float32
            (ValueError, "raw_noise_stddev and noise", dict(noise=None)),
            (ValueError, "raw_noise_stddev and noise", dict(raw_noise_stddev=None)),
            (TypeError, "noise", double("noise")),
        ],
        backward_bad=[
            (IndexError, "threshold_index", last("threshold_index", -2), -2),
            (IndexError, "threshold_index", last("threshold_index", E), E),
            *out_of_range("expert_index", E),
            (ValueError, "grad_gates", shorter("grad_gates")),
            (ValueError, "noise", shorter("noise")),
            (ValueError, "grad_noise_stddev", dict(noise=None, raw_noise_stddev=None)),
            (ValueError, "gates", lambda a: dict(gates=a["gates"][:, :0]), 0),
        ],
    ),
    "topk_routing": Operator(
        function=ops.topk_routing, make=make_topk_routing,
        reference=reference_topk_routing, plain=plain_topk_routing,
        equations=("2408.15664", "2412.19437", "2405.04434"),
        differentiable=("logits",), backward="_topk_routing_backward",
        autocast=torch.float32,
        samples=[
            sizes | dict(bias=bias, score=score, renormalize=renormalize, scale=2.5, given=given)
            for sizes in EDGES for score in SCORES for renormalize in (False, True)
            for bias, given in ((False, False), (True, False), (False, True))
        ]
        + [dict(T=9, E=12, k=4, bias=True, score="sigmoid", groups=(4, 2, 2), given=True)]
        + [
            dict(T=9, E=12, k=k, bias=bias, score=score, groups=groups, ties=ties)
            for k, groups in [(2, (3, 1, 1)), (4, (4, 2, 2)), (6, (6, 3, 2)), (3, (2, 2, 6)),
                              (3, (12, 4, 1)), (12, (3, 3, 4))]
            for bias in (False, True) for score in SCORES for ties in (False, True)
        ]
        + [dict(T=9, E=8, k=k, bias=bias, ties=True) for k in (1, 3, 8) for bias in (False, True)]
        + [dict(T=5, E=70, k=66, score="sigmoid"), dict(T=3, E=72, k=30, groups=(9, 4, 7))],
        typical=[
            TYPICAL[0] | dict(bias=True, score="sigmoid", given=True), *TYPICAL,
            TYPICAL[0] | dict(bias=True, score="sigmoid"),
            dict(T=5, E=6, k=2, renormalize=False, given=True), dict(T=0, E=4, k=2, given=True),
            dict(T=6, E=8, k=3, bias=True, score="sigmoid", scale=2.5, groups=(4, 2, 2)),
            dict(T=5, E=6, k=2, renormalize=False, groups=(3, 2, 1)),
            dict(T=5, E=6, k=2, score="sqrt_softplus", renormalize=False),
        ],
        limits=[
            *(dict(T=3, E=E, k=k, score="sigmoid", bias=True)
              for E in (1, 17, 64, 255, 256, 257, 1000, 4096) for k in (1, 17, 64) if k <= E),
            *(dict(T=3, E=E, k=8, score="sigmoid", bias=True, groups=(E // 8, E // 16, 2))
              for E in (64, 1024, 4096)),
            *shapes(*((n, 4, 2) for n in MANY)),
            *(dict(T=3, E=E, k=k, renormalize=False, given=True)
              for E, k in ((1, 1), (257, 257), (4096, 64))),
            dict(T=MANY[-1], E=4, k=2, given=True),
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
        + shapes((200, 8, 1), (200, 64, 17), (301, 37, 3)),
        bad=[
            *numbers("k", -1, 0, E + 1, 1000),
            (ValueError, "bias", shorter("bias"), shape_of("bias")),
            (TypeError, "bias", double("bias")),
            *numbers("score", "relu", ""),
            *numbers("scale", 0, -1, math.nan, math.inf, 1e-60),
            *numbers("num_groups", 0, -1, 2, 6),
            *numbers("groups_per_token", 0, 2),
            (ValueError, "groups_per_token", dict(num_groups=5, groups_per_token=6), 6),
            (ValueError, "k", dict(num_groups=5, groups_per_token=1, group_score_k=1), 2),
            *((ValueError, "group_score_k",
               dict(num_groups=5, groups_per_token=3, group_score_k=value), value)
              for value in (0, 2)),
            *too_short("expert_index"),
            *out_of_range("expert_index", E),
            TWICE,
        ],
        backward_bad=[
            *out_of_range("expert_index", E),
            (ValueError, "grad_gates", shorter("grad_gates")),
            *numbers("score", "relu"),
            *numbers("scale", 0, 1e-60),
            (ValueError, "expert_index", lambda a: dict(expert_index=a["expert_index"][:, :0]), 0),
        ],
    ),
    "load": Operator(
        function=ops.load, make=make_load, reference=plain_load, plain=plain_load,
        equations=("Eq. 10", "App. B"),
        differentiable=("clean_logits", "noise_stddev", "threshold"), backward="_load_backward",
        autocast=torch.float32,
        samples=[sizes | dict(detach=detach) for sizes in EDGES for detach in (False, True)]
        + [
            dict(T=7, E=6, k=2, groups=groups, detach=detach) for detach in (False, True)
            for groups in ([0, 7], [0, 3, 7], [0, 0, 2, 2, 7, 7], list(range(8)))
        ]
        + [dict(T=0, E=4, k=2, groups=[0, 0, 0])],
        typical=[dict(T=T, E=E, k=K, groups=[0, 3, T]), *TYPICAL],
        limits=shapes((3, 255, 2), (3, 256, 17), (3, 257, 64), (3, 1000, 1), (3, 4096, 4095),
                      *((n, 4, 2) for n in MANY)),
        large=shapes((3000, 64, 4)) + [dict(T=3000, E=64, k=4, groups=[0, 3, 3, 1000, 1001, 3000])],
        precise=shapes((1, 64, 4), (300, 8, 2), (301, 37, 3), (3000, 16, 15)),
        bad=[
            *too_short("noise_stddev", "threshold"),
            (ValueError, "expert_index", shorter("expert_index"), shape_of("expert_index")),
            *out_of_range("expert_index", E), TWICE,
            *vectors("group_offsets", [1, T], [0, 3, 2, T], [0, T + 1], [0, T - 1], [T], []),
            (TypeError, "threshold", double("threshold")),
        ],
        backward_bad=[
            (ValueError, "grad_load", lambda a: dict(grad_load=a["grad_load"][0])),
            (ValueError, "grad_load", shorter("grad_load")),
            (ValueError, "threshold", shorter("threshold")),
        ],
    ),
    "batchwise_topm": Operator(
        function=ops.batchwise_topm, make=make_topm, reference=reference_topm, plain=plain_topm,
        equations=("App. F",),
        lacks=NO_GRADIENT | {
            "int32_indices": "it takes none",
        },
        samples=[dict(G=2, N=N, E=E, m=m) for N, E, m in [
            (1, 1, 1), (5, 3, 2), (7, 16, 3), (16, 17, 16), (40, 5, 7), (33, 32, 1), (100, 40, 31)
        ]]
        + [dict(G=1, N=30, E=5, m=m) for m in (0, 1, 29, 30)]
        + [dict(G=G, N=N, E=E, m=0) for G, N, E in ((0, 5, 3), (2, 0, 3), (2, 5, 0))]
        + [dict(G=2, N=20, E=6, m=m, draw=draw)
           for m in (1, 8, 15, 20) for draw in ("ties", "nan", "equal")],
        typical=[dict(G=2, N=T, E=E, m=K), dict(G=1, N=7, E=5, m=2), dict(G=2, N=0, E=4, m=0)],
        limits=[dict(G=1, N=n, E=4, m=n // 2, draw="distinct") for n in MANY],
        large=[dict(G=1, N=2000, E=80, m=100), dict(G=1, N=2000, E=20, m=100, draw="ties")],
        precise=[dict(G=1, N=200, E=20, m=10), dict(G=1, N=301, E=37, m=29, draw="ties"),
                 dict(G=2, N=50, E=7, m=9, draw="nan")],
        bad=numbers("m", -1, T + 1, 1000),
    ),
    "selected_softmax": Operator(
        function=ops.selected_softmax, make=make_selection,
        reference=reference_selection, plain=plain_selection,
        equations=("App. F",),
        differentiable=("logits",), backward="_selected_softmax_backward",
        samples=[dict(T=T, E=E, p=p) for T, E, p in [
            (1, 1, 1), (9, 5, 0.5), (9, 5, 1), (8, 40, 0.2), (6, 4, 0), (0, 5, 1)
        ]],
        typical=[dict(T=T, E=E, p=1), dict(T=7, E=5), dict(T=0, E=4)],
        limits=[dict(T=n, E=4) for n in MANY],
        large=[dict(T=4000, E=64, p=0.1)],
        precise=[dict(T=300, E=20), dict(T=301, E=37, p=0.1)],
        bad=[
            *out_of_range("expert_index", E),
            (ValueError, "token_offsets", shorter("token_offsets"), shape_of("token_offsets")),
            *vectors("token_offsets", [1, 5, 10, 10, 15], [0, 10, 5, 10, 15], [0, 5, 10, 10, 16]),
        ],
    ),
    "importance": Operator(
        function=ops.importance,
        reference=lambda **arguments: ref.Importance(dense(**arguments)),
        plain=lambda **arguments: dense(**arguments).sum(0),
        **OF_IMPORTANCE,
    ),
    "importance_and_load": Operator(
        function=ops.importance_and_load, constant=(1,),
        reference=plain_importance_and_load, plain=plain_importance_and_load,
        **OF_IMPORTANCE,
    ),
    "weighted_cv_squared": Operator(
        function=ops.weighted_cv_squared, make=make_cv_squared,
        reference=lambda values, weights: sum(
            w * ref.CV_squared(v) for v, w in zip(values, weights, strict=True)
        ),
        plain=plain_cv_squared,
        equations=("Eq. 7", "Eq. 11"),
        differentiable=("values",), backward="_weighted_cv_squared_backward",
        samples=[dict(sizes=sizes) for sizes in ([1], [2], [5, 3], [33, 256], [256, 1, 7])]
        + [dict(sizes=[4, 2, 40], offset=1000)],
        typical=[dict(sizes=[5]), dict(sizes=[40, 3, 7])],
        limits=[dict(sizes=[E]) for E in (255, 256, 257, 4096)],
        large=[dict(sizes=[100_000])],
        precise=[dict(sizes=[8]), dict(sizes=[4096]), dict(sizes=[64, 2, 64], offset=1000)],
        bad=[
            (ValueError, "values", dict(values=[torch.ones(0)]), "0"),
            (ValueError, "weights", dict(weights=[1.0, 2.0]), "2 for 1"),
        ],
    ),
    "dispatch_plan": Operator(
        function=ops.dispatch_plan, make=make_plan, reference=reference_plan, plain=plain_plan,
        equations=("Eq. 1",),
        lacks=NO_GRADIENT | {"half_types": "its numbers are integers"},
        samples=EDGES + RAGGED + [dict(T=9, E=5, k=1, all_to=3)],
        typical=TYPICAL + RAGGED[:1],
        limits=[
            *shapes((100, 1, 1), (100, 255, 2), (100, 256, 17), (100, 257, 64), (50, 1000, 1)),
            *shapes((20, 4096, 4), (21_845, 8, 3), (32_768, 8, 2), (50_000, 64, 4)),  # 65,535 rows
        ],
        large=shapes((1000, 64, 4)),
        precise=shapes((1000, 64, 4), (301, 37, 3)),
        bad=[*out_of_range("expert_index", E), *numbers("num_experts", -1, 2**31, 2**62)],
    ),
    "dispatch": Operator(
        function=ops.dispatch, make=make_dispatch,
        reference=reference_dispatch, plain=plain_dispatch,
        equations=("Eq. 1",),
        differentiable=("x",), backward="_dispatch_backward",
        samples=[sizes | dict(D=D) for sizes in EDGES + RAGGED for D in (1, 7, 64)],
        typical=TYPICAL + RAGGED[:1],
        limits=shapes((20, 300, 64), (32_768, 8, 2), (50_000, 64, 4)),
        large=[dict(T=1000, E=64, k=4, D=64)],
        precise=[dict(T=50, E=16, k=8, D=9), dict(T=301, E=37, k=3, D=29)],
        free=dict(type=("x",)),
        bad=[
            *out_of_range("inverse", R),
            (ValueError, "", shorter("inverse")),
            (ValueError, "inverse", dict(inverse=torch.zeros(T, K).long()), 0),
            *token_offsets(4),
        ],
        backward_bad=[
            (IndexError, "inverse", last("inverse", R), R),
            (TypeError, "inverse", lambda a: dict(inverse=a["inverse"].float()), "float32"),
        ],
    ),
    "combine": Operator(
        function=ops.combine, make=make_combine, reference=reference_combine, plain=plain_combine,
        equations=("Eq. 1",),
        differentiable=("expert_output", "gates"), backward="_combine_backward",
        lacks={"half_types": "on CUDA the order of the sums of gates' gradients is the type's"},
        samples=[sizes | dict(D=D) for sizes in EDGES + RAGGED for D in (1, 5)],
        typical=TYPICAL + RAGGED[:1],
        limits=shapes((20, 300, 17), (20, 300, 64), (32_768, 8, 2), (50_000, 64, 4)),
        large=[dict(T=1000, E=64, k=4, D=64)],
        precise=[dict(T=100, E=16, k=k, D=D) for k in (1, 2, 16) for D in (3, 29, 64)],
        bad=[
            *out_of_range("inverse", R),
            (ValueError, "", shorter("inverse")),
            (ValueError, "", shorter("gates")),
            (ValueError, "inverse", dict(inverse=torch.zeros(T, K).long()), 0),
            *token_offsets(4),
        ],
        backward_bad=[
            (ValueError, "inverse", dict(inverse=torch.zeros(T, K).long()), 0),
            (ValueError, "grad_y", shorter("grad_y")),
            (ValueError, "gates", shorter("gates")),
        ],
    ),
    "experts": Operator(
        function=ops.experts, make=make_layer,
        reference=layer_by(reference_expert, reference_combine),
        plain=layer_by(plain_expert, plain_combine),
        equations=("Eq. 1", "Sec. 3.2", "App. D"),
        differentiable=("x", "weights", "biases", "gates"), backward="_experts_backward",
        autocast=torch.bfloat16, products=True,
        lacks={"half_types": "hidden layers are rounded, and products are of the type itself"},
        samples=[
            dict(counts=counts, widths=widths, bias=bias)
            for counts in ([1], [3, 0, 4], [0, 0, 5, 0], [7, 1, 2, 1, 0, 6], [0, 0], [2] * 9)
            for widths in ((1, 1), (3, 5), (17, 33)) for bias in (False, True)
        ]
        + [
            dict(counts=counts, widths=(4, 6, 3), activation=activation, bias=bias)
            for activation in ACTIVATIONS for counts in ([3, 0, 4], [0, 0]) for bias in (0, 1)
        ]
        + [
            dict(counts=[3, 0, 4], widths=widths, activation=activation, bias=True)
            for widths in ((4, 3), (4, 6, 5, 3)) for activation in ("relu", "swiglu")
        ]
        + [dict(counts=[3, 0], widths=widths) for widths in ((8, 0, 8), (8, 0), (0, 8))]
        + [dict(counts=[2, 2], widths=(4, 6, 3), even=True)]
        + [
            sizes | dict(widths=(4, 6, 3), recompute=recompute, gated=gated)
            for sizes in [dict(T=5, E=5, k=2), *RAGGED]
            for recompute in (False, True) for gated in (False, True)
        ]
        + [
            RAGGED[0] | dict(widths=widths, activation=activation, bias=True)
            for activation in ACTIVATIONS for widths in ((4, 3), (4, 6, 3), (4, 6, 5, 3))
        ],
        typical=[
            dict(counts=[3, 0, 4], widths=(3, 7), bias=True),
            dict(counts=[0, 0], widths=(3, 2)),
            dict(T=5, E=5, k=2, widths=(3, 4, 2), activation="tanh", gated=False),
            RAGGED[0] | dict(widths=(3, 4, 2), activation="swiglu", bias=True),
            RAGGED[0] | dict(widths=(3, 4, 3, 2), activation="gelu", recompute=True),
            RAGGED[1] | dict(widths=(3, 4, 2), activation="reglu", recompute=True, gated=False),
            RAGGED[2] | dict(widths=(3, 4, 2), recompute=True),
        ],
        limits=[
            *(dict(counts=[n // 2, 0, n - n // 2], widths=(2, 3), bias=True) for n in MANY),
            # Every other expert is empty.
            *(dict(counts=[0, 1] * (n // 2) + [1], widths=(3, 2), bias=True) for n in EXPERTS),
        ],
        large=[
            dict(counts=[200, 0, 1, 300, 37], widths=(48, 80), bias=True),
            dict(T=2600, E=5, k=2, widths=(24, 40, 16), bias=True),
            dict(skewed=2600, E=5, widths=(24, 40, 16), bias=True),
        ],
        precise=[
            dict(counts=counts, widths=widths, bias=True)
            for counts in ([5, 0, 70], [130, 17, 1]) for widths in ((64, 32), (33, 65))
        ]
        + [
            dict(counts=[30, 0, 40], widths=(16, 27, 8), activation=activation, bias=True)
            for activation in ACTIVATIONS if activation not in CLAMPED
        ]
        + [  # Rounding moves no value across this limit, where the gradient jumps.
            dict(counts=[30, 0, 40], widths=(16, 27, 8), activation=activation, bias=True,
                 activation_args=(64, 1.5, 0.25))
            for activation in CLAMPED
        ]
        + [dict(T=150, E=5, k=2, widths=(24, 40, 16), bias=True)]
        + [dict(T=301, E=37, k=3, widths=(29, 43, 29), activation="glu", bias=True)]
        + [dict(skewed=2600, E=5, widths=(8, 12, 4), bias=bias) for bias in (False, True)],
        bad=[
            *numbers("activation", "rely", ", "),
            *(
                (ValueError, "activation_args",
                 dict(activation="clamped_swiglu", activation_args=args), text)
                for args, text in [
                    (None, "[]"), ((7.5, 1), "[7.5, 1]"), ((7.5, 1, 0, 1), "[7.5, 1, 0, 1]"),
                    ((0, 1, 0), "[0, 1, 0]"), ((-1.5, 1, 0), "[-1.5, 1, 0]"),
                    ((math.nan, 1, 0), "[nan, 1, 0]"),
                ]
            ),
            *numbers("activation_args", [7.5, 1, 0]),
            (ValueError, "offsets", shorter("offsets")),
            *vectors("offsets", [1, 2, 3, 7], [0, 5, 3, 7], [0, 1, 4, 8], [0, 1, 2, 3]),
            (ValueError, "offsets", dict(offsets=torch.tensor([0, 6, 4, 7])), 4),
            (ValueError, "offsets",
             dict(offsets=torch.zeros(1).long(), weights=[torch.ones(0, 3, 7)], biases=None)),
            (ValueError, r"weights\[0\]", first("weights", lambda w: w[0])),
            (ValueError, r"weights\[0\]", first("weights", lambda w: w[:, :2])),
            (TypeError, "x", first("weights", torch.Tensor.double), "float32"),
            (TypeError, "x", lambda a: dict(x=a["x"].bfloat16()), "bfloat16"),
            (TypeError, r"weights\[0\]", first("weights", torch.Tensor.long), "int64"),
            *(
                (exception, r"weights\[1\]",
                 lambda a, w=w: dict(weights=[*a["weights"], w], biases=None))
                for exception, w in [
                    (ValueError, torch.ones(3, 3, 7)), (ValueError, torch.ones(2, 7, 3)),
                    (TypeError, torch.ones(3, 7, 3).double()),
                ]
            ),
            (ValueError, r"weights\[0\]", lambda a: dict(  # 7 columns cannot be halved
                weights=[*a["weights"], torch.ones(3, 7, 3)], biases=None, activation="glu")),
            (ValueError, "weights and biases", lambda a: dict(biases=a["biases"] * 2)),
            (ValueError, "weights and biases", dict(weights=[], biases=None)),
            (ValueError, r"biases\[0\]", first("biases", lambda b: b[:, :2])),
            (ValueError, r"biases\[1\]", lambda a: dict(
                weights=[*a["weights"], torch.ones(3, 7, 3)], biases=a["biases"] * 2)),
            (TypeError, r"biases\[0\]", first("biases", torch.Tensor.double)),
            (TypeError, r"biases\[0\]", first("biases", torch.Tensor.to_sparse), "Sparse"),
            (ValueError, "inverse", dict(gates=torch.rand(4, 2))),
            (ValueError, "x", dict(inverse=torch.arange(6).view(3, 2))),
            (ValueError, "gates", dict(inverse=torch.arange(7)[:, None], gates=torch.rand(6, 1))),
            (ValueError, "inverse",
             dict(inverse=torch.arange(6).view(3, 2), token_offsets=torch.arange(4))),
            *(
                (ValueError, "token_offsets",
                 dict(inverse=torch.arange(7), token_offsets=torch.tensor(offsets)))
                for offsets in ([0, 1, 2, 3, 5, 4, 6, 7], [*range(7), 8], [1, *range(1, 8)])
            ),
            (ValueError, "rows", dict(offsets=None)),
        ],
        backward_bad=[
            (ValueError, "offsets", dict(offsets=torch.zeros(0).long())),
            (ValueError, "offsets", lambda a: dict(offsets=a["offsets"][:2])),
            (ValueError, "grad_y", shorter("grad_y")),
            (ValueError, "grad_y", lambda a: dict(grad_y=a["grad_y"][:, :2])),
            (ValueError, "hidden", lambda a: dict(hidden=[a["grad_y"]])),
            (IndexError, "inverse", dict(inverse=torch.arange(1, 8)[:, None])),
        ],
    ),
    "linear_cross_entropy": Operator(
        function=ops.linear_cross_entropy, make=make_loss,
        reference=loss_by(reference_losses), plain=loss_by(plain_losses),
        equations=("App. C.1",),
        differentiable=("input", "linear_weight", "linear_bias"),
        backward="_linear_cross_entropy_backward",
        autocast=torch.bfloat16, products=True,
        lacks={"half_types": "products are of the type itself"},
        samples=[
            dict(T=T, D=D, V=V, reduction=reduction, recompute=recompute)
            for T, D, V in ((1, 1, 1), (5, 3, 7), (20, 9, 40))
            for reduction in ("none", "mean", "sum") for recompute in (False, True)
        ]
        + [
            dict(T=7, D=4, V=9, ignored=ignored, reduction=reduction, recompute=recompute) | options
            for options in [
                dict(bias=True), dict(label_smoothing=0.3), dict(z_loss=0.2), dict(softcap=1.5),
                dict(bias=True, label_smoothing=0.1, z_loss=0.05, softcap=2, ignore_index=3),
                dict(label_smoothing=1.0),
            ]
            for reduction in ("none", "mean") for recompute in (False, True) for ignored in (0, 2)
        ]
        + [dict(T=0, D=3, V=4, bias=True, reduction=each) for each in ("none", "sum")]
        + [dict(T=3, D=0, V=4, bias=True), dict(T=3, D=2, V=4, reduction="sum", ignored=3)],
        typical=[
            dict(T=T, D=3, V=E, bias=True, reduction="none", label_smoothing=0.1),
            dict(T=7, D=3, V=9, bias=True, ignored=2, z_loss=0.1, softcap=3),
            dict(T=6, D=4, V=5, reduction="sum", recompute=True),
            dict(T=0, D=3, V=4, reduction="sum"),
        ],
        limits=[dict(T=n, D=2, V=3, bias=True) for n in MANY]
        + [dict(T=3, D=2, V=V, reduction=each) for V in (511, 512, 513, 1025, 65_537)
           for each in ("none", "mean")],
        large=[dict(T=500, D=24, V=1200, bias=True, reduction=reduction, recompute=recompute)
               for reduction, recompute in (("none", False), ("mean", False), ("sum", True))],
        precise=[
            dict(T=150, D=64, V=600, bias=True),
            dict(T=70, D=33, V=65, reduction="none", z_loss=1e-3),
            dict(T=301, D=29, V=37, label_smoothing=0.1, softcap=5.0, reduction="sum"),
        ],
        bad=[
            *out_of_range("target", E),
            (ValueError, "linear_weight", shorter("linear_weight", 1), shape_of("linear_weight")),
            (ValueError, "linear_weight", lambda a: dict(
                linear_weight=a["linear_weight"][:0], linear_bias=None)),
            (TypeError, "linear_weight", double("linear_weight")),
            (ValueError, "linear_bias", shorter("linear_bias"), shape_of("linear_bias")),
            (ValueError, "target", shorter("target"), shape_of("target")),
            *numbers("reduction", "average"),
            *numbers("label_smoothing", -0.1, 1.1, math.nan),
            *numbers("z_loss", -0.1, math.nan, 1e39), *numbers("softcap", 0, -1, math.nan),
        ],
        backward_bad=[
            (ValueError, "grad_loss", shorter("grad_loss")),
            (ValueError, "lse", shorter("lse")),
            (ValueError, "gradients", lambda a: dict(gradients=[a["input"]])),
            (ValueError, "gradients", lambda a: dict(
                gradients=[a["input"][:1], a["linear_weight"], a["linear_bias"]])),
            (ValueError, "needs", dict(needs=[True])),
            *out_of_range("target", E),
        ],
    ),
    "lstm": Operator(
        function=ops.lstm, make=make_lstm, reference=reference_lstm, plain=plain_lstm,
        equations=("App. C.1",),
        differentiable=("x", "weight_input", "weight_recurrent", "bias", "projection", "m_0",
                        "c_0"),
        backward="_lstm_backward",
        autocast=torch.bfloat16, products=True,
        lacks={
            "cuda": "torch.nn.LSTM computes projections with cuDNN",
            "half_types": "products are of the type itself, and each m_t is rounded",
        },
        samples=[
            dict(B=B, S=S, D=D, U=U, P=P, state=state, bias=state, reverse=reverse)
            for B, S, D, U, P in (
                (1, 1, 1, 1, 1), (1, 1, 1, 1, None), (2, 3, 4, 5, 3), (2, 3, 4, 5, None),
                (5, 4, 3, 16, 16), (3, 2, 5, 18, 20), (2, 2, 3, 132, 7),
            )
            for state in (False, True) for reverse in (False, True)
        ]
        + [
            dict(B=5, S=4, P=P, lengths=lengths, state=state, reverse=reverse)
            for lengths in ([4, 2, 0, 4, 1], [1, 1, 2, 2, 0], [0] * 5, [3] * 5)
            for P in (3, None) for state in (False, True) for reverse in (False, True)
        ]
        + [dict(B=0, S=3, P=2), dict(B=2, S=0, P=2), dict(B=2, S=3, D=0, P=2)],
        typical=[
            dict(B=T, S=3, P=2, lengths=[2, 3, 0, 1]),
            dict(B=3, S=2, U=5, P=5, bias=False, state=False, reverse=True),
            dict(B=2, S=2, lengths=[1, 2], reverse=True),
            dict(B=0, S=2, P=3),
        ],
        limits=[
            *(dict(B=n, S=1, D=2, U=2, P=1) for n in MANY),
            *(dict(B=2, S=2, D=2, U=U, P=2) for U in (127, 128, 129, 255, 256, 257, 1000)),
            dict(B=1, S=2000, D=2, U=2, P=1),
        ],
        large=[
            dict(B=40, S=20, D=24, U=150, P=32, reverse=True),
            dict(B=40, S=20, D=24, U=150, P=32, lengths=[(7 * n) % 21 for n in range(40)]),
            dict(B=17, S=9, D=24, U=64),
        ],
        precise=[
            dict(B=30, S=12, D=64, U=150, P=32), dict(B=30, S=12, D=33, U=40),
            dict(B=3, S=30, D=29, U=37, P=43, reverse=True),
            dict(B=7, S=9, D=16, U=32, P=16, lengths=[9, 0, 3, 9, 1, 8, 5]),
        ],
        bad=[
            *too_short("weight_input"),
            (ValueError, "weight_recurrent", shorter("weight_recurrent")),
            (ValueError, "projection", shorter("weight_recurrent", 1), shape_of("projection")),
            (ValueError, "bias", shorter("bias"), shape_of("bias")),
            *too_short("projection", "m_0", "c_0"),
            (ValueError, "weight_recurrent", dict(projection=None), [16, 2]),
            *(
                (TypeError, name, double(name)) for name in
                ("weight_input", "weight_recurrent", "bias", "projection", "m_0", "c_0")
            ),
            (ValueError, "lengths", shorter("lengths"), shape_of("lengths")),
            *out_of_range("lengths", 4),
        ],
        backward_bad=[
            (ValueError, "grad_m", shorter("grad_m", 1)),
            (ValueError, "grad_m_n", shorter("grad_m_n", 1)),
            (ValueError, "grad_c_n", shorter("grad_c_n", 1)),
            (ValueError, "m", shorter("m", 1)),
            (ValueError, "gates", shorter("gates", 1)),
            (ValueError, "cells", shorter("cells", 1)),
            (ValueError, "needs", dict(needs=[True])),
            (ValueError, "needs", lambda a: dict(
                projection=None, weight_recurrent=a["weight_recurrent"].new_zeros(16, 4),
                m=a["m"].new_zeros(4, 3, 4), m_0=None, grad_m=None, grad_m_n=None)),
            *out_of_range("lengths", 4),
        ],
    ),
    "factored_step_": Operator(
        function=factored_step, make=make_step, reference=reference_step,
        equations=("App. D",),
        lacks=NO_GRADIENT | {
            "pure": "it is in place", "half_types": "layer/test_optim.py has its precision",
            "limits": "it counts nothing", "int32_indices": "it takes none",
            "negated": "test_inputs.py has it, in place",
        },
        samples=[
            dict(shape=shape, rule=rule) for rule in ("adam", "diet", "adagrad")
            for shape in ((4, 7, 5), (9, 3), (2, 2, 3, 4), (3, 1, 4), (3, 4, 1))
        ],
        typical=[dict(shape=(3, 5, 4)), dict(shape=(6, 7), rule="diet"), dict(shape=(0, 4, 3)),
                 dict(shape=(2, 0, 3)), dict(shape=(2, 3, 0))],
        # Threads share few matrices; each of many matrices has one thread.
        large=[dict(shape=shape, rule=rule) for shape, rule in [
            ((1, 200, 130), "adam"), ((2, 130, 70), "diet"),
            ((40, 65, 20), "diet"), ((1, 3, 4096), "adam"),
        ]],
        precise=[dict(shape=(3, 70, 43), rule=rule) for rule in ("adam", "diet")],
        free=dict(dimensions=("param",)),
        bad=[
            (ValueError, "param", dict(param=torch.zeros(3))),
            (ValueError, "grad", shorter("grad", 2)),
            (TypeError, "grad", double("grad")),
            (ValueError, "row", dict(row=torch.zeros(3, 4))),
            (TypeError, "row", double("row")),
            (ValueError, "column", dict(column=torch.zeros(4))),
            (TypeError, "lr", dict(lr=torch.zeros(()))),
            *numbers("decay", -0.1), *numbers("gain", math.nan), *numbers("eps", 0, 1e-50),
        ],
    ),
}
# fmt: on
# Every operator, including backward operators, and its row.
ROWS = TABLE | {row.backward: row for row in TABLE.values() if row.backward}


def precise_calls(dtype):
    """Yields (name and number, row, arguments, upstream gradients) of the precise samples."""
    for name, row in TABLE.items():
        for number, sizes in enumerate(row.precise):
            torch.manual_seed(number)
            arguments = row.make(dtype, **sizes)
            upstream = upstream_of(as_tuple(row.function(**changed(torch.clone, arguments))))
            yield f"{name} {number} {dtype}".replace("torch.", ""), row, arguments, upstream


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[-1])
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--save", metavar="FILE", help="also save the arguments")
    file.add_argument("--load", metavar="FILE", help="load the arguments, made on another machine")
    options = parser.parse_args()
    if options.load:
        saved = torch.load(options.load, weights_only=True)
        calls = [(line, ROWS[line.split()[0]], *values) for line, values in saved.items()]
    else:
        calls = list(chain(*map(precise_calls, (torch.float64, torch.float32, *HALF))))
    for line, row, arguments, upstream in calls:
        outputs, grads = evaluate(row, arguments, upstream=upstream)
        digest = hashlib.sha256()
        for x in [*outputs, *grads]:
            digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        print(line, digest.hexdigest())
    if options.save:
        torch.save({line: values for line, _, *values in calls}, options.save)


if __name__ == "__main__":
    main()
