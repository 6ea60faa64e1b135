"""The fuzzer of the operators: valid calls, of which a few arguments become hostile.

The seed of a batch and a number determine a call. It has an operator of operators.py, forward or
backward, and one of its samples. CHANGES has the changes of its arguments, at most three, and
SURROUNDINGS where it runs. `check` says what must hold. A batch runs in a process of its own: a
wrong size or index may crash it or hang it.

    python tests/fuzz_operators.py --seed 17 --batches 5    # prints the results of each operator
    python tests/fuzz_operators.py --seed 17 --call 203     # repeats one call
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import inspect
import json
import logging
import math
import random
import re
import resource
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # the first call would import it, which takes seconds and memory
from assertions import assert_own_memory, assert_same_bits
from launch import launch
from operators import (
    DTYPES,
    FORMS,
    ROWS,
    TABLE,
    TORCH_NAMES,
    changed,
    moved,
    named_call_of,
    sample,
    tensors_in,
    upstream_of,
    written,
)
from torch._subclasses import FakeTensor, FakeTensorMode

from moe_ext.formats import PackedWeight
from moe_ext.ops import LoRA

BATCH = 2500  # the calls of a batch
SECONDS = 120  # A call that takes longer hangs.
MEMORY = 1 << 30  # A process may use these bytes in addition to those that it starts with.
SMALL = 1 << 20  # The checks copy tensors of up to this number of elements.


# What changes. The functions of CHANGES map a tensor and a number, `place`, to a hostile value.


def floats(function):
    """Changes floating-point tensors alone."""
    return lambda x, place: function(x, place) if x.is_floating_point() else x


def indices(function):
    """Changes integer tensors alone."""
    return lambda x, place: x if x.is_floating_point() else function(x, place)


def an_axis(function):
    """Changes tensors with dimensions by function(x, axis, size of the axis)."""
    return lambda x, place: function(x, place % x.dim(), x.shape[place % x.dim()]) if x.dim() else x


def one_of(*functions):
    return lambda x, place: functions[place % len(functions)](x)


def with_value(*values):
    """Writes one of the values to one element, or to all elements for every third place."""

    def change(x, place):
        x, value = x.clone(), torch.tensor(values[place % len(values)]).to(x.dtype)
        if x.numel():
            x.view(-1)[slice(None) if place % 3 == 0 else place % x.numel()] = value
        return x

    return change


def huge(x, axis, size):
    shape = [2**40 if i == axis else n for i, n in enumerate(x.shape)]
    return x.narrow(axis, 0, 1).expand(shape) if size else x.new_empty(shape)


def inference(x):
    with torch.inference_mode():
        return x.clone()


CHANGES = {name: one_of(form) for name, form in FORMS.items()} | {
    "subclass": one_of(FORMS["subclass"], lambda x: torch.nn.Parameter(x, False)),
    "not finite": floats(with_value(math.nan, math.inf, -math.inf)),
    "finite": floats(with_value(0.0, -0.0, 5e-324, -1e-310, 1e-40, 6e4, 3e38, -3e38, 1e300)),
    "index": indices(with_value(-1, 0, 1, 2, 5, 8, 2**31, 2**32, 2**62, -(2**63))),
    "order": one_of(lambda x: x.flip(0) if x.dim() else x, lambda x: x.flatten().sort().values),
    "expanded": an_axis(lambda x, axis, size: x.narrow(axis, 0, min(1, size)).expand_as(x)),
    "overlapping": lambda x, _: x.as_strided(x.shape, (1,) * x.dim()),
    "shorter": an_axis(lambda x, axis, size: x.narrow(axis, 0, max(0, size - 1))),
    "longer": an_axis(lambda x, axis, size: torch.cat([x, x.narrow(axis, 0, min(1, size))], axis)),
    "empty": an_axis(lambda x, axis, size: x.narrow(axis, 0, 0)),
    "huge": an_axis(huge),
    "dimensions": one_of(
        lambda x: x[None], lambda x: x[..., None], torch.Tensor.flatten, torch.Tensor.sum,
        lambda x: x.mT if x.dim() > 1 else x, lambda x: x[0] if x.dim() and len(x) else x,
    ),
    "dtype": lambda x, place: x.to(ALL_DTYPES[place % len(ALL_DTYPES)]),
    "meta": lambda x, _: x.to("meta"),
    "layout": one_of(
        torch.Tensor.to_sparse,
        lambda x: x.to_sparse_csr() if x.dim() == 2 else x.to_sparse(),
        lambda x: x.float().to_mkldnn(),
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        lambda x: torch.nested.nested_tensor([x]),
        lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
        lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    ),
    "conjugate": lambda x, _: x.to(torch.complex64).conj(),
    "inference": lambda x, _: inference(x),
    "fake": lambda x, _: FakeTensorMode().from_tensor(x),
}  # fmt: skip
ALL_DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, torch.complex32, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
# with_change makes these: any other value; the memory of another argument; another list.
REPLACEMENTS = ["replaced", "shared", "list"]

# What replaces an argument that is no tensor.
WHOLE = [-1, 0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
REAL = [0.0, -0.0, -1.0, 0.5, 1.0, 5e-324, 1e-40, 1e39, 1e300, math.inf, -math.inf, math.nan]
TEXT = ["", "rely", "é", "\0", "softmax", "sigmoid", "sqrt_softplus", "none", "mean", "sum"]
TEXT += ["relu", "swiglu", "clamped_swiglu", "identity", "x" * 10_000]
LISTS = [[], [1.0], [7.0, 1.0, 0.0], [math.nan] * 3, [True], [False] * 3, [True] * 4, [None]]
TENSORS = [
    torch.tensor(0), torch.zeros(0), torch.ones(5), torch.zeros(4, 2), torch.ones(4, 5).double(),
    torch.arange(5), torch.tensor([0, 4]), torch.tensor([[0, 1]] * 4), torch.arange(8).view(4, 2),
    torch.zeros(1).long().expand(2**40),
]  # fmt: skip
HOSTILE = {int: WHOLE, float: REAL, str: TEXT, bool: [False, True], list: LISTS}
HOSTILE |= {type(None): [*TENSORS, *WHOLE[:4], *REAL[:4], *LISTS]}
ANYTHING = [None, *WHOLE, *REAL, *TEXT, *LISTS, *TENSORS, True, 2**64, 1j, object]

SURROUNDINGS = ["plain"] * 10 + ["gradients"] * 6
SURROUNDINGS += ["inference", "autocast bfloat16", "autocast float16", "fake", "meta"] * 2


@dataclass(frozen=True)
class Change:
    argument: str
    kind: str
    place: int


@dataclass(frozen=True)
class Call:
    operator: str
    sample: int
    dtype: torch.dtype
    surroundings: str
    changes: tuple[Change, ...]


def operator(name):
    return getattr(torch.ops.moe_ext, TORCH_NAMES[name]).default


def schema(name):
    return operator(name)._schema


def function_of(name):
    """Returns what users call; the operator itself for backward and in-place operators."""
    public = name in TABLE and not any(written(operator(name)))
    return ROWS[name].function if public else operator(name)


@functools.cache
def arguments_of(name):
    """Returns the names of the arguments: those of the function, or of the operator's schema."""
    if function_of(name) is operator(name):
        return [a.name for a in schema(name).arguments]
    return list(inspect.signature(ROWS[name].function).parameters)


@functools.cache
def samples_of(name):
    return [*ROWS[name].samples, *ROWS[name].typical]


def call_of_seed(seed, number):
    """Draws a call of a batch, independently of the calls before it."""
    draw = random.Random(f"{seed} {number}")
    name = draw.choice(sorted(ROWS))
    kinds = [*CHANGES, *REPLACEMENTS]

    def change():
        return Change(draw.choice(arguments_of(name)), draw.choice(kinds), draw.randrange(10_000))

    return Call(
        operator=name,
        sample=draw.randrange(len(samples_of(name))),
        dtype=draw.choice(DTYPES),
        surroundings=draw.choice(SURROUNDINGS),
        changes=tuple(change() for _ in range(draw.choice([0, 1, 1, 1, 1, 2, 2, 2, 3, 3]))),
    )


# Making a call


@functools.cache
def valid_arguments(name, number, dtype):
    """Returns the arguments of a sample, by name."""
    torch.manual_seed(number)
    return named_call_of(name, sample(name, dtype=dtype, **samples_of(name)[number]))[1]


def is_small(x):
    return not x.is_nested and x.numel() <= SMALL


def is_plain(x):
    """Returns whether the checks can copy a tensor and read its memory."""
    strided = is_small(x) and x.layout == torch.strided and x.device.type == "cpu"
    return strided and not (isinstance(x, FakeTensor) or x.is_quantized or x._is_zerotensor())


def all_plain(arguments):
    return all(map(is_plain, tensors_in(list(arguments.values()))))


def with_change(arguments, change):
    """Returns the new value of an argument."""
    value, place = arguments.get(change.argument), change.place
    if change.kind == "replaced":
        return ANYTHING[place % len(ANYTHING)]
    if isinstance(value, list) and change.kind == "list":
        lists = [[], value[1:], value * 2, [*value, None], [*value, 1], tuple(value)]
        lists.append(collections.deque(value))  # a sequence that is no list
        return lists[place % len(lists)]
    if isinstance(value, list) and tensors_in(value):
        having = [i for i, item in enumerate(value) if tensors_in([item])]  # others are None
        i = having[place % len(having)]
        return [*value[:i], with_change({change.argument: value[i]}, change), *value[i + 1 :]]
    if isinstance(value, PackedWeight | LoRA):
        tensors = [key for key in value._fields if tensors_in([getattr(value, key)])]
        changes_tensor = change.kind in CHANGES or change.kind == "shared"
        fields = tensors if changes_tensor else value._fields
        field = fields[place % len(fields)]
        fresh = with_change(
            arguments | {field: getattr(value, field)}, dataclasses.replace(change, argument=field)
        )
        return value._replace(**{field: fresh})
    if not isinstance(value, torch.Tensor):
        values = HOSTILE.get(type(value), ANYTHING)
        return values[place % len(values)]
    if change.kind == "shared":
        tensors = tensors_in(list(arguments.values()))
        return in_memory_of(tensors[place % len(tensors)], value)
    if change.kind not in CHANGES or not is_plain(value):  # such as a fake tensor
        return value
    return CHANGES[change.kind](value, place)


def in_memory_of(base, x):
    """Returns another tensor in the shape of x if it is large enough, else as it is."""
    fits = is_plain(base) and base.is_contiguous() and x.numel() <= base.numel()
    return base.flatten()[: x.numel()].view(x.shape) if fits else base


def made(call):
    """Returns the arguments of a call; None if torch itself cannot make one of them."""
    arguments = moved(valid_arguments(call.operator, call.sample, call.dtype))
    try:
        for change in call.changes:
            arguments[change.argument] = with_change(arguments, change)
    except (RuntimeError, TypeError):
        return None
    tensors = tensors_in(list(arguments.values()))
    if any(isinstance(x, FakeTensor) for x in tensors) and not all(map(is_small, tensors)):
        return None  # torch's error prints the large tensor, which breaks the state of torch
    if call.surroundings in ("fake", "meta") and not all_plain(arguments):
        return None
    if call.surroundings == "meta":
        return on_meta(call.operator, arguments)
    if call.surroundings == "fake":
        return changed(FakeTensorMode().from_tensor, arguments)
    if call.surroundings == "gradients" and call.operator in TABLE:
        differentiable = ROWS[call.operator].differentiable
        return {
            key: changed(as_leaf, value) if key in differentiable else value
            for key, value in arguments.items()
        }
    return arguments


def as_leaf(x):
    can = x.is_floating_point() and not x.is_inference()
    return x.detach().requires_grad_() if can else x


def on_meta(name, arguments):
    """Moves the tensors to meta. A tensor without dimensions may stand for a number: it stays."""
    tensors = {a.name for a in schema(name).arguments if "Tensor" in str(a.type)}
    return {
        key: changed(lambda x: torch.empty_like(x, device="meta"), value)
        if key in tensors or not isinstance(value, torch.Tensor)
        else value
        for key, value in arguments.items()
    }


@contextlib.contextmanager
def surrounded(surroundings):
    if surroundings.startswith("autocast"):
        with torch.autocast("cpu", getattr(torch, surroundings.split()[1])):
            yield
    elif surroundings == "inference":
        with torch.inference_mode():
            yield
    else:
        yield


@dataclass
class Returned:
    tensors: list


@dataclass
class Raised:
    exception: str
    message: str


def outcome(name, arguments, surroundings="plain"):
    """Calls the operator. The results include the arguments that it writes to, and gradients."""
    leaves = [x for x in tensors_in(list(arguments.values())) if x.requires_grad]
    try:
        with surrounded(surroundings):
            results = tensors_in(function_of(name)(**arguments))
            roots = [y for y in results if y.requires_grad]
            if roots:
                grads = torch.autograd.grad(roots, leaves, upstream_of(roots), allow_unused=True)
                results = [y.detach() for y in results] + [g for g in grads if g is not None]
    except Exception as error:
        return Raised(type(error).__name__, str(error))
    into = [
        a.name for a, w in zip(schema(name).arguments, written(operator(name)), strict=True) if w
    ]
    return Returned(results + [arguments[key] for key in into])


# What must hold

# Errors that Python or torch raises before the operator runs.
ERRORS_OF_TORCH = {
    r"^moe_ext::\w+\(\) Expected a value of type": "a value that the schema does not take",
    r"^Could not run '(moe_ext|aten)::\w+' with arguments from the "
    "'(Sparse|Quantized|Mkldnn|Nested)": "a layout that has no kernel",
    "^Sparse CSR tensors do not have strides": "batchwise_topm calls unsqueeze first",
    "^Cannot set version_counter for inference tensor": "so does unsqueeze of other sparse tensors",
    "^(tensor does not have a device$|There were no tensor arguments to this function)": (
        "None for a tensor: the dispatcher asks for its device"
    ),
    "^Unimplemented scalar type$": "None for a tensor: autocast asks for its type",
    "NestedTensorImpl doesn't support sizes|not supported for (NestedTensor|NJT)": (
        "a nested tensor has no sizes"
    ),
    "^Please convert all Tensors to FakeTensors first": "a fake tensor among others",
    "^Expected all tensors to be on the same device": "fake tensors of several devices",
    "^The tensor has a non-zero number of elements, but its data is not allocated yet": (
        "the dispatcher does not look into an optional list for tensors without memory"
    ),
    "^ZeroTensors are immutable": "a zero tensor is written to",
    r"^(moe_ext\.\w+\.default$|Multiple dispatch failed|Mixing fake modes)": (
        "subclasses of tensors that do not know the operator or each other"
    ),
    "^Boolean value of Tensor with": "several numbers for a flag",
    r"^Cannot access storage of \w+TensorImpl": "torch cannot print the tensor in its error",
    "^numel: integer multiplication overflow": "more than 2^63 elements",
    "^Inference tensors cannot be saved for backward": "torch.inference_mode says so",
}
OUT_OF_MEMORY = r"DefaultCPUAllocator: .* you tried to allocate (\d+) bytes"
TOO_MANY_BYTES = r"^Storage size calculation overflowed with sizes=\[([\d, ]+)\]"
NEVER = ["INTERNAL ASSERT", "lease file", "bad_alloc"]


def memory_of(x):
    """Returns a copy of the bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


def copied(values):
    """Returns contiguous copies of all tensors."""

    def copy(x):
        copy = x.detach().as_subclass(torch.Tensor).resolve_neg().resolve_conj()
        copy = copy.clone(memory_format=torch.contiguous_format)
        return copy.requires_grad_() if x.requires_grad else copy

    return changed(copy, values)


def is_of_torch(error):
    return any(re.search(pattern, error.message) for pattern in ERRORS_OF_TORCH)


def assert_message(call, arguments, error):
    """The error of an operator says what is wrong with which argument."""
    text = f"{error.exception}: {error.message}"
    assert not any(word in error.message for word in NEVER), text
    if asked := re.search(OUT_OF_MEMORY, error.message):
        meta = outcome(call.operator, on_meta(call.operator, arguments))
        outputs = meta.tensors if isinstance(meta, Returned) else []
        sizes = [x.numel() for x in tensors_in(list(arguments.values())) + outputs]
        assert int(asked[1]) <= 16 * sum(sizes), f"not justified: {text}"
        return
    if asked := re.search(TOO_MANY_BYTES, error.message):
        tensors = tensors_in(list(arguments.values()))
        given = [size for x in tensors for size in x.shape] + list(arguments.values())
        largest = max(size for size in given if isinstance(size, int))
        assert max(map(int, asked[1].split(", "))) <= largest, f"not justified: {text}"
        return
    rows = {call.operator, ROWS[call.operator].backward or call.operator}
    operators = "|".join(rows | {TORCH_NAMES[name] for name in rows})
    names = [a.name for row in rows for a in schema(row).arguments]
    assert error.exception in ("ValueError", "TypeError", "IndexError"), text
    assert re.match(rf"({operators}): .* must .*, got ", error.message, re.DOTALL), text
    assert any(name in error.message for name in names), text


def shapes_of(returned):
    return [(x.shape, x.dtype) for x in returned.tensors]


def assert_same(actual, expected):
    """Compares the type of an error; results must be bitwise identical, but any NaN is equal."""
    assert type(actual) is type(expected), f"{actual}, but of contiguous copies {expected}"
    if isinstance(actual, Raised):
        assert actual.exception == expected.exception, f"{actual}, but of copies {expected}"
        return
    for a, e in zip(actual.tensors, expected.tensors, strict=True):
        a, e = copied([a, e])
        if a.is_floating_point():
            assert torch.equal(a.isnan(), e.isnan())
            a, e = a.nan_to_num(0, math.inf, -math.inf), e.nan_to_num(0, math.inf, -math.inf)
        assert_same_bits(a, e)


def keeps_values(call):
    """Returns whether the changes keep the numbers of the sample, so that the call is valid."""
    valid = valid_arguments(call.operator, call.sample, call.dtype)
    return all(
        change.kind in FORMS and tensors_in([valid.get(change.argument)]) for change in call.changes
    )


def check(call):
    """Makes a call and checks it. Returns "raised", "returned", or "not made".

    - An error names the operator, the argument, the rule and the value, or torch raises it.
    - Results and errors are those of contiguous copies of the arguments.
    - Results have the shapes and dtypes of the Meta kernel, which then raises no error.
    - A call whose changes keep the values of the sample is valid.
    - Arguments that the operator does not write to are unchanged. Results share no memory.
    """
    name, arguments = call.operator, made(call)
    if arguments is None:
        return "not made"
    plain = all_plain(arguments)  # not on meta, and no fake tensors
    copies = copied(arguments) if plain else None
    into = {a.name for a in schema(name).arguments if a.alias_info and a.alias_info.is_write}
    kept = [x for key, x in arguments.items() if key not in into]
    kept = [x for x in tensors_in(kept) if is_plain(x)]
    before = list(map(memory_of, kept))
    actual = outcome(name, arguments, call.surroundings)
    assert all(map(torch.equal, before, map(memory_of, kept))), "an argument has changed"

    if isinstance(actual, Raised):
        if not is_of_torch(actual):
            assert_message(call, arguments, actual)
            if plain and not into:  # an in-place operator refuses shared memory
                assert_same(actual, outcome(name, copies, call.surroundings))
        assert not (plain and keeps_values(call)), f"refuses a valid call: {actual.message}"
        return "raised"
    if plain:
        assert_same(actual, outcome(name, copies, call.surroundings))
        if not into:
            assert_own_memory(actual.tensors, list(arguments.values()))
        if not call.surroundings.startswith("autocast"):
            meta = outcome(name, on_meta(name, arguments))
            assert isinstance(meta, Returned), f"the Meta kernel raised {meta}"
            assert shapes_of(meta) == shapes_of(actual)[: len(meta.tensors)]  # gradients follow
    elif call.surroundings in ("fake", "meta"):
        real = outcome(name, made(dataclasses.replace(call, surroundings="plain")))
        assert isinstance(real, Raised) or shapes_of(real) == shapes_of(actual)
    return "returned"


# Batches


def described(call):
    """Returns the call and its arguments, in which long tensors are abridged."""
    lines = [str(call), f"sample: {samples_of(call.operator)[call.sample]}"]
    for key, value in (made(call) or {}).items():
        tensors = tensors_in([value])
        shapes = [f"{x.dtype} {'' if x.is_nested else tuple(x.shape)}" for x in tensors]
        lines.append(f"  {key}: {', '.join(shapes) if tensors else repr(value)[:200]}")
    return "\n".join(lines)


def make_batch(seed, calls):
    """Makes the first calls of a batch in this process; prints the start and the result of each."""
    warnings.simplefilter("ignore")
    logging.disable()  # FakeTensorMode logs each error
    torch.set_num_threads(1)
    faulthandler.enable()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    for number in range(calls):
        call = call_of_seed(seed, number)
        print(json.dumps([number, call.operator]), flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        text = ""
        try:
            result = check(call)
        except Exception:
            result, text = "failed", f"{described(call)}\n{traceback.format_exc()}"
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps([number, call.operator, result, text]), flush=True)


def run_batch(seed, calls=BATCH):
    """Runs a batch in another process; returns the numbers of results, and the failures."""
    done = launch(__file__, ["--seed", seed, "--in-this-process", calls], seconds=60 * SECONDS)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    counts = collections.Counter((operator, result) for _, operator, result, _ in lines[1::2])
    failures = [(number, text) for number, _, result, text in lines[1::2] if result == "failed"]
    if done.status:
        number, operator = lines[-1][:2] if lines else (0, "")
        counts[operator, "failed"] += 1
        failures.append((number, f"exit status {done.status}\n{done.stderr[-4000:]}"))
    replay = f"python tests/fuzz_operators.py --seed {seed} --call"
    return counts, [f"{replay} {number}\n{text}" for number, text in failures]


def main():
    parser = argparse.ArgumentParser(description="Makes hostile calls of the operators.")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first batch")
    parser.add_argument("--batches", type=int, default=1, help=f"how many, of {BATCH} calls each")
    parser.add_argument("--call", type=int, help="repeat this call of the batch alone")
    parser.add_argument("--in-this-process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.in_this_process:
        make_batch(options.seed, options.in_this_process)
        return
    if options.call is not None:
        call = call_of_seed(options.seed, options.call)
        print(described(call), check(call), sep="\n")
        return
    counts, failures = collections.Counter(), []
    for seed in range(options.seed, options.seed + options.batches):
        batch_counts, failed = run_batch(seed)
        counts += batch_counts
        failures += failed
        print(*failed, sep="\n", flush=True)
    results = ["returned", "raised", "not made", "failed"]
    print(f"{'operator':36}" + "".join(f"{result:>10}" for result in results))
    for name in sorted(ROWS):
        print(f"{name:36}" + "".join(f"{counts[name, result]:10,}" for result in results))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
