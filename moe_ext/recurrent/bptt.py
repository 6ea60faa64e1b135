"""Back-propagation through time in bounded memory (Gruslys et al. 2016), which Sec. 3.1 proposes.

Plain back-propagation keeps what every step computed. Here m hidden states are kept ("BPTT-HSM"),
and the steps between them are evaluated again in the backward pass. The fewest evaluations with
which t steps can be gone through backwards are

    C(1, m) = 1        C(t, m) = min over 0 < y < t of  y + C(t - y, m - 1) + C(y, m)

run y steps, store the state, solve the steps to its right with one slot less, free it, solve the
steps to its left. The first state is one of the m.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import comb
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_ext.checks import require, require_sizes

__all__ = ["Step", "num_evaluations", "unroll"]

_Tensors = tuple[Tensor, ...]
Step = Callable[[_Tensors, _Tensors, _Tensors], tuple[_Tensors, _Tensors]]


def unroll(
    step: Step,
    parameters: Sequence[Tensor],
    inputs: Sequence[Tensor],
    state: Sequence[Tensor],
    *,
    memory_slots: int | None = None,
    generators: Sequence[torch.Generator] = (),
) -> tuple[_Tensors, _Tensors]:
    """state, output[t] = step(parameters, inputs[t], state) for t = 0, 1, ...

    With memory_slots, m states are kept for the backward pass, and that of the step in progress,
    instead of all that the steps compute. The outputs and all gradients have the same bits as
    without; the step is evaluated t times in the forward pass and C(t, m) + 1 times in all, as the
    last step's output is needed before its gradient is there; random generators are left as if
    nothing had been evaluated again; autocast is as it was. Second derivatives are refused.
    torch.compile takes the plain loop, as a graph as long as the sequence, and leaves the one with
    memory_slots to eager mode (a graph break).

    Args:
        step: a function of nothing but its arguments and random numbers, which returns the new
            state and outputs. Each call may use an argument any number of times.
        parameters: all tensors that the step uses in every call, frozen ones too; it must not
            change them.
        inputs: each with a leading dimension of time.
        state: before the first step.
        memory_slots: m, the number of states kept, the first one included; None keeps everything.
        generators: those that the step draws from, besides torch's default ones.

    Returns:
        The outputs of all steps, each stacked along a new leading dimension, and the last state.

    Raises:
        ValueError: memory_slots is below 1, there is no step, or the inputs differ in length.
        RuntimeError: the step changed a parameter in place (with memory_slots).
    """
    lengths = {len(x) for x in inputs}
    require(
        len(lengths) == 1 and min(lengths) >= 1,
        "unroll: inputs",
        "have one number of time steps, at least 1",
        [tuple(x.shape) for x in inputs],
    )
    tensors = (*parameters, *inputs, *state)
    if memory_slots is not None:
        require_sizes("unroll", memory_slots=memory_slots)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            sizes = (len(parameters), len(inputs), len(state))
            run = _unroll_stored
            if torch.compiler.is_compiling():
                run = torch.compiler.disable(run)  # a decorator would import the compiler always
            return run(_Plan(step, memory_slots, tuple(generators), sizes), tensors)
    return _run(step, _views(parameters), tuple(inputs), tuple(state))


def num_evaluations(steps: int, slots: int) -> int:
    """C(t, m) in closed form (Griewank and Walther 2000, there without the t graph evaluations).

    Args:
        steps: t >= 1.
        slots: m >= 1.
    """
    r = _repetitions(steps, slots)
    return steps + r * steps - comb(slots + r, slots + 1)


def _repetitions(steps: int, slots: int) -> int:
    """How often the step is repeated that is repeated most: binom(m + r, m) >= t, the least r."""
    r = 0
    while comb(slots + r, slots) < steps:
        r += 1
    return r


def _stored_positions(start: int, stop: int, slots: int) -> list[int]:
    """Where to store on the way from start to the last step before stop; start holds one slot.

    The largest of the y at which the minimum is attained, again and again to the right.
    """
    positions = []
    while slots > 1 and stop - start > 1:
        steps = stop - start
        r = _repetitions(steps, slots)
        start += min(comb(slots + r - 1, slots), steps - comb(slots + r - 2, slots - 1))
        slots -= 1
        positions.append(start)
    return positions


def _views(tensors: Sequence[Tensor]) -> _Tensors:
    """A view collects the gradients of its uses, and hands on one sum."""
    return tuple(x.view_as(x) if x.requires_grad else x for x in tensors)


def _call(step: Step, parameters: _Tensors, inputs: _Tensors, state: _Tensors) -> Any:
    """One step, on views of what it has in common with other steps.

    So gradients add up within the steps first, then from step to step, whether a graph spans one
    step or all. Besides, autocast keeps no copies of views, whose gradients over all steps would be
    summed in half precision.
    """
    return step(_views(parameters), inputs, _views(state))


def _run(
    step: Step,
    parameters: _Tensors,
    inputs: _Tensors,
    state: _Tensors,
    visit: Callable[[int, _Tensors], None] = lambda t, state: None,
) -> tuple[_Tensors, _Tensors]:
    """All steps; `visit` sees each one's number and the state before it."""
    outputs: list[_Tensors] = []
    stacks: _Tensors = ()
    for t, inputs_t in enumerate(zip(*(x.unbind() for x in inputs), strict=True)):
        visit(t, state)
        state, output = _call(step, parameters, inputs_t, state)
        if torch.is_grad_enabled():
            outputs.append(output)
            continue
        # Straight to its place: they never exist twice.
        stacks = stacks or tuple(x.new_empty(len(inputs[0]), *x.shape) for x in output)
        for x, stack in zip(output, stacks, strict=True):
            shape = tuple(stack.shape[1:])
            require(x.shape == shape, "unroll: outputs", f"have shape {shape}", tuple(x.shape))
            stack[t] = x
    state = _views(state)  # as the next step would use it
    return stacks or tuple(torch.stack(output) for output in zip(*outputs, strict=True)), state


class _Plan(NamedTuple):
    """What of the arguments of `unroll` is no tensor, and how many tensors the others have."""

    step: Step
    slots: int
    generators: tuple[torch.Generator, ...]
    sizes: tuple[int, int, int]

    def split(self, tensors: Sequence[Any]) -> tuple[tuple, tuple, tuple]:
        """Parameters, inputs, state."""
        p, x, _ = self.sizes
        return tuple(tensors[:p]), tuple(tensors[p : p + x]), tuple(tensors[p + x :])


class _Stored(NamedTuple):
    """A state, and what is needed to go on from it as before."""

    position: int
    state: _Tensors
    random_state: list[Tensor]


def _unroll_stored(plan: _Plan, tensors: _Tensors) -> tuple[_Tensors, _Tensors]:
    results = _StoredStates.apply(plan, *tensors)
    num_states = plan.sizes[2]
    return results[num_states:], results[:num_states]


class _StoredStates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> Any:
        parameters, inputs, state = plan.split(tensors)
        generators = _all_generators(plan, tensors)
        num_steps = len(inputs[0])
        # The last step's state, from which the backward pass begins, takes no slot: there, too, a
        # step is evaluated from a state that is not stored.
        positions = {0, *_stored_positions(0, num_steps, plan.slots), num_steps - 1}
        stored = []

        def visit(t: int, state: _Tensors) -> None:
            if t in positions:
                stored.append(_Stored(t, state, [g.get_state() for g in generators]))

        versions = [parameter._version for parameter in parameters]
        outputs, state = _run(plan.step, parameters, inputs, state, visit)
        if versions != [parameter._version for parameter in parameters]:
            raise RuntimeError(
                "unroll: step must not change a parameter or buffer in place with memory_slots"
            )
        ctx.plan = plan
        ctx.generators = generators
        ctx.autocast = _autocast_options(tensors)
        ctx.save_for_backward(*tensors)
        # The first state is an input, saved above. The others are freed one after the other in the
        # backward pass, which saved tensors would not be.
        ctx.random_state = stored[0].random_state
        ctx.stored = stored[1:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return *state, *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # once_differentiable would not tell where it does not lie on the way to what is asked for.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "unroll: second derivatives are not implemented with memory_slots; leave it out, "
                "or create_graph"
            )
        plan: _Plan = ctx.plan
        tensors = ctx.saved_tensors  # once: a hook may allow no second time
        parameters, inputs, state = plan.split(tensors)
        needed = plan.split(ctx.needs_input_grad[1:])
        parameters = _leaves(parameters, needed[0])
        # Going back a second time (retain_graph) starts from the first state alone.
        stored = [_Stored(0, state, ctx.random_state), *ctx.stored]
        ctx.stored = []
        # Set around the evaluations alone: gradients are computed as they are elsewhere.
        autocast = [
            then
            for then, now in zip(ctx.autocast, _autocast_options(tensors), strict=True)
            if then != now
        ]

        grad_state, grad_outputs = grads[: len(state)], grads[len(state) :]
        grad_parameters: list[Tensor | None] = [None] * len(parameters)
        grad_inputs: list[Tensor | None] = [None] * len(inputs)
        with _undisturbed(ctx.generators):
            for t in reversed(range(len(inputs[0]))):
                start, state, random_state = stored[-1]
                for generator, value in zip(ctx.generators, random_state, strict=True):
                    generator.set_state(value)
                positions = _stored_positions(start, t + 1, plan.slots - len(stored) + 1)
                with _autocast(autocast):
                    for i in range(start, t):
                        if i in positions:
                            values = [generator.get_state() for generator in ctx.generators]
                            stored.append(_Stored(i, state, values))
                        state, _ = _call(plan.step, parameters, tuple(x[i] for x in inputs), state)
                if start == t:
                    stored.pop()
                grad_inputs_t, grad_state = _step_backward(
                    plan,
                    autocast,
                    parameters,
                    _leaves(tuple(x[t] for x in inputs), needed[1]),
                    _leaves(state, needed[2] if t == 0 else [True] * len(state)),
                    (*grad_state, *(None if g is None else g[t] for g in grad_outputs)),
                    grad_parameters,
                )
                for j, grad in enumerate(grad_inputs_t):
                    if grad is not None:
                        whole = grad_inputs[j]
                        if whole is None:
                            whole = grad_inputs[j] = torch.zeros_like(inputs[j])
                        whole[t] = grad
        return None, *grad_parameters, *grad_inputs, *grad_state


def _leaves(tensors: _Tensors, needed: Sequence[bool]) -> _Tensors:
    """Starts of a graph of their own."""
    return tuple(
        x.detach().requires_grad_(n and x.is_floating_point())
        for x, n in zip(tensors, needed, strict=True)
    )


def _step_backward(
    plan: _Plan,
    autocast: Sequence[dict[str, Any]],
    parameters: _Tensors,
    inputs: _Tensors,
    state: _Tensors,
    grads: Sequence[Tensor | None],
    grad_parameters: list[Tensor | None],
) -> tuple[tuple, tuple]:
    """One step's gradients to its inputs and state, None where nothing flows; those to the
    parameters are added to what is there.

    grads are those of the new state and the outputs. A tensor may be among these several times: its
    gradients are added in the order in which autograd would come across them if the graph went on,
    the last use first.
    """
    with torch.enable_grad(), _autocast(autocast):
        new_state, outputs = _call(plan.step, parameters, inputs, state)
    pairs = [
        (output, grad)
        for output, grad in zip(reversed((*new_state, *outputs)), reversed(grads), strict=True)
        if grad is not None and output.requires_grad
    ]
    leaves = (*parameters, *inputs, *state)
    found: list[Tensor | None] = [None] * len(leaves)
    if pairs:
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        flowing = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaves[i] for i in wanted],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        for i, grad in zip(wanted, flowing, strict=True):
            found[i] = grad
    found_parameters, found_inputs, found_state = plan.split(found)
    for i, grad in enumerate(found_parameters):
        if grad is not None:
            # A copy at first, as what is found may be part of something else.
            total = grad_parameters[i]
            grad_parameters[i] = grad.clone() if total is None else total.add_(grad)
    return found_inputs, found_state


def _all_generators(plan: _Plan, tensors: _Tensors) -> list[torch.Generator]:
    """The default ones of the devices in use, and the step's own."""
    devices = sorted({x.get_device() for x in tensors if x.is_cuda})
    return [
        torch.default_generator,
        *(torch.cuda.default_generators[i] for i in devices),
        *plan.generators,
    ]


def _autocast_options(tensors: _Tensors) -> list[dict[str, Any]]:
    """Arguments with which torch.autocast sets what is set now."""
    devices = {"cpu", *(x.device.type for x in tensors)}
    return [
        {
            "device_type": device,
            "dtype": torch.get_autocast_dtype(device),
            "enabled": torch.is_autocast_enabled(device),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for device in sorted(devices)
        if torch.amp.is_autocast_available(device)
    ]


@contextlib.contextmanager
def _autocast(options: Sequence[dict[str, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for arguments in options:
            stack.enter_context(torch.autocast(**arguments))
        yield


@contextlib.contextmanager
def _undisturbed(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """In the end the generators are as they are now."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
