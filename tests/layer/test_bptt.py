"""Back-propagation through time with few stored states, on a plain recurrent cell."""

import itertools
import weakref

import pytest
import reference as ref
import torch
from assertions import assert_all_same_bits, assert_second_derivative_refused

from moe_ext.recurrent.bptt import num_evaluations, unroll

B, D, U, S = 3, 2, 4, 7


def step(parameters, inputs, state):
    """Uses every tensor twice, to expose the order in which gradients are summed.

    W, b, x and h occur twice within the step, and the new state occurs among the outputs. It uses
    dropout and noise. c is frozen; the last state is unused.
    """
    W, V, b, c, unused = parameters
    x, mask = inputs
    h, count, idle = state
    x = torch.nn.functional.dropout(x, 0.3)
    h = torch.tanh(x @ V + h @ W + (h * c) @ W.sin() + b) * b.cos() + x.sum(1, keepdim=True)
    h = h + 0.1 * torch.randn_like(h)
    h = torch.where(mask[:, None], h, state[0])
    return (h, count + mask, idle), (h, h * 2, mask.sum(), h.detach().sum(0), h.mean(), h)


def arguments(device="cpu", dtype=torch.float32, length=S):
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    parameters = [normal(U, U), normal(D, U), normal(U), normal(U), normal(U)]
    inputs = [normal(length, B, D), (normal(length, B) > -1)]
    state = [normal(B, U), torch.zeros(B, dtype=torch.int64, device=device), normal(B, 2)]
    for i in (0, 1, 2, 4):
        parameters[i].requires_grad_()
    for tensor in (inputs[0], state[0], state[2]):
        tensor.requires_grad_()
    return parameters, inputs, state


def results(slots, args):
    """Returns outputs, state, gradients of a loss that uses outputs twice, then the RNG state."""
    parameters, inputs, state = args
    leaves = [t for t in (*parameters, *inputs, *state) if t.requires_grad]
    torch.manual_seed(2)
    outputs, state = unroll(step, parameters, inputs, state, memory_slots=slots)
    differentiable = [x.float() for x in (*outputs, *state) if x.is_floating_point()]
    # b is also used outside the steps: its gradients from within them arrive as one sum.
    loss = sum((x * (1 + i)).sin().sum() + x.square().sum() for i, x in enumerate(differentiable))
    loss = loss + (parameters[2] * 3).exp().sum()
    torch.rand(3)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return *outputs, *state, *grads, torch.get_rng_state()


# The number of evaluations


@pytest.mark.equation("Sec. 3.1")
def test_closed_form_is_the_dynamic_programme():
    for t in range(1, 41):
        for m in range(1, t + 3):
            assert num_evaluations(t, m) == ref.C(t, m)
    for sizes in ({"steps": 0, "slots": 1}, {"steps": 1, "slots": 0}):
        with pytest.raises(ValueError, match="^num_evaluations: .* must be at least 1, got 0$"):
            num_evaluations(**sizes)
    for m in (2, 5, 30):  # the recursion for large t
        assert num_evaluations(1000, m) == min(
            y + num_evaluations(1000 - y, m - 1) + num_evaluations(y, m) for y in range(1, 1000)
        )


@pytest.mark.parametrize(
    ("t", "m"),
    [(1, 1), (1, 3), (2, 1), (9, 1), (9, 2), (13, 3), (20, 4), (31, 5), (12, 12), (8, 9)],
)
def test_evaluations_and_live_states(t, m):
    """Counts C(t, m) + 1 evaluations and at most m live states.

    The count excludes the state that the current step is called with, which may be one of the m.
    All m states are used if that saves evaluations.
    """
    called = most = 0
    memory = []

    def tracked(state):
        """Copies the state to memory that reports when it is freed."""
        array = state.detach().numpy().copy()
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    def counted(parameters, inputs, state):
        nonlocal called, most
        called += 1
        alive = {array.ctypes.data for r in memory if (array := r()) is not None}
        most = max(most, len(alive - {state[0].data_ptr()}))
        h = torch.tanh(state[0] + inputs[0] * parameters[0])
        return (h if torch.is_grad_enabled() else tracked(h),), (h.sum(),)

    weight = torch.randn(U, requires_grad=True)
    first = tracked(torch.randn(U))
    (output,), last = unroll(counted, [weight], [torch.randn(t, U)], [first], memory_slots=m)
    del last
    assert called == t
    output.sum().backward()
    assert called == num_evaluations(t, m) + 1
    assert most == min(m, t - 1)


# Bitwise identical results


LENGTHS = {S: range(1, S + 2), 60: (1, 3, 6, 40)}


@pytest.mark.equation("Sec. 3.1")
@pytest.mark.parametrize(
    "length, slots, dtype",
    [(length, slots, torch.float32) for length, many in LENGTHS.items() for slots in many]
    + [(S, 2, torch.float64), (S, 2, torch.bfloat16)],
)
def test_bits_of_plain_backpropagation(device, length, slots, dtype):
    args = arguments(device, dtype, length)
    assert_all_same_bits(results(slots, args), results(None, args))


@pytest.mark.parametrize("needed", [(0,), (1, 5), (2, 7), (5,), (7,)])
def test_bits_where_few_gradients_are_needed(needed):
    args = arguments()
    tensors = list(itertools.chain(*args))
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(i in needed)
    assert_all_same_bits(results(2, args), results(None, args))


@pytest.mark.parametrize("inside", [True, False])
def test_bits_under_autocast(device, inside):
    """Recomputation uses the autocast state of the forward pass, not that of the backward pass."""
    args = arguments(device)
    types = []

    def observed(parameters, inputs, state):
        types.append((inputs[0] @ parameters[1]).dtype)
        return step(parameters, inputs, state)

    def run(slots):
        parameters, inputs, state = args
        torch.manual_seed(2)
        with torch.autocast(device, torch.bfloat16, enabled=inside):
            outputs, _ = unroll(observed, parameters, inputs, state, memory_slots=slots)
        loss = outputs[0].float().square().sum()
        with torch.autocast(device, torch.bfloat16, enabled=not inside):
            return *outputs, *torch.autograd.grad(loss, [parameters[0], inputs[0]])

    assert_all_same_bits(run(3), run(None))
    assert len(types) > 2 * S
    assert set(types) == {torch.bfloat16 if inside else torch.float32}


def test_one_gradient_for_several():
    """The addition passes one gradient tensor to both inputs; it must not be modified in place."""
    weight, first = torch.zeros(U, requires_grad=True), torch.zeros(U, requires_grad=True)
    _, (last,) = unroll(
        lambda parameters, inputs, state: ((state[0] + parameters[0],), ()),
        [weight],
        [torch.zeros(S)],
        [first],
        memory_slots=2,
    )
    last.sum().backward()
    assert weight.grad.tolist() == [S] * U and first.grad.tolist() == [1] * U


def test_going_back_twice():
    parameters, inputs, state = arguments()
    leaves = [parameters[0], inputs[0]]

    def function(*_):
        torch.manual_seed(2)
        return unroll(step, parameters, inputs, state, memory_slots=3)[0][0]

    loss = function().square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert_all_same_bits(second, first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves[:1])
    assert_second_derivative_refused(function, leaves)


# Random numbers


def test_an_error_on_the_way_back_leaves_the_generator_as_it_was():
    fail = False

    def failing(parameters, inputs, state):
        if fail:
            torch.rand(100)
            raise KeyError("the step failed")
        return step(parameters, inputs, state)

    outputs, _ = unroll(failing, *arguments(), memory_slots=2)
    fail = True
    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="the step failed"):
        outputs[0].sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


# Memory and errors


def test_changed_tensors_are_refused():
    parameters, inputs, state = arguments()
    outputs, _ = unroll(step, parameters, inputs, state, memory_slots=2)
    with torch.no_grad():
        parameters[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs[0].sum().backward()

    def counting(parameters, inputs, state):
        parameters[1].add_(1)
        return (state[0] + parameters[0],), (state[0],)

    weight, count = torch.zeros(U, requires_grad=True), torch.zeros(())
    unroll(counting, [weight, count], inputs[:1], state[:1])
    assert count == S
    with pytest.raises(RuntimeError, match="step must not modify a parameter or buffer in place"):
        unroll(counting, [weight, count], inputs[:1], state[:1], memory_slots=2)


def test_errors():
    parameters, inputs, state = arguments()
    with pytest.raises(ValueError, match="memory_slots must be at least 1, got 0"):
        unroll(step, parameters, inputs, state, memory_slots=0)
    for bad in ([inputs[0], inputs[1][1:]], [inputs[0][:0], inputs[1][:0]], []):
        with pytest.raises(
            ValueError, match=r"inputs must all have the same number of time steps.*, got"
        ):
            unroll(step, parameters, bad, state)


def test_outputs_keep_their_shape():
    def growing(parameters, inputs, state):
        return (state[0] + parameters[0],), (torch.zeros(int(inputs[0])),)

    arguments = [[torch.ones((), requires_grad=True)], [torch.arange(1, 4)], [torch.zeros(())]]
    with pytest.raises(RuntimeError, match="equal size"):
        unroll(growing, *arguments)
    with pytest.raises(
        ValueError, match=r"outputs must have the shape \(1,\) of the first step, got \(2,\)"
    ):
        unroll(growing, *arguments, memory_slots=2)
