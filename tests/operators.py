"""The table of operators. ops/test_operators.py checks every generic property for every row.

samples/ has the rows, a file for each stem. A row defines the arguments of an operator, the
expected results from reference.py, and the properties that it lacks, with the reason. Arguments
come from torch's CPU generator, which conftest.py seeds. The arguments of a backward operator are
those that autograd passes to it.

`python operators.py` prints a hash of each operator's results, to compare instruction sets. Random
numbers differ between x86-64 and Arm; with --save and --load both have the same arguments.
"""

import argparse
import hashlib
import warnings

import torch
from assertions import gradients, recorded_ops
from samples import (
    balanced_gating,
    combine,
    cv_squared,
    dispatch,
    experts,
    factored,
    gating,
    importance,
    linear_cross_entropy,
    load,
    lstm,
    packed_experts,
    topk_routing,
)
from torch.utils._pytree import tree_leaves, tree_map_only

HALF = [torch.bfloat16, torch.float16]
DTYPES = [torch.float64, torch.float32, *HALF]

STEMS = [
    gating, topk_routing, load, balanced_gating, importance, cv_squared, dispatch, combine, experts,
    packed_experts, linear_cross_entropy, lstm, factored,
]  # fmt: skip
TABLE = {name: row for stem in STEMS for name, row in stem.TABLE.items()}
# Every operator, including backward operators, and its row.
ROWS = TABLE | {row.backward: row for row in TABLE.values() if row.backward}
# Torch's operator behind each row; packed_experts is a function that calls experts.
TORCH_NAMES = {name: name for name in ROWS}
TORCH_NAMES |= {"packed_experts": "experts", "_packed_experts_backward": "_experts_backward"}


class Subclass(torch.Tensor):
    pass


def behind_others(x):
    """Moves a tensor behind other numbers in the same memory."""
    memory = torch.cat([x.flatten()[:3], x.flatten()])
    return memory[len(memory) - x.numel() :].view(x.shape)


def read_only(x):
    if x.dtype == torch.bfloat16 or x.is_cuda:
        return x
    array = x.numpy().copy()
    array.setflags(write=False)
    with warnings.catch_warnings(action="ignore"):  # torch warns of arrays that are read-only
        return torch.from_numpy(array)


# The same numbers in another form: the results must be the same.
FORMS = {
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 1],
    "behind others": behind_others,
    "negative": lambda x: torch._neg_view(-x) if x.is_floating_point() else x,
    "int32": lambda x: x.int() if x.dtype == torch.int64 else x,
    "subclass": lambda x: x.as_subclass(Subclass),
    "read-only": read_only,
}


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
        if not x.is_floating_point():
            return x
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


def evaluate(row, arguments, function=None, upstream=None, alone=False):
    """Returns the outputs, and the gradients of the differentiable arguments for `upstream`.

    With `alone`, the gradients of each output without those of the others follow.
    """
    arguments, leaves = with_leaves(arguments, row.differentiable)
    outputs = as_tuple((function or row.function)(**arguments))
    floats = [i for i, y in enumerate(outputs) if y.is_floating_point()]
    learned = [i for i in floats if i not in row.constant]
    if leaves and function is None:
        assert learned == [i for i in floats if outputs[i].requires_grad]
    upstream = dict(zip(floats, upstream or upstream_of(outputs), strict=True))
    grads = []
    for chosen in [floats, *([i] for i in learned if alone and len(floats) > 1)] if leaves else []:
        ys, dys = [outputs[i] for i in chosen], [upstream[i] for i in chosen]
        grads += gradients(ys, leaves, dys, retain_graph=alone)
    return [y.detach() for y in outputs], grads


def call_of(name, arguments):
    """Returns the operator `name` and the arguments of its call, in forward or backward."""
    row = ROWS[name]
    with recorded_ops() as calls:
        evaluate(row, arguments)
    called = {called_name: (op, args) for called_name, op, args, kwargs in calls}
    assert set(called) == {TORCH_NAMES[name] for name, r in ROWS.items() if r is row}
    op, args = called[TORCH_NAMES[name]]
    return op, changed(torch.Tensor.detach, list(args))


def named_call_of(name, arguments):
    """Returns what users call, or a backward operator, and the arguments of its call by name."""
    if name in TABLE:
        return ROWS[name].function, arguments
    op, args = call_of(name, arguments)
    # The call has no default arguments at its end.
    return op, dict(zip((a.name for a in op._schema.arguments), args, strict=False))


def written(op):
    """Returns for each argument whether the operator writes to it."""
    return [a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments]


def run(op, args):
    """Returns the results of a call as tensors, including copies of arguments that it writes to."""
    args = [x.clone() if w else x for x, w in zip(args, written(op), strict=False)]
    return tensors_in(op(*args)) + [x for x, w in zip(args, written(op), strict=False) if w]


def hash_of(tensors):
    digest = hashlib.sha256()
    for x in tensors:
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def precise_calls():
    """Yields (name, number and dtype; arguments; upstream gradients) of the precise samples."""
    for dtype in DTYPES:
        for name, row in TABLE.items():
            for number, sizes in enumerate(row.precise):
                torch.manual_seed(number)
                arguments = row.make(dtype, **sizes)
                upstream = upstream_of(as_tuple(row.function(**changed(torch.clone, arguments))))
                yield f"{name} {number} {dtype}".replace("torch.", ""), arguments, upstream


def hashes(calls=None):
    """Yields the name of each call and the hash of its results and gradients."""
    for line, arguments, upstream in calls or precise_calls():
        outputs, grads = evaluate(ROWS[line.split()[0]], arguments, upstream=upstream)
        yield line, hash_of([*outputs, *grads])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[-1])
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--save", metavar="FILE", help="also save the arguments")
    file.add_argument("--load", metavar="FILE", help="load the arguments, made on another machine")
    options = parser.parse_args()
    if options.load:
        saved = torch.load(options.load, weights_only=True)
        calls = [(line, *values) for line, values in saved.items()]
    else:
        calls = list(precise_calls())
    for line, digest in hashes(calls):
        print(line, digest)
    if options.save:
        torch.save({line: values for line, *values in calls}, options.save)


if __name__ == "__main__":
    main()
