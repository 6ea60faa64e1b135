"""Adam and Adagrad with a factored second moment, Appendix D."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from moe_ext.checks import require
from moe_ext.ops import accumulation_dtype

__all__ = ["FactoredAdagrad", "FactoredAdam"]


class _Factored(Optimizer):
    """What the two optimizers share: all but the coefficients of their averages.

    A weight matrix [R, C] keeps the average of g² of each row, `row` [R], and of each column,
    `column` [C], in place of its second moment V [R, C]:

        row <- decay · row + gain · mean_j(g²)        column <- decay · column + gain · mean_i(g²)
        V = correction · row · columnᵀ / mean(row)    weight <- weight - lr · g / (sqrt(V) + eps)

    The last two dimensions of a parameter are the matrix, the ones before them number the experts:
    [E, R, C] has row [E, R] and column [E, C]. Parameters of fewer dimensions, and the groups with
    `factored=False`, keep V itself.
    """

    def _coefficients(
        self, group: dict[str, Any], step: Tensor
    ) -> tuple[float | Tensor, float, float]:
        """correction, decay and gain of the step with this number, which counts from 1."""
        raise NotImplementedError

    def _check_options(self, options: dict[str, Any]) -> None:
        name = type(self).__name__
        lr = options["lr"]
        if isinstance(lr, Tensor):
            require(lr.numel() == 1, f"{name}: lr", "have one element", tuple(lr.shape))
        # A rate on a GPU is not read.
        if not isinstance(lr, Tensor) or lr.device.type == "cpu":
            require(bool(lr >= 0), f"{name}: lr", "be at least 0", lr)
        require(options["eps"] > 0, f"{name}: eps", "be positive", options["eps"])
        for other in ("weight_decay", "maximize"):  # of torch's: a group brought along may have it
            value = options.get(other, 0)
            require(not value, f"{name}: {other}", "be left out, as there is none", value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with options of its own.

        Raises:
            ValueError: an option is out of range.
            TypeError: a parameter is not of a floating type.
        """
        self._check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if not param.is_floating_point():
                del self.param_groups[-1]
                raise TypeError(
                    f"{type(self).__name__}: params must be of a floating type, got {param.dtype}"
                )

    # torch declares the two ways of calling it as overloads.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient.

        A gradient of zero counts: the averages decay, the weights stay as they are. So does that of
        an expert to which no token went.

        Args:
            closure: evaluates the model anew and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            TypeError: a gradient is sparse; then nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [
            (group, param)
            for group in self.param_groups
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
        # As in torch.optim: on the host, unless the step is to be captured in a graph.
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
            param.sub_(lr * grad / ((second_moment * correction).sqrt_() + eps))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of every torch optimizer, but the averages of half-precision weights stay float32."""
        given: dict[str, Any] = {}
        # The last hook sees the state as all others, which may change it, have left it.
        hook = self.register_load_state_dict_pre_hook(lambda _, state: given.update(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        ids = [index for group in given["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(ids, params, strict=True):
            for key, value in given["state"].get(index, {}).items():
                if key != "step":  # torch cast it to the parameter's type
                    self.state[param][key] = value.to(param.device, accumulation_dtype(param))


def _number(value: float | Tensor) -> Tensor:
    """A scalar as the operator takes it: on the host, or on a device where it is there already."""
    if isinstance(value, Tensor):
        return value.detach().reshape(()).double()
    return torch.tensor(value, dtype=torch.float64, device="cpu")


class FactoredAdam(_Factored):
    """Adam with β1 = 0 and a second moment factored into averages of rows and columns (App. D).

    For a weight matrix [R, C] with gradient g, in step t:

        row    <- β2 · row    + (1 - β2) · mean over the columns of g²
        column <- β2 · column + (1 - β2) · mean over the rows of g²
        V = row · columnᵀ / mean(row) / (1 - β2^t)
        weight <- weight - lr · g / (sqrt(V) + eps)

    V is Adam's where g² has rank one. R + C numbers are kept in place of Adam's 2 · R · C: for the
    expert weights [E, D, F] `row` [E, D] and `column` [E, F]. So the last two dimensions of a
    parameter are taken as a matrix; one of fewer dimensions keeps its whole second moment, as do
    those of a group with `factored=False`. An expert without tokens has a gradient of zero: its
    averages decay, its weights stay.

    The averages are float32 for half-precision weights. Groups may have options of their own.

    Args:
        params: parameters, or dicts of groups, as of every torch optimizer.
        lr: learning rate; a number or a tensor of one element.
        beta2: decay of the averages.
        eps: added to the root.
        mean_of_roots: divide by (sqrt(row) + eps) · (sqrt(column) + eps) / mean(sqrt(column) + eps)
            instead, with corrected averages. By Jensen's inequality its steps are the smaller ones,
            by a factor for each matrix.
        capturable: keep the number of steps on the parameter's device and never read it on the
            host, so that a step can be captured in a CUDA graph (with lr a tensor there).
        factored: False keeps the whole second moment.

    Raises:
        ValueError: an option is out of range.
        TypeError: a parameter is not of a floating type.

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

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        require(0 <= options["beta2"] < 1, "FactoredAdam: beta2", "be in [0, 1)", options["beta2"])

    def _coefficients(
        self, group: dict[str, Any], step: Tensor
    ) -> tuple[float | Tensor, float, float]:
        beta2 = group["beta2"]
        number = step.double() if group["capturable"] else step.item()
        # row, column and their mean all lack the factor 1 - β2^t, so V lacks it once.
        return 1 / (1 - beta2**number), beta2, 1 - beta2


class FactoredAdagrad(_Factored):
    """Adagrad with its sums of squares factored as in `FactoredAdam` (App. D).

    For a weight matrix [R, C] with gradient g:

        row    <- row    + mean over the columns of g²
        column <- column + mean over the rows of g²
        weight <- weight - lr · g / (sqrt(row · columnᵀ / mean(row)) + eps)

    Args:
        params: parameters, or dicts of groups, as of every torch optimizer.
        lr: learning rate; a number or a tensor of one element.
        initial_accumulator_value: where the sums of squares start.
        eps: added to the root.
        capturable, factored: see `FactoredAdam`.

    Raises:
        ValueError: an option is out of range.
        TypeError: a parameter is not of a floating type.
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

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        start = options["initial_accumulator_value"]
        require(start >= 0, "FactoredAdagrad: initial_accumulator_value", "be at least 0", start)

    def _coefficients(
        self, group: dict[str, Any], step: Tensor
    ) -> tuple[float | Tensor, float, float]:
        return 1.0, 1.0, 1.0
