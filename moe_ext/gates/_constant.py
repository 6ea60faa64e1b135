"""The warning for gates that are constant."""

import warnings


def warn_if_untrained(name: str, k: int, choices: int, remedy: str, part: str = "gate") -> None:
    """Warns if the only gate of each token is constant: a gate of `choices` renormalized over k."""
    if k == 1 < choices:
        warnings.warn(
            f"{name}: with k = 1 the {part} of every token is constant, and the task's loss gives "
            f"the weights of this gate no gradient; {remedy}",
            stacklevel=4,  # the caller of the constructor, which `explains_names` wraps
        )
