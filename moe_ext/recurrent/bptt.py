"""Back-propagation through time in bounded memory (Gruslys et al. 2016), proposed in Sec. 3.1.

Plain back-propagation saves the activations of every step. This module saves m hidden states
("BPTT-HSM") and recomputes the steps between them in the backward pass. The minimum number of
step evaluations for t steps is::

    C(1, m) = 1        C(t, m) = min over 0 < y < t of  y + C(t - y, m - 1) + C(y, m)

The recursion runs y steps, stores the state in one of m slots, and processes the later steps with
m - 1 slots. Then it frees the slot and processes the first y steps. The initial state uses a slot.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import comb
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from moe_ext._compiled import eager
from moe_ext.checks import require, require_sizes

__all__ = ["Step", "num_evaluations", "unroll"]

_T = TypeVar("_T")
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
    """Runs state, output[t] = step(parameters, inputs[t], state) for t = 0, 1, …

    With memory_slots, m states and the state of the current step are saved for backward instead of
    all activations. Outputs and gradients are bitwise identical to those without memory_slots. For
    t time steps, step is called t times in the forward pass and C(t, m) + 1 times in total
    (`num_evaluations`). The extra call evaluates the last step: its output is needed before its
    gradient exists.

    Recomputation restores the RNG state and the autocast state of the forward pass. Afterwards, the
    random generators have the same state as without recomputation. Second derivatives raise
    RuntimeError with memory_slots.

    Without memory_slots, torch.compile compiles the loop into one graph that grows with the number
    of steps. With memory_slots, the loop runs in eager mode after a graph break.

    Args:
        step: a function that returns the new state and the outputs. It must depend only on its
            arguments and on random numbers.
        parameters: all tensors that every step uses, including frozen ones. The step must not
            modify them.
        inputs: tensors with a leading time dimension.
        state: the state before the first step.
        memory_slots: m, the number of saved states including the first. None: save all activations.
        generators: the random generators that step uses, apart from torch's default generators.

    Returns:
        The outputs of all steps, each stacked along a new leading dimension, and the last state.

    Raises:
        ValueError: memory_slots is below 1, there are no time steps, or the inputs differ in
            length.
        RuntimeError: step modified a parameter in place (only with memory_slots).
    """
    for name, tensors in (("parameters", parameters), ("inputs", inputs), ("state", state)):
        wrong = [type(x).__name__ for x in tensors if not isinstance(x, Tensor)]
        if wrong:
            raise TypeError(f"unroll: {name} must be tensors, got {wrong[0]}")
    lengths = {len(x) for x in inputs}
    require(
        len(lengths) == 1 and min(lengths) >= 1,
        "unroll: inputs",
        "all have the same number of time steps, at least 1",
        [tuple(x.shape) for x in inputs],
    )
    every = (*parameters, *inputs, *state)
    if memory_slots is not None:
        (memory_slots,) = require_sizes("unroll", memory_slots=memory_slots)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in every):
            sizes = (len(parameters), len(inputs), len(state))
            return _unroll_stored(_Plan(step, memory_slots, tuple(generators), sizes), every)
    return _run(step, _views(parameters), tuple(inputs), tuple(state))


def num_evaluations(steps: int, slots: int) -> int:
    """Computes C(t, m), the minimum number of evaluations for backward over t steps with m slots.

    The closed form is from Griewank and Walther (2000), who do not count the t evaluations that
    build the graph.

    Args:
        steps: t >= 1, the number of time steps.
        slots: m >= 1, the number of saved states.

    Raises:
        ValueError: steps or slots is below 1.
    """
    steps, slots = require_sizes("num_evaluations", steps=steps, slots=slots)
    r = _repetitions(steps, slots)
    return steps + r * steps - comb(slots + r, slots + 1)


def _repetitions(steps: int, slots: int) -> int:
    """Returns how often a step is recomputed at most: the least r with C(m + r, m) >= t.

    Here C is the binomial coefficient, t is steps and m is slots.
    """
    r = 0
    while comb(slots + r, slots) < steps:
        r += 1
    return r


def _stored_positions(start: int, stop: int, slots: int) -> list[int]:
    """Returns the positions from start to stop at which to save states; start uses one of slots.

    A position is start plus the largest y that attains the minimum of C(t, m), and the next start.
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
    """Returns views of tensors; a view sums the gradients of its uses and passes on the sum."""
    return tuple(x.view_as(x) if x.requires_grad else x for x in tensors)


def _call(step: Step, parameters: _Tensors, inputs: _Tensors, state: _Tensors) -> Any:
    """Runs one step on its inputs and on views of the parameters and the state.

    Gradients are then summed within each step first, then over the steps. This order is the same
    for one graph per step and for one graph over all steps. Also, autocast does not cache casts of
    views. A cached cast would sum the gradients of all steps in half precision.
    """
    return step(_views(parameters), inputs, _views(state))


def _run(
    step: Step,
    parameters: _Tensors,
    inputs: _Tensors,
    state: _Tensors,
    visit: Callable[[int, _Tensors], None] = lambda t, state: None,
) -> tuple[_Tensors, _Tensors]:
    """Runs step with parameters over inputs; `visit` gets each step's number and input state."""
    outputs: list[_Tensors] = []
    stacks: _Tensors = ()
    for t, inputs_t in enumerate(zip(*(x.unbind() for x in inputs), strict=True)):
        visit(t, state)
        state, output = _call(step, parameters, inputs_t, state)
        if torch.is_grad_enabled():
            outputs.append(output)
            continue
        # Write each output directly into its stack. Stacking at the end would double the memory.
        stacks = stacks or tuple(x.new_empty(len(inputs[0]), *x.shape) for x in output)
        for x, stack in zip(output, stacks, strict=True):
            shape = tuple(stack.shape[1:])
            rule = f"have the shape {shape} of the first step"
            require(x.shape == shape, "unroll: outputs", rule, tuple(x.shape))
            stack[t] = x
    state = _views(state)  # as _call would do in the next step
    return stacks or tuple(torch.stack(output) for output in zip(*outputs, strict=True)), state


class _Plan(NamedTuple):
    """Holds the non-tensor arguments of `unroll` and the numbers of its tensors.

    sizes has the number of parameters, of inputs and of state tensors.
    """

    step: Step
    slots: int
    generators: tuple[torch.Generator, ...]
    sizes: tuple[int, int, int]

    def split(self, tensors: Sequence[_T]) -> tuple[tuple[_T, ...], tuple[_T, ...], tuple[_T, ...]]:
        """Splits the flat sequence tensors into parameters, inputs and state."""
        p, x, _ = self.sizes
        return tuple(tensors[:p]), tuple(tensors[p : p + x]), tuple(tensors[p + x :])


class _StoredState(NamedTuple):
    """Holds the state and the RNG states before the step at a position, for recomputation."""

    position: int
    state: _Tensors
    random_state: list[Tensor]


@eager
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
        # Backward begins with the last step, so its input state is saved too. It uses no slot: the
        # backward pass also holds the state of the current step in addition to the m slots.
        positions = {0, *_stored_positions(0, num_steps, plan.slots), num_steps - 1}
        stored = []

        def visit(t: int, state: _Tensors) -> None:
            if t in positions:
                stored.append(_StoredState(t, state, [g.get_state() for g in generators]))

        versions = [parameter._version for parameter in parameters]
        outputs, state = _run(plan.step, parameters, inputs, state, visit)
        if versions != [parameter._version for parameter in parameters]:
            raise RuntimeError(
                "unroll: step must not modify a parameter or buffer in place with memory_slots"
            )
        ctx.plan = plan
        ctx.generators = generators
        ctx.autocast = _autocast_options(tensors)
        ctx.save_for_backward(*tensors)
        # The first state is an input, which is saved above. The backward pass frees each of the
        # others after its last use, which is impossible with saved tensors.
        ctx.random_state = stored[0].random_state
        ctx.stored = stored[1:]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return *state, *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # once_differentiable would raise only when a second derivative passes through this node.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "unroll: second derivatives are not supported with memory_slots; remove "
                "memory_slots or create_graph=True"
            )
        plan: _Plan = ctx.plan
        tensors = ctx.saved_tensors  # read once: a hook may not allow a second read
        parameters, inputs, state = plan.split(tensors)
        needed = plan.split(ctx.needs_input_grad[1:])
        parameters = _leaves(parameters, needed[0])
        # A second backward pass (retain_graph) has only the first state.
        stored = [_StoredState(0, state, ctx.random_state), *ctx.stored]
        ctx.stored = []
        # Restore autocast only for the evaluations. Gradients use the autocast state of backward.
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
                            stored.append(_StoredState(i, state, values))
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
    """Detaches tensors into leaves of a new graph; needed tells which ones require a gradient."""
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
) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Returns the gradients of one step's inputs and state; None where there is no gradient.

    Calls plan.step under the autocast options. Adds the gradients of the parameters to
    grad_parameters. grads are the gradients of the new state and the outputs. The gradients of a
    tensor that step returns several times are summed in the order of autograd: the last use first.
    """
    with torch.enable_grad(), _autocast(autocast):
        new_state, outputs = _call(plan.step, parameters, inputs, state)
    pairs = [
        (output, grad)
        for output, grad in zip(reversed((*new_state, *outputs)), reversed(grads), strict=True)
        if grad is not None and output.requires_grad
    ]
    leaves = (*parameters, *inputs, *state)
    leaf_grads: list[Tensor | None] = [None] * len(leaves)
    if pairs:
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        flowing = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaves[i] for i in wanted],
            [grad for _, grad in pairs],
            allow_unused=True,
        )
        for i, leaf_grad in zip(wanted, flowing, strict=True):
            leaf_grads[i] = leaf_grad
    found_parameters, found_inputs, found_state = plan.split(leaf_grads)
    for i, grad in enumerate(found_parameters):
        if grad is not None:
            # Clone the first gradient: its memory may be shared with another tensor.
            total = grad_parameters[i]
            grad_parameters[i] = grad.clone() if total is None else total.add_(grad)
    return found_inputs, found_state


def _all_generators(plan: _Plan, tensors: _Tensors) -> list[torch.Generator]:
    """Returns the default generators of the tensors' devices, then the generators of the plan."""
    devices = sorted({x.get_device() for x in tensors if x.is_cuda})
    return [
        torch.default_generator,
        *(torch.cuda.default_generators[i] for i in devices),
        *plan.generators,
    ]


def _autocast_options(tensors: _Tensors) -> list[dict[str, Any]]:
    """Returns the arguments of torch.autocast that restore its state on the tensors' devices."""
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
    """Restores the state of the generators on exit."""
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
