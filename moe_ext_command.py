"""The command moe-ext. It is not part of moe_ext, because the import of moe_ext takes seconds."""

import io
import os
import sys
from collections.abc import Callable
from typing import TextIO

_HELP = """\
usage: moe-ext info [--cmake-prefix]
       moe-ext chat MODEL

  info  Prints the build configuration and runs a self-test.
  chat  Chats with a packed mixture of transformers: a folder, a GGUF file, or a name of the hub.

The package moe_lab has the commands that train, evaluate and translate: `moe-lab --help`."""
_MOVED = {
    *("compare", "evaluate", "export", "inspect-experts", "plan-cluster", "prepare-data"),
    *("quickstart", "train", "translate"),
}


def with_streams(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status, also if stdout or stderr is closed or full.

    - stdout closed, or not able to take all of the output: 2, with a message.
    - The reader of stdout has ended (``| head``): 141.
    - stderr closed: messages are dropped.

    Paths that are not UTF-8 are printed as they are.
    """
    closed = sys.stdout is None
    # A file that is opened later must not take the number of a closed stream, and then its output.
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(handle)
    if sys.stderr is None:  # print(file=None) would write to stdout
        sys.stderr = os.fdopen(2, "w", closefd=False)
    if closed:
        _say("error: stdout must be open, got a closed stdout; to drop the output, use >/dev/null")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout)
        return 141
    except OSError as error:  # of the last flush, of --help, or of a full stderr
        _drop(sys.stdout)
        _say(f"error: stdout: {error.strerror or error}")
        return 2
    finally:
        _say("")


def _say(line: str) -> None:
    """Prints a line to stderr, which may be full."""
    try:
        sys.stderr.write(f"{line}\n" if line else "")
        sys.stderr.flush()
    except OSError:
        _drop(sys.stderr)


def _drop(stream: TextIO) -> None:
    """Drops the output of a stream, which the interpreter otherwise fails to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> int:
    """Runs the command and returns the exit status."""
    return with_streams(_run)


def _run() -> int:
    """Runs the command that the command line names and returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_HELP)
        return 0
    if name in _MOVED:
        print(
            f"moe-ext: {name} is now `moe-lab {name}`, a command of the package moe_lab "
            "(pip install ./lab in the repository)",
            file=sys.stderr,
        )
        return 2
    if name not in ("chat", "info"):
        print(f"moe-ext: COMMAND must be chat or info, got {name}", file=sys.stderr)
        return 2
    sys.argv[:2] = [f"moe-ext {name}"]  # the usage line begins with it
    if name == "chat":
        try:
            from moe_ext.chat import main as chat
        except ImportError as error:  # transformers is optional
            print(f"moe-ext chat: {error}", file=sys.stderr)
            return 2
        return chat()
    from moe_ext.info import main as info

    return info()
