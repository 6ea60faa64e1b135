"""The properties of operators, each written once and tested for every row of tests/operators.py.

`samples` are many and small, `typical` samples are few, and `large` samples are divided among
threads. Tests over ROWS include the backward operators. The other files of this folder test what is
specific to one operator.
"""

import os
import subprocess
import sys
from itertools import combinations

import emulated
import operators
import pytest
import torch
from assertions import (
    assert_as_accurate,
    assert_deterministic,
    assert_exact,
    assert_same_bits,
    assert_same_products,
    assert_second_derivative_refused,
    gradients,
    poison_freed_memory,
    raises,
)
from machine import instruction_sets
from operators import (
    HALF,
    ROWS,
    TABLE,
    as_tuple,
    call_of,
    changed,
    evaluate,
    moved,
    run,
    sample,
    tensors_in,
    upstream_of,
    with_leaves,
    written,
)
from torch._subclasses import FakeTensorMode

pytestmark = pytest.mark.emulated


def short(value):
    """Shortens a size for the name of a test; a long list becomes its length."""
    return value if len(str(value)) < 60 else f"{len(value)} numbers"


PROPERTIES = {"cuda"}  # the properties that a row can lack


@pytest.fixture(autouse=True)
def skip_devices_without_kernels(request):
    """Skips tests of an operator that lacks CUDA, on CUDA and with emulated kernels."""
    sizes = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    reason = ROWS[sizes["name"]].lacks.get("cuda") if "name" in sizes else None
    if reason and sizes.get("device", "cpu") != "cpu":
        pytest.skip(reason)


def each(prop, kind, rows=TABLE, count=None):
    """Parametrizes a test by the operators with a property and their first `count` samples."""
    PROPERTIES.add(prop)
    for name, row in rows.items():
        assert prop in row.lacks or getattr(row, kind), f"{name} must have samples for {prop}"
    cases = [
        pytest.param(
            name,
            sizes,
            id=f"{name}-{'-'.join(f'{key}={short(value)}' for key, value in sizes.items())}",
            marks=pytest.mark.equation(*row.equations),
        )
        for name, row in rows.items()
        if prop not in row.lacks
        for sizes in getattr(row, kind)[:count]
    ]
    return pytest.mark.parametrize("name, sizes", cases)


def assert_equal(actual, expected):
    """Compares numbers to the accuracy of float64, and indices exactly."""
    for a, e in zip(actual, expected, strict=True):
        assert_exact(a, e, nan=True) if e.is_floating_point() else assert_same_bits(a, e)


def assert_bits(name, actual, expected):
    same = assert_same_products if ROWS[name].products else assert_same_bits
    for a, e in zip(actual, expected, strict=True):
        same(a, e)


def test_the_table_is_complete():
    """A new operator needs a row, and a row needs a reason for each property that it lacks."""
    registered = {
        schema.name.split("::")[1]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("moe_ext::")
    }
    # _empty_rows has no result to compare; see test_memory_of_received_rows. The result of
    # _count_tokens_ depends on whether a backward pass runs; see layer/test_adaptive.py.
    assert registered == set(ROWS) | {"_empty_rows", "_count_tokens_"}
    for row in TABLE.values():
        assert set(row.lacks) <= PROPERTIES and all(row.lacks.values())


# Against the reference


@pytest.mark.guarantee("The paper's equations")
@each("reference", "samples")
def test_equals_reference(device, name, sizes):
    row, arguments = ROWS[name], sample(name, **sizes)
    actual = as_tuple(row.function(**moved(arguments, device)))
    assert all(y.device.type == device and y.is_contiguous() for y in actual)
    assert_equal(actual, as_tuple(row.reference(**arguments)))


@each("limits", "limits")
def test_limits(device, name, sizes):
    """No counter in a kernel is too narrow, in forward and in backward."""
    if emulated.active and max(sizes.get("T", 0), sizes.get("N", 0)) > 60_000:
        pytest.skip("takes too long emulated")
    row, arguments = ROWS[name], sample(name, device, **sizes)
    actual, expected = evaluate(row, arguments), evaluate(row, arguments, row.plain)
    for a, e in zip(sum(actual, []), sum(expected, []), strict=True):
        assert_equal([a], [e])


@pytest.mark.guarantee("The paper's equations")
@each("gradients", "samples")
def test_gradients_equal_reference(device, name, sizes):
    """The gradients of all outputs together, and of each output without gradients of the others."""
    row, arguments = ROWS[name], sample(name, **sizes)
    actual_arguments, leaves = with_leaves(moved(arguments, device), row.differentiable)
    arguments, expected_leaves = with_leaves(arguments, row.differentiable)
    actual = as_tuple(row.function(**actual_arguments))
    expected = as_tuple(row.reference(**arguments))
    assert [y.requires_grad for y in actual] == [
        y.is_floating_point() and i not in row.constant for i, y in enumerate(actual)
    ]
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if a.requires_grad]
    for chosen in [pairs, *([pair] for pair in pairs if len(pairs) > 1)]:
        ys, es = zip(*chosen, strict=True)
        upstream = upstream_of(es)
        found = gradients(ys, leaves, moved(upstream, device), retain_graph=True)
        assert_equal(found, gradients(es, expected_leaves, upstream, retain_graph=True))


@each("gradcheck", "typical")
def test_gradcheck(device, name, sizes):
    row = ROWS[name]
    arguments = sample(name, device, **sizes)
    arguments, leaves = with_leaves(arguments, row.differentiable)

    def function(*inputs):
        inputs = iter(inputs)
        moving = {
            key: changed(lambda x: next(inputs), arguments[key])
            for key in row.differentiable
            if key in arguments
        }
        outputs = as_tuple(row.function(**arguments | moving))
        return tuple(y.nan_to_num(neginf=0) for y in outputs if y.requires_grad)

    assert torch.autograd.gradcheck(function, leaves)
    if "second_derivative" in row.lacks:
        assert torch.autograd.gradgradcheck(function, leaves)


@each("second_derivative", "typical")
def test_second_derivative_is_refused(device, name, sizes):
    row = ROWS[name]
    arguments, leaves = with_leaves(sample(name, device, **sizes), row.differentiable)

    def function(*_):
        outputs = as_tuple(row.function(**arguments))
        return sum(y.nan_to_num(neginf=0).square().sum() for y in outputs if y.requires_grad)

    assert_second_derivative_refused(function, leaves)


@each("needed", "typical")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_what_needs_a_gradient_gets_one(device, name, sizes, dtype):
    """Gradients of one tensor or of some arguments are bitwise identical to the full gradients."""
    row, arguments = ROWS[name], sample(name, device, dtype, **sizes)
    _, expected = evaluate(row, arguments)
    numbers = iter(range(len(expected)))
    owned = [
        [next(numbers) for _ in tensors_in(arguments[key])]
        for key in row.differentiable
        if key in arguments
    ]
    some = [sum(each, []) for n in range(1, len(owned)) for each in combinations(owned, n)]
    for needed in [*([one] for one in range(len(expected))), *some]:
        frozen, leaves = with_leaves(arguments, row.differentiable, needed)
        floats = [y for y in as_tuple(row.function(**frozen)) if y.is_floating_point()]
        found = gradients(floats, [leaves[i] for i in needed], upstream_of(floats))
        assert_bits(name, found, [expected[i] for i in needed])


# Precision


@each("accuracy", "precise")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
def test_as_accurate_as_plain_torch(device, name, sizes, dtype):
    """Plain torch computes half types in float32 as well, but GEMMs in the type itself.

    In float64, results have the accuracy of float64.
    """
    row = ROWS[name]
    if dtype in HALF and "half_types" not in row.lacks:
        pytest.skip("test_half_types_are_computed_in_float32 asks for more")
    arguments = sample(name, device, dtype, **sizes)
    outputs, grads = evaluate(row, arguments)
    upstream = upstream_of(outputs)
    plain, exact = (
        evaluate(row, moved(arguments, dtype=to), row.plain, moved(upstream, dtype=to))
        for to in (None if row.products else torch.float32, torch.float64)
    )
    for a, p, e in zip(outputs + grads, plain[0] + plain[1], exact[0] + exact[1], strict=True):
        if a.is_floating_point() and a.dtype != torch.float64:
            assert_as_accurate(a, p.to(a.dtype), e)
        else:
            assert_equal([a], [e])


@each("half_types", "precise")
@pytest.mark.parametrize("dtype", HALF)
def test_half_types_are_computed_in_float32(device, name, sizes, dtype):
    """The result is bitwise identical to the float32 result, rounded once to the output type."""
    row, arguments = ROWS[name], sample(name, device, dtype, **sizes)

    def widened(values):
        return changed(lambda x: x.float() if x.dtype == dtype else x, values)

    outputs, grads = evaluate(row, arguments)
    upstream = widened(upstream_of(outputs))
    expected, expected_grads = evaluate(row, widened(arguments), upstream=upstream)
    for a, e in zip(outputs + grads, expected + expected_grads, strict=True):
        assert_same_bits(a, e.to(a.dtype))


@each("autocast", "typical")
def test_autocast(device, name, sizes):
    """Gates run in float32, experts in the lower precision; other operators are unchanged."""
    row = ROWS[name]
    given = torch.bfloat16 if row.autocast == torch.float32 else torch.float32
    arguments = sample(name, device, given, **sizes)
    with_grad, leaves = with_leaves(arguments, row.differentiable)
    with torch.autocast(device, torch.bfloat16):
        outputs = as_tuple(row.function(**with_grad))
    cast = moved(arguments, dtype=row.autocast)
    for sums_only in {"gates", "linear_bias"} & {*cast}:  # no GEMM reads them
        cast[sums_only] = arguments[sums_only]
    expected, expected_grads = evaluate(row, cast)
    assert_bits(name, [y.detach() for y in outputs], expected)
    floats = [y for y in outputs if y.is_floating_point()]
    grads = gradients(floats, leaves, upstream_of(outputs))
    assert_bits(name, grads, [e.to(a.dtype) for a, e in zip(grads, expected_grads, strict=True)])


# What the dispatcher and the compiler require, for the backward operators too


@pytest.mark.emulated(False)  # what is registered does not depend on the device
@each("opcheck", "typical", ROWS)
@pytest.mark.parametrize(
    "dtype, layout", [(torch.float32, "contiguous"), (torch.bfloat16, "transposed")]
)
def test_opcheck(device, name, sizes, dtype, layout):
    op, args = call_of(name, sample(name, device, dtype, **sizes))
    differentiable = name in TABLE and ROWS[name].differentiable

    def leaf(x):
        x = LAYOUTS[layout](x)
        return x.requires_grad_() if differentiable and x.is_floating_point() else x

    torch.library.opcheck(op, tuple(changed(leaf, args)))


@each("meta", "typical", ROWS)
def test_meta_has_the_shapes(device, name, sizes):
    op, args = call_of(name, sample(name, device, torch.float32, **sizes))
    actual, expected = run(op, moved(args, "meta")), run(op, args)
    for a, e in zip(actual, expected, strict=True):
        assert a.device.type == "meta"
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())


@each("pure", "typical", ROWS)
def test_pure(device, name, sizes):
    """Inputs do not change; outputs are contiguous and have their own memory."""
    op, args = call_of(name, sample(name, device, torch.float32, **sizes))
    copies = moved(args)
    results = run(op, args)
    for x, copy in zip(tensors_in(args), tensors_in(copies), strict=True):
        assert_same_bits(x, copy)
    used = [x.untyped_storage().data_ptr() for x in tensors_in(args) + results if x.numel()]
    places = {x.untyped_storage().data_ptr() for x in results if x.numel()}
    assert sum(place in places for place in used) == len(places)
    assert all(x.is_contiguous() for x in results)


LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() else x,
}


@each("layouts", "typical", ROWS)
@pytest.mark.parametrize("layout", ["transposed", "strided"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_layout(device, name, sizes, layout, dtype):
    op, args = call_of(name, sample(name, device, dtype, **sizes))
    expected = run(op, args)
    assert_bits(name, run(op, changed(LAYOUTS[layout], args)), expected)


@each("expanded", "typical", ROWS)
def test_expanded_arguments(device, name, sizes):
    """Autograd also expands the gradient of a sum."""
    op, args = call_of(name, sample(name, device, torch.float32, **sizes))

    def expanded(x):
        return LAYOUTS["expanded"](x) if x.is_floating_point() else x

    args = [x if w else changed(expanded, x) for x, w in zip(args, written(op), strict=False)]
    assert_bits(name, run(op, args), run(op, changed(LAYOUTS["contiguous"], args)))


@each("initialised", "typical", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_uninitialised(device, name, sizes, dtype):
    """Runs in memory that held NaN: an element that no row reaches is exactly zero."""
    op, args = call_of(name, sample(name, device, dtype, **sizes))
    expected = run(op, args)
    sizes = {x.numel() for x in tensors_in(args) + expected}
    for _ in range(3):
        poison_freed_memory(*sizes, device=device)
        actual = run(op, args)
        assert_bits(name, actual, expected)
        assert not any(x.isnan().any() for x in actual)


@pytest.mark.emulated(False)  # the compiler does not see the device
@each("compile", "typical", count=1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_a_whole_graph(device, name, sizes, dynamic):
    torch._dynamo.reset()
    row, arguments = ROWS[name], sample(name, device, torch.float32, **sizes)
    compiled = torch.compile(row.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    actual, grads = evaluate(row, arguments, compiled)
    expected, expected_grads = evaluate(row, arguments)
    assert_bits(name, actual + grads, expected + expected_grads)


# Inputs of other kinds than the samples


def indices_of(arguments):
    return {
        name: x
        for name, x in arguments.items()
        if isinstance(x, torch.Tensor) and not x.is_floating_point()
    }


def narrow(arguments):
    """Converts the indices to int32."""
    return arguments | {name: index.int() for name, index in indices_of(arguments).items()}


@each("int32_indices", "typical")
def test_int32_indices(device, name, sizes):
    """int32 indices, one or all of them, act like int64; returned indices are int64."""
    row, arguments = ROWS[name], sample(name, device, **sizes)
    expected = sum(evaluate(row, arguments), [])
    one = [{key: index.int()} for key, index in indices_of(arguments).items()]
    if not one:
        pytest.skip("this sample has no indices")
    for narrowed in (*one, narrow(arguments)):
        for a, e in zip(sum(evaluate(row, arguments | narrowed), []), expected, strict=True):
            assert_same_bits(a, e)


@pytest.mark.emulated(False)  # the compiler does not see the device
@each("int32_indices", "typical")
def test_int32_indices_compile(device, name, sizes):
    """Passes the checks of torch.library, compiles to one graph and runs on fake tensors."""
    row, arguments = ROWS[name], sample(name, device, torch.float32, **sizes)
    if not indices_of(arguments):
        pytest.skip("this sample has no indices")
    for each_name in (name, row.backward) if row.backward else (name,):
        op, args = call_of(each_name, narrow(arguments))
        differentiable = each_name == name and row.differentiable

        def leaf(x, differentiable=differentiable):
            return x.requires_grad_() if differentiable and x.is_floating_point() else x

        torch.library.opcheck(op, tuple(changed(leaf, args)))
    expected, narrowed = sum(evaluate(row, arguments), []), narrow(arguments)
    torch._dynamo.reset()
    compiled = torch.compile(row.function, fullgraph=True, backend="aot_eager")
    for a, e in zip(sum(evaluate(row, narrowed, compiled), []), expected, strict=True):
        assert_same_bits(a, e)
    with FakeTensorMode() as mode:
        fake = changed(mode.from_tensor, narrowed)
        for a, e in zip(sum(evaluate(row, fake), []), expected, strict=True):
            assert (a.shape, a.dtype, a.device) == (e.shape, e.dtype, e.device)


def negated(x):
    """Returns the same numbers, stored with the opposite sign; leaves indices as they are."""
    if not x.is_floating_point():
        return x
    view = torch._neg_view(-x)
    assert view.is_neg() and torch.equal(view, x)
    return view


@each("negated", "typical")
@pytest.mark.emulated(False)  # the dispatcher resolves the bit
def test_negated_inputs(device, name, sizes):
    """The results do not depend on the negative bit, of one argument or of all."""
    row, arguments = ROWS[name], sample(name, device, torch.float32, **sizes)
    expected, expected_grads = evaluate(row, arguments)
    for key, value in arguments.items():
        outputs = as_tuple(row.function(**arguments | {key: changed(negated, value)}))
        for a, e in zip(outputs, expected, strict=True):
            assert_same_bits(a.resolve_neg(), e)
    arguments = changed(negated, arguments)
    leaves = tensors_in([arguments.get(key) for key in row.differentiable])
    for leaf in leaves:
        leaf.requires_grad_()
    outputs = as_tuple(row.function(**arguments))
    upstream = [negated(dy) for dy in upstream_of(outputs)]
    floats = [y for y in outputs if y.is_floating_point()]
    found = gradients(floats, leaves, upstream) if leaves else []
    for a, e in zip([*outputs, *found], [*expected, *expected_grads], strict=True):
        assert_same_bits(a.resolve_neg(), e)


# Determinism


@pytest.mark.guarantee("Determinism")
@each("deterministic", "large")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic(threads, name, sizes, dtype):
    """Identical on one thread and on two, and in every run, gradients included."""
    row, arguments = ROWS[name], sample(name, dtype=dtype, **sizes)

    def function():
        outputs, grads = evaluate(row, arguments)
        return outputs + grads

    assert_deterministic(function, threads)


def hashes(isa):
    command = [sys.executable, operators.__file__]
    environment = {**os.environ, "MOE_EXT_ISA": isa}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


def test_bits_do_not_depend_on_the_instruction_set():
    """Vectors of 2, 4 or 8 numbers use the same order of operations, so results are identical.

    GEMMs are the exception. Without fused multiply-adds each of their terms is rounded twice, and
    AMX and BF16 of Arm multiply bfloat16 numbers directly.
    """
    names = [isa for isa in instruction_sets() if isa != "avx512_bf16"]
    if len(names) == 1:
        pytest.skip("only one instruction set on this processor")
    printed = {isa: hashes(isa) for isa in names}
    differing = set()
    for isa in names[1:]:
        for line, bits in printed[isa].items():
            products = ROWS[line.split()[0]].products
            if isa in ("amx", "neon_bf16") and products and "bfloat16" in line:
                continue
            if bits != printed[names[1] if products else names[0]][line]:
                differing.add((isa, line))
    assert not differing
    assert len(printed[names[0]]) == 4 * sum(len(row.precise) for row in TABLE.values())


# Errors


def tensor_arguments(kind):
    """Returns (operator, argument) for the tensors of each row's first typical sample."""
    found = []
    for name, row in TABLE.items():
        arguments = row.make(torch.float32, **row.typical[0])
        tensors = {key: x for key, x in arguments.items() if isinstance(x, torch.Tensor)}
        if kind == "device" and len(tensors) < 2:
            continue
        found += [
            (name, key, x.is_floating_point())
            for key, x in tensors.items()
            if key not in row.free.get(kind, ())
        ]
    return [pytest.param(*each, id="-".join(each[:2])) for each in found]


def refuses(name, exception, argument, changes, got=None):
    """Checks the error for valid arguments with these changes."""
    row, arguments = ROWS[name], sample(name, dtype=torch.float32, **ROWS[name].typical[0])
    row.function(**arguments)
    arguments |= changes(arguments) if callable(changes) else changes
    with raises(exception, name, argument, got(arguments) if callable(got) else got):
        row.function(**arguments)


@pytest.mark.parametrize("name, argument, floating", tensor_arguments("type"))
def test_types_that_do_not_fit(name, argument, floating):
    for dtype in ["int64"] if floating else ["int16", "uint8", "bool", "float32"]:
        to = getattr(torch, dtype)
        refuses(name, TypeError, argument, lambda a, to=to: {argument: a[argument].to(to)}, dtype)


@pytest.mark.parametrize("name, argument, floating", tensor_arguments("dimensions"))
def test_numbers_of_dimensions_that_do_not_fit(name, argument, floating):
    refuses(name, ValueError, argument, lambda a: {argument: a[argument][None]})


@pytest.mark.parametrize("name, argument, floating", tensor_arguments("device"))
def test_devices_that_do_not_fit(name, argument, floating):
    refuses(name, ValueError, "", lambda a: {argument: a[argument].to("meta")})


@pytest.mark.parametrize(
    "name, number", [(name, i) for name, row in TABLE.items() for i in range(len(row.bad))]
)
def test_bad_arguments(name, number):
    refuses(name, *ROWS[name].bad[number])


BACKWARD = [name for name in ROWS if name not in TABLE]


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("name", BACKWARD)
def test_backward_operators_look_at_their_arguments(name, place):
    """Autograd passes valid arguments, but other callers must not crash the process.

    If two arguments do not match, either one may be named in the error.
    """
    op, args = call_of(name, sample(name, dtype=torch.float32, **ROWS[name].typical[0]))
    args = moved(args, place)
    op(*args)
    any_argument = "(" + "|".join(a.name for a in op._schema.arguments) + ")"
    for i, x in enumerate(args):
        # Offsets can be valid for fewer tokens; on meta their values cannot be read.
        offsets = op._schema.arguments[i].name == "token_offsets" and place == "meta"
        if isinstance(x, torch.Tensor) and not offsets:
            with raises(ValueError, name, any_argument):
                op(*args[:i], x[1:] if x.dim() else x.reshape(1), *args[i + 1 :])


@pytest.mark.parametrize(
    "name, number", [(name, i) for name in BACKWARD for i in range(len(ROWS[name].backward_bad))]
)
def test_bad_arguments_of_backward_operators(name, number):
    op, args = call_of(name, sample(name, dtype=torch.float32, **ROWS[name].typical[0]))
    exception, argument, changes, *got = ROWS[name].backward_bad[number]
    # The call has no default arguments at its end.
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False))
    with raises(exception, name, argument, *got):
        op(**named | (changes(named) if callable(changes) else changes))
