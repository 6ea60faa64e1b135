"""Random arguments that the samples of several operators share, and sizes."""

import torch


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
T, E, K, R = 4, 5, 2, 8  # the sizes of TYPICAL[0], which the bad arguments change
MANY = [65_536, 200_000]
# The experts of each token, in slot order.
ROUTES = [[[2], [], [0, 4, 1], [0], [4, 2], []], [[], [], []], []]
RAGGED = [dict(routes=routes, E=5) for routes in ROUTES]


def routing(T=0, E=1, k=1, routes=None, all_to=None, skewed=0):
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


# Slots are (token, slot number) pairs, sorted by token.


def per_token(values, token_offsets):
    """Splits the values of the slots by token."""
    return values if token_offsets is None else values.split(token_offsets.diff().tolist())


def token_of_slot(inverse, token_offsets):
    if token_offsets is None:
        return torch.arange(len(inverse), device=inverse.device).repeat_interleave(inverse.shape[1])
    return torch.repeat_interleave(token_offsets.diff())
