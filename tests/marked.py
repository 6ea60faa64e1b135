"""Finds the names in the markers `equation` and `guarantee` of all tests."""

import functools
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MARKED = ["ops", "layer", "distributed", "test_reference.py", "test_guarantees.py"]

COLLECT = """
import sys, pytest
from marked import names_in

class Names:
    def pytest_collection_modifyitems(self, items):
        for item in items:
            for marker in ("equation", "guarantee"):
                for name in sorted(names_in(item, marker)):
                    print(f"marked|{marker}|{item.path}|{name}")

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], [Names()]))
"""


def names_in(item, marker):
    """Returns the names in a test's markers `equation` or `guarantee`."""
    return {name for mark in item.iter_markers(marker) for name in mark.args}


def marked(marker):
    """Returns (test file, name) of all marked tests, such as ("ops/test_load", "Eq. 8")."""
    return {(file, name) for found, file, name in _collect() if found == marker}


@functools.cache
def _collect():
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *(str(TESTS / name) for name in MARKED)],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return [
        (marker, str(Path(path).relative_to(TESTS).with_suffix("")), name)
        for marker, path, name in re.findall(r"^marked\|(.*)\|(.*)\|(.*)$", done.stdout, re.M)
    ]
