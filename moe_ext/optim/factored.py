"""Adam and Adagrad with a factored second moment (Appendix D)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from moe_ext.checks import require, require_at_least, require_bool, require_positive
from moe_ext.ops import accumulation_dtype

__all__ = ["FactoredAdagrad", "FactoredAdam"]


class _Factored(Optimizer):
    """Implements `FactoredAdam` and `FactoredAdagrad`, except for their coefficients.

    For a weight matrix [R, C], the state has two vectors instead of the second moment V [R, C]:
    `row` [R] averages g² over each row, `column` [C] averages g² over each column::

        row <- decay · row + gain · mean_j(g²)        column <- decay · column + gain · mean_i(g²)
        V = correction · row · columnᵀ / mean(row)    weight <- weight - lr · g / (sqrt(V) + eps)

    The last two dimensions of a parameter form the matrix; the others are batch dimensions.
    """

    def _coefficients(
        self, group: dict[str, Any], step: Tensor
    ) -> tuple[float | Tensor, float, float]:
        """Returns correction, decay and gain of a step for a parameter group; step is >= 1."""
        raise NotImplementedError(f"{type(self).__name__} must define _coefficients(group, step)")

    def _checked_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns the options with plain numbers and bools; raises ValueError or TypeError."""
        name = type(self).__name__
        lr = options["lr"]
        if not isinstance(lr, Tensor):
            (lr,) = require_at_least(0, name, lr=lr)
        else:
            require(lr.numel() == 1, f"{name}: lr", "have one element", tuple(lr.shape))
            if lr.device.type == "cpu":  # reading a learning rate on a GPU would synchronize
                require(bool(lr >= 0), f"{name}: lr", "be at least 0", lr)
        (eps,) = require_positive(name, eps=options["eps"])
        names = [key for key in ("mean_of_roots", "capturable", "factored") if key in options]
        bools = require_bool(name, **{key: options[key] for key in names})
        for option in ("weight_decay", "maximize"):  # a group of a torch optimizer may have them
            value = options.get(option, 0)
            require(
                not value, f"{name}: {option}", "be left out, because it is not supported", value
            )
        return options | {"lr": lr, "eps": eps} | dict(zip(names, bools, strict=True))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds param_group, a dict of parameters and their own options.

        Raises:
            ValueError: an option is out of range.
            TypeError: a parameter is complex, or a DTensor.
        """
        options = self._checked_options({**self.defaults, **param_group})
        super().add_param_group(options)
        for param in self.param_groups[-1]["params"]:
            if isinstance(param, DTensor):
                problem = "plain tensors, got a DTensor"
            elif param.is_complex():  # integers, such as packed weights, have no gradient
                problem = f"floating point, got {param.dtype}"
            else:
                continue
            del self.param_groups[-1]
            raise TypeError(f"{type(self).__name__}: params must be {problem}")

    # torch declares step() and step(closure) as overloads.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters that have a gradient.

        A zero gradient decays the second moment and leaves the weight unchanged. This includes the
        gradient of an expert without tokens.

        Args:
            closure: a function that reevaluates the model and returns the loss.

        Returns:
            The loss that closure returned, or None.

        Raises:
            TypeError: a gradient is sparse. No parameter is changed.
            ValueError: an option of a group is out of range. No parameter is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        if not torch.compiler.is_compiling():  # a learning rate may have no value then
            groups = [self._checked_options(group) for group in groups]
        moved = [
            (group, param)
            for group in groups
            for param in group["params"]
            if param.grad is not None
        ]
        for _, param in moved:
            if param.grad.layout != torch.strided:
                raise TypeError(
                    f"{type(self).__name__}: gradients must be dense, got {param.grad.layout}"
                )
        for group, param in moved:
            state = self.state[param]
            if not state:
                self._init_state(state, param, group)
            self._update(param, param.grad, state, group)
        return loss

    def _init_state(self, state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
        # As in torch.optim, the step is on the host unless a CUDA graph captures it.
        device = param.device if group["capturable"] else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        dtype = accumulation_dtype(param)
        start = group.get("initial_accumulator_value", 0.0)
        if group["factored"] and param.dim() >= 2:
            *experts, rows, columns = param.shape
            state["row"] = param.new_full((*experts, rows), start, dtype=dtype)
            state["column"] = param.new_full((*experts, columns), start, dtype=dtype)
        else:
            state["second_moment"] = torch.full_like(param, start, dtype=dtype)

    def _update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> None:
        state["step"] += 1
        correction, decay, gain = self._coefficients(group, state["step"])
        lr, correction, eps = _number(group["lr"]), _number(correction), group["eps"]
        if "row" in state:
            row, column = state["row"], state["column"]
            mean_of_roots = group.get("mean_of_roots", False)
            torch.ops.moe_ext.factored_step_(
                param, grad, row, column, lr, correction, decay, gain, eps, mean_of_roots
            )
        else:
            second_moment = state["second_moment"]
            grad = grad.to(second_moment.dtype)
            second_moment.mul_(decay).addcmul_(grad, grad, value=gain)
            # The quotient first: lr · grad may overflow where the moment is infinite.
            param.sub_(lr * (grad / ((second_moment * correction).sqrt_() + eps)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state_dict; the second moments of half-precision weights stay float32."""
        given: dict[str, Any] = {}
        # Registered last, this hook sees the changes of all other hooks.
        hook = self.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        ids = [index for group in given["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(ids, params, strict=True):
            for key, value in given["state"].get(index, {}).items():
                if key != "step":  # torch has cast the value to the parameter's dtype
                    self.state[param][key] = value.to(param.device, accumulation_dtype(param))


def _number(value: float | Tensor) -> Tensor:
    """Converts value to a float64 scalar on the tensor's own device, or on the CPU for a number."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).double()
    return torch.tensor(value, dtype=torch.float64, device="cpu")


class FactoredAdam(_Factored):
    """Implements Adam with β1 = 0 and a factored second moment (Appendix D).

    The update of a weight matrix [R, C] with gradient g in step t is::

        row    <- β2 · row    + (1 - β2) · mean over the columns of g²
        column <- β2 · column + (1 - β2) · mean over the rows of g²
        V = row · columnᵀ / mean(row) / (1 - β2^t)
        weight <- weight - lr · g / (sqrt(V) + eps)

    V equals Adam's second moment if g² has rank one. The state of a matrix has R + C elements; the
    state of Adam has 2 · R · C. Expert weights [E, D, F] have row [E, D] and column [E, F].

    The last two dimensions of a parameter form the matrix. The full second moment is stored for
    parameters with fewer than two dimensions and for groups with ``factored=False``. For an expert
    without tokens, the gradient is zero: its second moment decays and its weights do not change.
    A gradient that is finite, but so large that squares of a matrix of such numbers overflow, is
    taken as zero too; as with Adam, its weight keeps its value.

    The second moments of half-precision weights are float32. Each parameter group can override the
    options. FactoredAdam does not support weight_decay and maximize.

    Args:
        params: parameters or parameter groups, as for every torch optimizer.
        lr: learning rate, a number or a tensor with one element. Under `torch.compile`, each other
            number compiles the step again, a tensor does not.
        beta2: decay of the second moment.
        eps: added to sqrt(V).
        mean_of_roots: whether to divide g by
            (sqrt(row) + eps) · (sqrt(column) + eps) / mean(sqrt(column) + eps) instead of
            sqrt(V) + eps, with bias-corrected row and column. By Jensen's inequality the updates
            are smaller, by one factor for a whole matrix.
        capturable: whether to keep the step count on the device of the parameter and never read it
            on the host. A CUDA graph can then capture the step; lr must be a tensor on that device.
        factored: whether to factor the second moment. False stores the full second moment.

    Raises:
        ValueError: an option is out of range or not supported.
        TypeError: a parameter is complex.

    Example:
        >>> split = split_parameters(MoE(8, num_experts=4, k=2))
        >>> optimizers = [
        ...     FactoredAdam(split.experts, lr=1e-3, beta2=0.98),
        ...     torch.optim.Adam(split.rest, lr=1e-3),
        ... ]
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        beta2: float = 0.999,
        eps: float = 1e-8,
        *,
        mean_of_roots: bool = False,
        capturable: bool = False,
        factored: bool = True,
    ) -> None:
        defaults = dict(
            lr=lr,
            beta2=beta2,
            eps=eps,
            mean_of_roots=mean_of_roots,
            capturable=capturable,
            factored=factored,
        )
        super().__init__(params, defaults)

    def _checked_options(self, options: dict[str, Any]) -> dict[str, Any]:
        (beta2,) = require_at_least(-math.inf, "FactoredAdam", beta2=options["beta2"])
        require(0 <= beta2 < 1, "FactoredAdam: beta2", "be in [0, 1)", beta2)
        return super()._checked_options(options) | {"beta2": beta2}

    def _coefficients(
        self, group: dict[str, Any], step: Tensor
    ) -> tuple[float | Tensor, float, float]:
        beta2 = group["beta2"]
        number = step.double() if group["capturable"] else step.item()
        # row, column and mean(row) are each too small by 1 - β2^t. Hence V is too small by it once.
        return 1 / (1 - beta2**number), beta2, 1 - beta2


class FactoredAdagrad(_Factored):
    """Implements Adagrad with a factored sum of squares, as in `FactoredAdam` (Appendix D).

    The update of a weight matrix [R, C] with gradient g is::

        row    <- row    + mean over the columns of g²
        column <- column + mean over the rows of g²
        weight <- weight - lr · g / (sqrt(row · columnᵀ / mean(row)) + eps)

    Args:
        params: parameters or parameter groups, as for every torch optimizer.
        lr: learning rate, a number or a tensor with one element. Under `torch.compile`, each other
            number compiles the step again, a tensor does not.
        initial_accumulator_value: initial value of the sums of squares.
        eps: added to the square root.
        capturable, factored: see `FactoredAdam`.

    Raises:
        ValueError: an option is out of range or not supported.
        TypeError: a parameter is complex.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        capturable: bool = False,
        factored: bool = True,
    ) -> None:
        defaults = dict(
            lr=lr,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            capturable=capturable,
            factored=factored,
        )
        super().__init__(params, defaults)

    def _checked_options(self, options: dict[str, Any]) -> dict[str, Any]:
        name = "initial_accumulator_value"
        (start,) = require_at_least(0, "FactoredAdagrad", **{name: options[name]})
        return super()._checked_options(options) | {name: start}

    def _coefficients(
        self, group: dict[str, Any], step: Tensor
    ) -> tuple[float | Tensor, float, float]:
        return 1.0, 1.0, 1.0
