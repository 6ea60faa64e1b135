"""Pairwise parametrization: few cases in which every two values of two arguments meet."""

from collections import defaultdict
from itertools import combinations, product

import pytest


def cases_of(arguments, allowed=lambda **case: True):
    """Returns cases that contain each pair of values that an allowed case contains.

    arguments: the values of each argument, which must be hashable, by name.
    """
    every = [dict(zip(arguments, values, strict=True)) for values in product(*arguments.values())]
    with_pair = defaultdict(list)
    for case in every:
        if allowed(**case):
            for pair in combinations(case.items(), 2):
                with_pair[pair].append(case)
    missing = dict.fromkeys(with_pair)  # in a fixed order
    cases = []

    def num_new(case):
        return sum(pair in missing for pair in combinations(case.items(), 2))

    while missing:
        cases.append(max(with_pair[next(iter(missing))], key=num_new))
        for pair in combinations(cases[-1].items(), 2):
            missing.pop(pair, None)
    return cases


def pairwise(allowed=lambda **case: True, **arguments):
    """Parametrizes a test by the cases of `cases_of`."""
    cases = cases_of({name: tuple(values) for name, values in arguments.items()}, allowed)
    return pytest.mark.parametrize(list(arguments), [tuple(case.values()) for case in cases])
