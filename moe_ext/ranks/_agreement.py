"""Checks that ranks agree on options that they must share."""

import re
from collections.abc import Mapping
from itertools import chain

from moe_ext.ranks.collectives import Ranks

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object, different on each rank


def require_same(owner: str, values: Mapping[str, object], ranks: Ranks) -> None:
    """Requires on all ranks together that they have the same values; compares their texts.

    Args:
        owner: the class or function that takes the values.
        values: the values of this rank, by name.
        ranks: the ranks; all must call this function together.

    Raises:
        ValueError: "<owner>: <name> must be equal on all ranks, got …", for the first value that
            differs; all ranks raise the same error.
    """
    own = {name: _ADDRESS.sub("", str(value)) for name, value in values.items()}
    texts = ranks.gather_objects(own)
    for name in dict.fromkeys(chain.from_iterable(texts)):
        first, *texts_of_others = (text.get(name, "nothing") for text in texts)
        for rank, text in enumerate(texts_of_others, 1):
            if text != first:
                raise ValueError(
                    f"{owner}: {name} must be equal on all ranks, "
                    f"got {first} on rank 0 and {text} on rank {rank}"
                )
