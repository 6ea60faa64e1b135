"""Corrupted files of every kind: refused in one sentence, or accepted with a valid result."""

import os
import re
import signal
import warnings

import fuzz_files
import pytest
from fuzz_files import KINDS, Kind, fuzz, replay
from moe_lab.errors import ConfigError

FILES, COMMANDS = 20, 3  # of each kind, without --long

pytestmark = pytest.mark.usefixtures("one_thread")


def failures(kind, numbers, commands=0):
    results = list(fuzz(kind, numbers, commands))
    assert [each.number for each in results] == list(numbers)
    assert {"accepted", "refused"} & {each.result for each in results}
    return "\n".join(replay(kind.name, each) for each in results if each.result == "failed")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_intact_files_are_accepted(kind, tmp_path, monkeypatch):
    folder = tmp_path / "files"
    folder.mkdir()
    kind.make(folder)
    files = [file for pattern in kind.files for file in folder.glob(pattern)]
    assert files
    for number, file in enumerate(files):
        (tmp_path / f"{number}").mkdir()
        monkeypatch.chdir(tmp_path / f"{number}")
        kind.load(folder, file)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_corrupted_files(kind):
    assert failures(kind, range(FILES), COMMANDS) == ""


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_ten_thousand_corrupted_files(kind):
    assert failures(kind, range(10_000), 250) == ""


def test_the_script_prints_the_numbers(capfd):
    assert fuzz_files.main(["config", "--files", "20", "--commands", "0"]) == 0
    printed = capfd.readouterr()
    header, row = printed.out.splitlines()
    assert header.split() == ["kind", "files", "accepted", "refused", "failed"]
    name, files, accepted, refused, failed = row.split()
    assert (name, files, failed) == ("config", "20", "0")
    assert int(accepted) + int(refused) == 20 and int(refused) > 0 and printed.err == ""


# --- the oracle notices what a loader must not do -----------------------------------------------


def write(folder, file):
    (folder / "new").touch()


def overwrite(folder, file):
    file.write_bytes(b"other")


def raise_another_error(folder, file):
    raise KeyError(str(file))


def raise_two_lines(folder, file):
    raise ConfigError(f"{file}\n  is wrong" + "x" * 5_000)


def name_no_file(folder, file):
    raise ConfigError("wrong")


def name_an_exception(folder, file):
    raise ConfigError(f"{file}: KeyError: 'a'")


def warn(folder, file):
    warnings.warn("careful", stacklevel=2)


def crash(folder, file):
    os.kill(os.getpid(), signal.SIGSEGV)


def wait(folder, file):
    signal.pause()


def take_memory(folder, file):
    return [bytes([1]) * 2**28 for _ in range(6)]


@pytest.mark.parametrize(
    ("load", "what"),
    [
        (write, "changed the folder"),
        (overwrite, "changed the folder"),
        (raise_another_error, "KeyError"),
        (name_no_file, "without the name of the file"),
        (name_an_exception, "obscure message"),
        (warn, "a warning: careful"),
        (crash, "SIGSEGV"),
        (wait, "more than 1 seconds"),
        (take_memory, "bytes of memory"),
    ],
)
def test_a_wrong_loader_is_noticed(monkeypatch, load, what):
    if load is wait:
        monkeypatch.setattr(fuzz_files, "SECONDS", 1)
    kind = Kind(
        "broken",
        lambda folder: (folder / "file").write_bytes(b"abc"),
        ["file"],
        load,
        lambda *_: [],
    )
    results = list(fuzz(kind, range(1)))
    assert [each.result for each in results] == ["failed"]
    assert all(re.search(what, each.message) for each in results)


def test_an_error_message_is_one_line():
    kind = Kind(
        "lines",
        lambda folder: (folder / "file").write_bytes(b"abc"),
        ["file"],
        raise_two_lines,
        lambda *_: [],
    )
    assert {each.result for each in fuzz(kind, range(2))} == {"refused"}


def test_the_same_number_gives_the_same_file(tmp_path):
    kind = KINDS["vocabulary"]
    contents = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        kind.make(folder)
        file, how = fuzz_files.corrupt(kind, folder, 5)
        contents.append((file.relative_to(folder), how, file.read_bytes()))
    assert contents[0] == contents[1]
