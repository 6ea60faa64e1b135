"""The names that parameters had in the state_dicts of former versions."""

import re
from collections.abc import Iterable

# Until version 0.1 the experts' layers were ParameterLists: weights.0 is weight_0 today.
_LISTS = {"weight": "weights", "bias": "biases"}
_NAME = re.compile(r"(?<![^.])(weight|bias)_(\d+)$")


def former_name(name: str) -> str:
    """ "experts.weights.0" for "experts.weight_0"; a name that never changed for itself."""
    return _NAME.sub(lambda found: f"{_LISTS[found[1]]}.{found[2]}", name)


def current_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """The wanted name of each saved one that is the former name of a wanted one."""
    saved = set(saved)
    formers = {former_name(name): name for name in wanted if name not in saved}
    return {name: formers[name] for name in saved if name in formers}
