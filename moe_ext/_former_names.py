"""The names that parameters had in the state_dicts of earlier versions."""

import re
from collections.abc import Iterable

# Before version 0.1, the expert layers were ParameterLists: weight_0 was weights.0.
_LISTS = {"weight": "weights", "bias": "biases"}
_NAME = re.compile(r"(?<![^.])(weight|bias)_(\d+)$")


def former_name(name: str) -> str:
    """Returns a parameter's earlier name, such as "experts.weights.0" for "experts.weight_0"."""
    return _NAME.sub(lambda match: f"{_LISTS[match[1]]}.{match[2]}", name)


def current_names(saved: Iterable[str], wanted: Iterable[str]) -> dict[str, str]:
    """Maps each saved name that is the earlier name of a wanted parameter to its current name."""
    saved = set(saved)
    formers = {former_name(name): name for name in wanted if name not in saved}
    return {name: formers[name] for name in saved if name in formers}
