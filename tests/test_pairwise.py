"""Every two values of two arguments meet in a case of `pairwise`."""

from itertools import combinations, product

from pairwise import cases_of


def test_every_two_values_meet():
    arguments = {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2), "d": (1, 2)}
    cases = cases_of(arguments, allowed=lambda a, b, **_: (a, b) != (1, 1))
    for first, second in combinations(arguments, 2):
        met = {(case[first], case[second]) for case in cases}
        refused = {(1, 1)} if (first, second) == ("a", "b") else set()
        assert met == {*product(arguments[first], arguments[second])} - refused
    assert len(cases) < 10
