"""Corrupted files of every kind: refused in one sentence, or accepted with a valid result."""

import os
import signal
import warnings

import fuzz_files
import pytest
from fuzz_files import KINDS, Kind, fuzz, replay
from moe_lab.errors import ConfigError

FILES = 10  # of each kind, without --long

pytestmark = pytest.mark.usefixtures("one_thread")
all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)


@all_kinds
@pytest.mark.parametrize("number", [FILES, pytest.param(10_000, marks=pytest.mark.long)])
def test_corrupted_files(kind, number):
    results = list(fuzz(kind, range(number)))
    assert [result.number for result in results] == list(range(number))
    assert {"accepted", "refused"} & {result.result for result in results}
    failed = [replay(kind.name, result) for result in results if result.result == "failed"]
    assert failed == [], "\n".join(failed)


@all_kinds
def test_intact_files_are_accepted(kind, monkeypatch):
    def intact(kind, folder, number):
        files = sorted(file for pattern in kind.files for file in folder.glob(pattern))
        return files[number % len(files)], "intact"

    monkeypatch.setattr(fuzz_files, "corrupt", intact)
    assert [result.result for result in fuzz(kind, range(3))] == ["accepted"] * 3


def test_the_script_prints_the_numbers(capfd):
    """The same numbers give the same files."""
    for _ in range(2):
        assert fuzz_files.main(["config", "--files", "20"]) == 0
    printed = capfd.readouterr()
    header, row, *again = printed.out.splitlines()
    assert header.split() == ["kind", "files", "accepted", "refused", "failed"]
    name, files, accepted, refused, failed = row.split()
    assert (name, files, failed) == ("config", "20", "0") and again == [header, row]
    assert int(accepted) + int(refused) == 20 and int(refused) > 0 and printed.err == ""


# --- the oracle notices what a loader must not do -----------------------------------------------


def raise_error(make):
    def load(folder, file):
        raise make(file)

    return load


@pytest.mark.parametrize(
    ("load", "what"),
    [
        (lambda folder, file: (folder / "new").touch(), "changed the folder"),
        (lambda folder, file: file.write_bytes(b"other"), "changed the folder"),
        (raise_error(lambda file: KeyError(str(file))), "KeyError"),
        (raise_error(lambda file: ConfigError("wrong")), "without the name of the file"),
        (raise_error(lambda file: ConfigError(f"{file}: KeyError: 'a'")), "obscure message"),
        (lambda folder, file: warnings.warn("careful", stacklevel=2), "a warning: careful"),
        (lambda folder, file: [os.write(2, b"from C")], "a warning: from C"),
        (lambda folder, file: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"),
        (lambda folder, file: signal.pause(), "more than 1 seconds"),
        (lambda folder, file: [bytes(2**28) for _ in range(9)], "MemoryError"),
        (raise_error(lambda file: ConfigError(f"{file}\n is wrong" + "x" * 5_000)), None),
    ],
)
def test_a_wrong_loader_is_noticed(monkeypatch, load, what):
    """The message of the last loader becomes one line."""
    monkeypatch.setattr(fuzz_files, "SECONDS", 1 if what and "seconds" in what else 60)

    def make(folder):
        (folder / "file").write_bytes(b"abc")

    monkeypatch.setattr(fuzz_files, "WHOLE", {"empty": fuzz_files.WHOLE["empty"]})
    (result,) = fuzz(Kind("broken", make, ["file"], load), range(1))
    assert result.result == ("failed" if what else "refused") and (what or "") in result.message
