"""Finds the names in the markers `equation` and `guarantee` of all tests."""

import functools
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
MARKED = ["ops", "layer", "distributed", "test_reference.py", "test_guarantees.py"]

COLLECT = """
import sys, marked, pytest

class Names:
    def pytest_collection_modifyitems(self, items):
        marked.note(items)
        for names in sorted(marked.seen):
            print("marked", *names, sep="|")

sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], [Names()]))
"""


def names_in(item, marker):
    """Returns the names in a test's markers `equation` or `guarantee`."""
    return {name for mark in item.iter_markers(marker) for name in mark.args}


seen = set()  # what `note` has noted


def note(items):
    """Notes the names of all tests, for a session that has collected all."""
    for item in items:
        for marker in ("equation", "guarantee"):
            seen.update((marker, str(item.path), name) for name in names_in(item, marker))


def marked(marker):
    """Returns (test file, name) of all marked tests, such as ("ops/test_load", "Eq. 8")."""
    return {
        (str(Path(path).relative_to(TESTS).with_suffix("")), name)
        for mark, path, name in seen or _collect()
        if mark == marker
    }


@functools.cache
def _collect():
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *(str(TESTS / name) for name in MARKED)],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return re.findall(r"^marked\|(.*)\|(.*)\|(.*)$", done.stdout, re.M)
