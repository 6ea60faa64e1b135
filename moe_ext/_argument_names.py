"""Explains keyword arguments that a class does not have."""

import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

_Self = TypeVar("_Self")
_Arguments = ParamSpec("_Arguments")

# The names of other libraries; docs/guides/other_libraries.md has more about them.
_ELSEWHERE = {
    "d_model": "hidden_size hidden_dim embed_dim model_dim input_size dim",
    "num_experts": "num_local_experts n_routed_experts moe_num_experts n_experts experts_num",
    "k": "top_k topk num_experts_per_tok num_experts_per_token moe_top_k experts_per_token",
    "hidden_sizes": "intermediate_size moe_intermediate_size ffn_hidden_size ffn_dim d_ff d_hidden",
    "d_hidden": "hidden_size",
    "d_input": "input_size",
    "activation": "hidden_act act_fn activation_fn",
    "gate": "router",
    "score": "scoring_func score_func",
    "renormalize": "norm_topk_prob",
    "scale": "routed_scaling_factor",
    "losses": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff router_z_loss_coef",
    "capacity_factor": "capacity expert_capacity moe_expert_capacity_factor",
    "process_group": "ep_group expert_parallel_group group",
    "expert_dtype": "dtype params_dtype",
    "num_groups": "n_group",
    "groups_per_token": "topk_group",
}


def explains_names(
    init: Callable[Concatenate[_Self, _Arguments], None],
) -> Callable[Concatenate[_Self, _Arguments], None]:
    """Lets an error about an unknown keyword argument of `init` say which one may be meant."""

    @wraps(init)
    def explaining(self: _Self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        try:
            init(self, *args, **kwargs)
        except TypeError as error:
            found = re.fullmatch(r"(\S+)\.__init__\(\) got an unexpected .* '(\w+)'", str(error))
            if found is None or found[1] != init.__qualname__.partition(".")[0]:
                raise
            known = inspect.getfullargspec(init)
            meant = _meant(found[2], [*known.args, *known.kwonlyargs])
            hint = f", did you mean {meant}?" if meant else ""
            raise TypeError(f"{found[1]}: there is no argument {found[2]}{hint}") from None

    return cast(Callable[Concatenate[_Self, _Arguments], None], explaining)


def _meant(name: str, known: Sequence[str]) -> str | None:
    """Returns the known argument that another library calls `name`, or whose name is similar."""
    for ours, theirs in _ELSEWHERE.items():
        if ours in known and name in theirs.split():
            return ours
    return next(iter(get_close_matches(name, known, n=1)), None)
