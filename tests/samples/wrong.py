"""Bad arguments: parts of the list `bad` of an `Operator`."""

import torch
from samples.draw import R


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


def first(name, function):
    """Replaces the first tensor of a list."""
    return lambda arguments: {name: [function(arguments[name][0]), *arguments[name][1:]]}


def sizes(*names, axes=(0,)):
    """Makes rows for arguments whose axes must have the right size."""

    def row(name, axis):
        return ValueError, name, shorter(name, axis), lambda arguments: list(arguments[name].shape)

    return [row(name, axis) for name in names for axis in axes]


def doubles(*names):
    """Makes rows for arguments whose dtype must be that of another argument."""
    return [(TypeError, name, lambda a, name=name: {name: a[name].double()}) for name in names]


def out_of_range(name, size):
    return [(IndexError, name, last(name, value), value) for value in (-1, size, 10**12)]


def numbers(name, *values):
    return [(ValueError, name, {name: value}, value) for value in values]


def vectors(name, *values):
    return [(ValueError, name, {name: torch.tensor(value).long()}) for value in values]


def token_offsets():
    """Makes rows for token_offsets, which must ascend from 0 to R."""

    def change(arguments, bad):
        flat = {name: arguments[name].flatten() for name in {"inverse", "gates"} & {*arguments}}
        return flat | dict(token_offsets=torch.tensor(bad))

    return [
        (ValueError, "token_offsets", lambda arguments, bad=bad: change(arguments, bad))
        for bad in ([0, 2, 2, 5, R + 1], [0, 5, 4, 4, R], [1, 1, 1, 1, R])
    ]


TWICE = (  # a token has an expert twice
    ValueError,
    "expert_index",
    dict(expert_index=torch.tensor([[0, 1], [2, 1], [3, 3], [4, 4]])),
    [3, 3],
)
