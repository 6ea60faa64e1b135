"""Tensors with torch's negative bit, whose memory holds -x, and tensors without readable memory.

z.conj().imag has the negative bit. Here the in-place operator takes such tensors; test_operators.py
tests the other operators with them.
"""

import contextlib
from itertools import chain, combinations, product

import pytest
import torch
from operators import ROWS, TORCH_NAMES, call_of, sample

NAMES = ["param", "grad", "row", "column", "lr", "correction"]
CHANGED = NAMES[0], *NAMES[2:4]


def tensors(dtype=torch.float32):
    torch.manual_seed(0)
    arguments = sample("factored_step_", dtype=dtype, shape=(2, 4, 3))
    return {name: arguments[name] for name in NAMES}


def step(arguments):
    torch.ops.moe_ext.factored_step_(*arguments.values(), 0.9, 0.2, 1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_negated_tensors(dtype):
    """The numbers change as without the bit, and each tensor keeps its bit."""
    expected = tensors(dtype)
    step(expected)
    for negated in chain(*(combinations(NAMES, size) for size in range(len(NAMES) + 1))):
        call = tensors(dtype)
        call |= {name: torch._neg_view(-call[name]) for name in negated}
        versions = {name: call[name]._version for name in CHANGED}
        step(call)
        for name in NAMES:
            assert torch.equal(call[name], expected[name]), (negated, name)
            assert call[name].is_neg() == (name in negated)
        assert all(call[name]._version == versions[name] + 1 for name in CHANGED)


def test_each_element_needs_its_place_in_memory():
    call, before = tensors(), tensors()["param"]
    call["row"] = torch._neg_view(torch.ones(()).expand(2, 4))
    with pytest.raises(ValueError, match="^factored_step_: row must "):
        step(call)
    assert torch.equal(call["param"], before)


@pytest.mark.parametrize("bit", [torch.conj, lambda x: torch._efficientzerotensor(x.shape)])
def test_other_bits_are_refused(bit):
    call = tensors()
    call["param"] = bit(call["param"].to(torch.complex64))
    with pytest.raises((TypeError, RuntimeError)):
        step(call)


# Tensors whose memory no operator may read


def short(x, missing=None):
    """Returns x with a storage that lacks `missing` bytes; None: all bytes."""
    x = x.clone(memory_format=torch.contiguous_format)
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0 if missing is None else size - missing)
    return x


def conjugate(x):
    return x.to(torch.complex64).conj()


# The last three are views of a tensor with a storage that is too short.
UNREADABLE = {
    "sparse": torch.Tensor.to_sparse,
    "mkldnn": lambda x: x.float().to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x]),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
    "no memory": short,
    "a byte short": lambda x: short(x, 1),
    "short, negative": lambda x: torch._neg_view(short(x)),
    "short, conjugate": lambda x: short(x.to(torch.complex64)).conj(),
}
BESIDE = {"": lambda x: x, "negative": torch._neg_view, "conjugate": conjugate}
PRIVATE = {
    "_count_tokens_": [torch.zeros(3, dtype=torch.int64), torch.ones(3)],
    "_empty_rows": [torch.ones(3, 4), 5],
    "_logits": [torch.ones(3, 4), [torch.ones(4, 2), torch.ones(1, 4, 5)]],
}


def arguments_of(name):
    """Returns an operator, the arguments of a call, and the paths of its tensors with elements."""
    if name in PRIVATE:
        op, args = getattr(torch.ops.moe_ext, name).default, PRIVATE[name]
    else:
        op, args = call_of(name, sample(name, dtype=torch.float32, **ROWS[name].typical[0]))
    paths = []
    for i, x in enumerate(args):
        lists = [(i, n) for n in range(len(x))] if isinstance(x, (list, tuple)) else [(i, None)]
        paths += [path for path in lists if torch.is_tensor(at(args, path))]
    return op, args, [path for path in paths if at(args, path).numel()]


def at(args, path):
    i, n = path
    return args[i] if n is None else args[i][n]


def replaced(args, path, x):
    i, n = path
    args = [*args]
    args[i] = x if n is None else [*args[i][:n], x, *args[i][n + 1 :]]
    return args


@pytest.mark.filterwarnings("ignore:.*nested")
@pytest.mark.parametrize("name", [*ROWS, *PRIVATE])
@pytest.mark.parametrize("surroundings", ["plain", "autocast", "inference"])
def test_tensors_that_cannot_be_read_are_refused(name, surroundings):
    """Each tensor, alone and next to another one with torch's negative or conjugate bit."""
    op, args, paths = arguments_of(name)
    where = {
        "plain": contextlib.nullcontext,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "inference": torch.inference_mode,
    }[surroundings]
    refused = 0
    for path, (kind, change) in product(paths, UNREADABLE.items()):
        if (name, kind) == ("_empty_rows", "quantized"):  # it reads only the sizes
            continue
        try:
            wrong = replaced(args, path, change(at(args, path)))
        except RuntimeError:  # torch cannot make this tensor
            continue
        for (_, form), beside_path in product(BESIDE.items(), paths):
            beside = wrong
            if beside_path != path and at(args, beside_path).is_floating_point():
                beside = replaced(wrong, beside_path, form(at(args, beside_path)))
            message = "storage of at least" if kind in ("no memory", "a byte short") else ""
            with where(), pytest.raises((TypeError, ValueError, RuntimeError), match=message):
                op(*beside)
            refused += 1
    assert refused


@pytest.mark.parametrize("name", ROWS)
def test_two_tensors_that_cannot_be_read(name):
    op, args, paths = arguments_of(name)
    kinds = [UNREADABLE[kind] for kind in ("sparse", "mkldnn", "no memory", "short, negative")]
    for one, second_path in combinations(paths, 2):
        for first, second in product(kinds, kinds):
            try:
                wrong = replaced(args, one, first(at(args, one)))
                wrong = replaced(wrong, second_path, second(at(args, second_path)))
            except RuntimeError:
                continue
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                op(*wrong)


def test_the_error_names_the_argument():
    x, inverse = torch.ones(4, 3), torch.arange(8).view(4, 2)
    message = r"^dispatch: x must have a storage of at least 48 bytes for its shape \[4, 3\], got 0"
    with pytest.raises(ValueError, match=message):
        torch.ops.moe_ext.dispatch(short(x), inverse, None)
    call = tensors() | {"row": tensors()["row"].to_mkldnn()}
    call["param"] = torch._neg_view(-call["param"])
    with pytest.raises(TypeError, match="^factored_step_: row must be dense, got .*[Mm]kldnn"):
        step(call)


def test_counts_with_the_negative_bit():
    counts = torch._neg_view(-torch.tensor([1, 2, 3]))
    torch.ops.moe_ext._count_tokens_(counts, torch.tensor([1.0, 0.0, 2.0]))
    assert counts.tolist() == [2, 2, 5] and counts.is_neg()


def test_every_operator_checks_before_torch_copies():
    """Torch's fallback would copy tensors with these bits before the check of the operator."""
    names = [f"moe_ext::{name}" for name in (*TORCH_NAMES.values(), *PRIVATE)]
    registered = torch._C._dispatch_get_all_op_names()
    assert {name for name in registered if name.startswith("moe_ext::")} == {*names}
    for name in names:
        for key in ("Negative", "Conjugate"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
