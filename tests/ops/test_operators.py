"""The properties of operators, each written once and tested for every row of tests/operators.py.

`samples` are many and small, `typical` samples are few, and `large` samples are divided among
threads. Tests over ROWS include the backward operators. The other files of this folder test what is
specific to one operator.

    python -m pytest tests/ops/test_operators.py -s -k table    # prints the number of all cases
"""

import math
from itertools import combinations

import pytest
import torch
from assertions import (
    assert_as_accurate,
    assert_deterministic,
    assert_exact,
    assert_own_memory,
    assert_same_bits,
    assert_same_products,
    assert_second_derivative_refused,
    gradients,
    poison_freed_memory,
    raises,
)
from operators import (
    FORMS,
    HALF,
    ROWS,
    TABLE,
    TORCH_NAMES,
    as_tuple,
    call_of,
    changed,
    evaluate,
    moved,
    named_call_of,
    run,
    sample,
    tensors_in,
    upstream_of,
    with_leaves,
    written,
)

pytestmark = pytest.mark.emulated

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
CASES = {}  # property -> operator -> number of cases


def short(value):
    """Shortens a size for the name of a test; a long list becomes its length."""
    return value if len(str(value)) < 60 else f"{len(value)} numbers"


def operators_with(prop, rows=TABLE, count=None, in_turn=False, **dtypes):
    """Parametrizes a test by the operators with a property, and their samples.

    dtypes: the lists of samples, such as `typical`, with their dtypes. A function of the row can
    return these. in_turn: each sample has one of the dtypes, not all. The emulation of CUDA is
    slow: a sample has every other dtype there, and the next sample has the rest.
    """

    def cases_of(name, row):
        for kind, choice in dtypes.items():
            types = choice(row) if callable(choice) else choice
            samples = getattr(row, kind)[:count]
            for number, sizes in enumerate(samples):
                emulated = types[number % 2 :: 2] if len(types) > 1 < len(samples) else types
                for dtype in [types[number % len(types)]] if in_turn else types:
                    values = [f"{key}={short(value)}" for key, value in sizes.items()]
                    text = "-".join([name, *values, str(dtype).removeprefix("torch.")])
                    marks = [pytest.mark.equation(*row.equations)]
                    marks += [pytest.mark.emulated(False)] * (dtype not in emulated)
                    yield pytest.param(name, sizes, dtype, id=text, marks=marks)

    having = {name: row for name, row in rows.items() if prop not in row.lacks}
    cases = {name: [*cases_of(name, row)] for name, row in having.items()}
    CASES[prop] = {name: len(params) for name, params in cases.items()}
    assert all(cases.values()), f"each operator must have samples for {prop}, got {CASES[prop]}"
    return pytest.mark.parametrize("name, sizes, dtype", sum(cases.values(), []))


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
    # _count_tokens_ depends on whether a backward pass runs; see layer/test_adaptive.py. _logits
    # calls experts; see layer/test_logits.py.
    private = {"_empty_rows", "_count_tokens_", "_logits"}
    assert registered == set(TORCH_NAMES.values()) | private
    for row in TABLE.values():
        assert set(row.lacks) <= {*CASES, "cuda", "accuracy", "half_types", "rounded_once"}
        assert all(row.lacks.values())
    print(f"\n{'':32}" + "".join(f"{prop:>15}" for prop in CASES))
    for name in ROWS:
        print(f"{name:32}" + "".join(f"{counts.get(name, '-'):>15}" for counts in CASES.values()))


# Values and gradients


def precisions(row):
    """Returns the dtypes of `precise` samples: those with another implementation to compare."""
    accurate = "accuracy" not in row.lacks
    return [F64, F32] * accurate + HALF * (accurate or "half_types" not in row.lacks)


@pytest.mark.guarantee("The paper's equations")
@operators_with("values", samples=[F64], precise=precisions)
def test_values(device, name, sizes, dtype):
    """Outputs, and gradients of all outputs together and of each alone.

    float64: `samples` equal the reference, `precise` samples equal plain torch. Half types: bitwise
    identical to the result in float32, rounded once. Other types, and half types where the row
    lacks this: at most twice the error of plain torch. Plain torch computes half types in float32
    as well, and the result may be rounded once; it computes GEMMs in the type itself.
    """
    row, arguments = ROWS[name], sample(name, dtype=dtype, **sizes)
    actual = evaluate(row, moved(arguments, device), alone=True)
    assert all(y.device.type == device and y.is_contiguous() for y in actual[0])
    upstream = upstream_of(actual[0])

    def compute(function, to, place="cpu"):
        given = moved(arguments, place, to), function, moved(upstream, place, to)
        return sum(evaluate(row, *given, alone=True), [])

    actual = sum(actual, [])
    if dtype in HALF and "half_types" not in row.lacks:
        for a, e in zip(actual, compute(row.function, F32, device), strict=True):
            assert_same_bits(a, e.to(a.dtype))
        return
    exact = compute(row.reference if sizes in row.samples else row.plain, F64)
    if dtype == F64:
        assert_equal(actual, exact)
        return
    plain = compute(row.plain, None if row.products else F32)
    once = not (row.products or "rounded_once" in row.lacks)
    for a, p, e in zip(actual, plain, exact, strict=True):
        if a.is_floating_point():
            assert_as_accurate(a.cpu(), p if once else p.to(a.dtype), e, row.units)
        else:
            assert_same_bits(a, e)


@operators_with("limits", limits=[F64])
def test_limits(device, name, sizes, dtype):
    """No counter in a kernel is too narrow, in forward and in backward."""
    row, arguments = ROWS[name], sample(name, device, **sizes)
    actual, expected = evaluate(row, arguments), evaluate(row, arguments, row.plain)
    assert_equal(sum(actual, []), sum(expected, []))


@operators_with("derivatives", typical=[F64])
def test_derivatives(device, name, sizes, dtype):
    """Numerical ones agree. A second derivative does too, or it raises an error."""
    row = ROWS[name]
    arguments, leaves = with_leaves(sample(name, device, **sizes), row.differentiable)

    def function(*inputs):
        inputs = iter(inputs)
        moving = {
            key: changed(lambda x: next(inputs) if x.is_floating_point() else x, arguments[key])
            for key in row.differentiable
            if key in arguments
        }
        outputs = as_tuple(row.function(**arguments | moving))
        return tuple(y.nan_to_num(neginf=0) for y in outputs if y.requires_grad)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    if row.twice_differentiable:
        assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    else:
        assert_second_derivative_refused(
            lambda *inputs: sum(y.square().sum() for y in function(*inputs)), leaves
        )


@operators_with("nan", typical=[F32, BF16])
def test_nan_stays_where_it_is(device, name, sizes, dtype):
    """NaN in one number reaches at most what it reaches in plain torch; other bits stay."""
    row, arguments = ROWS[name], sample(name, device, dtype, **sizes)
    clean = sum(evaluate(row, arguments), [])
    for x in tensors_in(arguments):
        for place in {x.numel() // 2, x.numel() - 1} if x.is_floating_point() and x.numel() else ():
            number = x.view(-1)[place].item()
            x.view(-1)[place] = math.nan
            results, plain = (
                sum(evaluate(row, arguments, function), []) for function in (None, row.plain)
            )
            x.view(-1)[place] = number
            for y, p, e in zip(results, plain, clean, strict=True):
                assert not (y.isnan() & ~p.isnan()).any()
                assert_bits(name, [y[~y.isnan()]], [e[~y.isnan()]])


@operators_with("needed", typical=[F32, BF16])
def test_only_what_needs_a_gradient_gets_one(device, name, sizes, dtype):
    """Gradients of one tensor or of some arguments are bitwise identical to the full gradients.

    Arguments that are not differentiable get none.
    """
    row, arguments = ROWS[name], sample(name, device, dtype, **sizes)
    _, expected = evaluate(row, arguments)
    numbers = iter(range(len(expected)))
    owned = [
        [next(numbers) for x in tensors_in(arguments[key]) if x.is_floating_point()]
        for key in row.differentiable
        if key in arguments
    ]
    some = [sum(indices, []) for n in range(1, len(owned)) for indices in combinations(owned, n)]
    for needed in [*([one] for one in range(len(expected))), *some]:
        frozen, leaves = with_leaves(arguments, row.differentiable, needed)
        floats = [y for y in as_tuple(row.function(**frozen)) if y.is_floating_point()]
        grads = gradients(floats, [leaves[i] for i in needed], upstream_of(floats))
        assert_bits(name, grads, [expected[i] for i in needed])
    constants = {
        key: x.detach().clone().requires_grad_()
        for key, x in arguments.items()
        if key not in row.differentiable and torch.is_tensor(x) and x.is_floating_point()
    }
    learned, leaves = with_leaves(arguments | constants, row.differentiable)
    sum(y.sum() for y in as_tuple(row.function(**learned)) if y.requires_grad).backward()
    assert all(x.grad is None for x in constants.values())


@operators_with("autocast", typical=[F32, BF16])
def test_autocast(device, name, sizes, dtype):
    """Gates run in float32, experts in the lower precision; other operators are unchanged."""
    row, arguments = ROWS[name], sample(name, device, dtype, **sizes)
    with_grad, leaves = with_leaves(arguments, row.differentiable)
    with torch.autocast(device, BF16):
        outputs = as_tuple(row.function(**with_grad))
    cast = moved(arguments, dtype=row.autocast)
    for sums_only in {"gates", "linear_bias"} & {*cast}:  # no GEMM reads them
        cast[sums_only] = arguments[sums_only]
    expected, expected_grads = evaluate(row, cast)
    assert_bits(name, [y.detach() for y in outputs], expected)
    floats = [y for y in outputs if y.is_floating_point()]
    grads = gradients(floats, leaves, upstream_of(outputs)) if leaves else []
    assert_bits(name, grads, [e.to(a.dtype) for a, e in zip(grads, expected_grads, strict=True)])


@pytest.mark.guarantee("Determinism")
@operators_with("deterministic", large=[F32, BF16])
def test_deterministic(threads, name, sizes, dtype):
    """Identical on one thread and on two, and in every run, gradients included."""
    row, arguments = ROWS[name], sample(name, dtype=dtype, **sizes)
    assert_deterministic(lambda: sum(evaluate(row, arguments), []), threads)


# What callers, the dispatcher and the compiler rely on, for the backward operators too


@operators_with("contract", ROWS, typical=[F64, F32, BF16])
def test_contract(device, name, sizes, dtype):
    """Results depend on the values of the arguments alone, and have memory of their own."""
    op, args = call_of(name, sample(name, device, dtype, **sizes))
    copies = moved(args)
    results = run(op, args)

    for x, copy in zip(tensors_in(args), tensors_in(copies), strict=True):
        assert_same_bits(x, copy)  # arguments do not change
    assert all(x.is_contiguous() for x in results)
    assert_own_memory(results, args)

    for a, e in zip(run(op, moved(args, "meta")), results, strict=True):
        assert a.device.type == "meta"
        assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())

    for name_of_form, form in FORMS.items():
        changed_results = run(op, changed(form, args))
        assert_bits(name, changed_results, results)
        # Only weights pass their layout on, and only if they are transposed.
        assert name_of_form == "transposed" or all(x.is_contiguous() for x in changed_results)
    for i, x in enumerate(args):  # one index as int32 among others as int64
        if isinstance(x, torch.Tensor) and not x.is_floating_point():
            assert_bits(name, run(op, [*args[:i], x.int(), *args[i + 1 :]]), results)

    def expanded(x):  # as autograd expands the gradient of a sum
        return x[:1].expand_as(x) if x.is_floating_point() and x.dim() else x

    some = [x if w else changed(expanded, x) for x, w in zip(args, written(op), strict=False)]
    assert_bits(name, run(op, some), run(op, changed(torch.Tensor.contiguous, some)))

    # In memory that held NaN: an element that no row reaches is exactly zero.
    for _ in range(3):
        poison_freed_memory(*{x.numel() for x in tensors_in(args) + results}, device=device)
        actual = run(op, args)
        assert_bits(name, actual, results)
        assert not any(x.isnan().any() for x in actual)


def narrow(arguments):
    """Converts the indices to int32."""
    return {key: FORMS["int32"](x) if torch.is_tensor(x) else x for key, x in arguments.items()}


@pytest.mark.emulated(False)  # what is registered does not depend on the device
@operators_with("opcheck", ROWS, in_turn=True, typical=[F32, BF16])
def test_opcheck(device, name, sizes, dtype):
    """float32 with contiguous tensors and int64 indices; bfloat16 with neither.

    AOT autograd takes most of the time; it traces two samples, one of each dtype.
    """
    plain = dtype == F32
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"] * (sizes in ROWS[name].typical[:2])
    arguments = sample(name, device, dtype, **sizes)
    op, args = call_of(name, arguments if plain else narrow(arguments))
    differentiable = name in TABLE and ROWS[name].differentiable

    def leaf(x):
        x = x.contiguous() if plain else FORMS["transposed"](x)
        return x.requires_grad_() if differentiable and x.is_floating_point() else x

    torch.library.opcheck(op, tuple(changed(leaf, args)), test_utils=tests)


@pytest.mark.emulated(False)  # the compiler does not see the device
@operators_with("compile", typical=[F32], count=1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_a_whole_graph(device, name, sizes, dtype, dynamic):
    """With int64 indices and static shapes, and with int32 indices and dynamic shapes."""
    torch._dynamo.reset()
    row, arguments = ROWS[name], sample(name, device, dtype, **sizes)
    compiled = torch.compile(row.function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    actual = evaluate(row, narrow(arguments) if dynamic else arguments, compiled)
    assert_bits(name, sum(actual, []), sum(evaluate(row, arguments), []))


# Errors


def refuses(name, exception, argument, changes, got=None):
    """Checks the error for valid arguments with these changes."""
    function, arguments = named_call_of(name, sample(name, dtype=F32, **ROWS[name].typical[0]))
    function(**arguments)
    arguments |= changes(arguments) if callable(changes) else changes
    reported = name if name in TABLE else TORCH_NAMES[name]
    with raises(exception, reported, argument, got(arguments) if callable(got) else got):
        function(**arguments)


@pytest.mark.parametrize("name", TABLE)
def test_tensors_that_do_not_fit(name):
    """Each tensor must have the right dtype, number of dimensions and device."""
    row, arguments = ROWS[name], sample(name, dtype=F32, **ROWS[name].typical[0])
    tensors = {key: x for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    for key, x in tensors.items():
        if key not in row.free.get("type", ()):
            wrong = ["int64"] if x.is_floating_point() else ["int16", "uint8", "bool", "float32"]
            for dtype in wrong:
                refuses(name, TypeError, key, {key: x.to(getattr(torch, dtype))}, dtype)
        if key not in row.free.get("dimensions", ()):
            refuses(name, ValueError, key, {key: x[None]})
        if len(tensors) > 1:
            refuses(name, ValueError, "", {key: x.to("meta")})


BAD = {name: row.bad if name in TABLE else row.backward_bad for name, row in ROWS.items()}
CASES["errors"] = {name: len(bad) for name, bad in BAD.items()}


@pytest.mark.parametrize(
    "name, number", [(name, i) for name in ROWS for i in range(len(BAD[name]))]
)
def test_bad_arguments(name, number):
    refuses(name, *BAD[name][number])


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in TABLE])
def test_backward_operators_look_at_their_arguments(name, place):
    """Autograd passes valid arguments, but other callers must not crash the process.

    If two arguments do not match, either one may be named in the error.
    """
    op, args = call_of(name, sample(name, dtype=F32, **ROWS[name].typical[0]))
    args = moved(args, place)
    op(*args)
    any_argument = "(" + "|".join(a.name for a in op._schema.arguments) + ")"
    for i, x in enumerate(args):
        # Offsets can be valid for fewer tokens; on meta their values cannot be read.
        offsets = op._schema.arguments[i].name == "token_offsets" and place == "meta"
        if isinstance(x, torch.Tensor) and not offsets:
            with raises(ValueError, TORCH_NAMES[name], any_argument):
                op(*args[:i], x[1:] if x.dim() else x.reshape(1), *args[i + 1 :])
