"""Explains keyword arguments that a class does not have."""

import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

_Self = TypeVar("_Self")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

# The names of other libraries; docs/guides/other_libraries.md has more about them.
_ELSEWHERE = {
    "d_model": "hidden_size hidden_dim embed_dim model_dim input_size dim",
    "num_experts": "num_local_experts n_routed_experts moe_num_experts n_experts experts_num",
    "k": "topk num_experts_per_tok num_experts_per_token moe_top_k experts_per_token",
    "hidden_sizes": "intermediate_size moe_intermediate_size ffn_hidden_size ffn_dim d_ff d_hidden",
    "d_hidden": "hidden_size",
    "d_input": "input_size",
    "activation": "hidden_act act_fn activation_fn",
    "gate": "router",
    "score": "scoring_func score_func",
    "renormalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "losses": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff router_z_loss_coef",
    "capacity": "expert_capacity moe_expert_capacity_factor",
    "process_group": "ep_group expert_parallel_group group",
    "dtype": "params_dtype",
    "num_groups": "n_group",
    "groups_per_token": "topk_group",
}


def explains_names(
    init: Callable[Concatenate[_Self, _Arguments], None],
) -> Callable[Concatenate[_Self, _Arguments], None]:
    """Lets an error about an unknown keyword argument of `init` say which one may be meant.

    top_k is another name of the argument k.
    """
    known = inspect.getfullargspec(init)
    names = [*known.args, *known.kwonlyargs]
    owner = init.__qualname__.partition(".")[0]

    @wraps(init)
    def explaining(self: _Self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            init(self, *args, **(_with_k(owner, kwargs) if "k" in names else kwargs))
        except TypeError as error:
            unknown = re.fullmatch(r"(\S+)\.__init__\(\) got an unexpected .* '(\w+)'", str(error))
            if unknown is None or unknown[1] != owner:
                raise
            meant = _meant(unknown[2], names)
            hint = f", did you mean {meant}?" if meant else ""
            raise TypeError(f"{owner}: there is no argument {unknown[2]}{hint}") from None

    return cast(Callable[Concatenate[_Self, _Arguments], None], explaining)


def accepts_top_k(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Lets top_k be another name of the argument k."""

    @wraps(function)
    def accepting(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        return function(*args, **_with_k(function.__name__, kwargs))

    return accepting


def _with_k(owner: str, options: Any) -> Any:
    """Returns the options with the name k for top_k."""
    if "top_k" not in options:
        return options
    if "k" in options:
        raise TypeError(f"{owner}: k and top_k are the same argument, got both")
    return {"k" if name == "top_k" else name: value for name, value in options.items()}


def _meant(name: str, known: Sequence[str]) -> str | None:
    """Returns the known argument that another library calls `name`, or whose name is similar."""
    for argument, aliases in _ELSEWHERE.items():
        if argument in known and name in aliases.split():
            return argument
    return next(iter(get_close_matches(name, known, n=1)), None)
