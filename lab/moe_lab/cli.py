"""Parsers and exit statuses of the commands, without the import of torch."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_ext_command import with_streams
from moe_lab.errors import ConfigError

SEED_LIMIT = 2**62  # torch's generators take 64-bit seeds
THREAD_LIMIT = 2**12  # of num_threads; more would end the process instead of an error
CONFIG = "a TOML file, or a name such as small/moe-32"  # the help of the argument `config`
DEFAULT_SEEDS = [1, 2, 3]  # of comparisons and studies
_LONGEST_ERROR = 1_000  # characters


def exit_status(main: Callable[[], object]) -> int:
    """Runs the function `main` of a command and returns its exit status.

    The exit status is the result of `main` if it is an int, otherwise:

    - 0: success. ``moe-lab train`` also ends with 0 if Ctrl-C or SIGTERM stops the training: the
      command saves a checkpoint and prints how to resume.
    - 1: training diverged (FloatingPointError).
    - 2: a ConfigError, CheckpointError, OSError or a text that is not UTF-8, printed to stderr.
      argparse also uses 2. So does a closed or full stdout, see `with_streams`.
    - 130: Ctrl-C, or SIGTERM during training. ``moe-lab compare`` and ``moe-lab quickstart``
      save a checkpoint; the same command resumes the training.
    - 141: stdout was closed (``| head``).
    """
    return with_streams(lambda: _status_of(main))


def _status_of(main: Callable[[], object]) -> int:
    try:
        result = main()
    except ConfigError as error:
        _print_error(str(error))
        return 2
    except UnicodeEncodeError as error:
        _print_error(f"a text or path must be {error.encoding}, got {error.object!r}")
        return 2
    except BrokenPipeError:
        raise  # `with_streams` ends the command
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        _print_error(f"{place}{error.strerror or error}")
        return 2
    except FloatingPointError as error:
        _print_error(str(error))
        return 1
    except RuntimeError as error:
        layer = sys.modules.get("moe_ext.distributed")  # imported only by commands that need it
        if layer is None or not isinstance(error, layer.CheckpointError):
            raise
        _print_error(str(error))
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def _print_error(text: str) -> None:
    """Prints an error message in one line; the text may contain parts of a corrupted file."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(shown) > _LONGEST_ERROR:
        shown = f"{shown[: _LONGEST_ERROR // 2]} ... {shown[-_LONGEST_ERROR // 2 :]}"
    print(f"error: {shown}", file=sys.stderr)


def print_version() -> None:
    """Prints the version of the package."""
    from importlib.metadata import version  # only one option needs it

    print(f"moe_lab {version('moe_lab')}")


class _Version(argparse.Action):
    """Prints the version of the package."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print_version()
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one and whose help does not explain it."""

    def _expand_help(self, action: argparse.Action) -> str:
        text, default = super()._expand_help(action), action.default
        if default is None or default is False or default in ([], argparse.SUPPRESS):
            return text
        if "default" in text:
            return text
        several = isinstance(default, list | tuple)
        return f"{text} (default: {shlex.join(map(str, default)) if several else default})"


class _Parser(argparse.ArgumentParser):
    """Raises OSError if the help cannot be printed. argparse ignores the error."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Creates a parser whose help shows `description`, the docstring of a command."""
    parser = _Parser(description=description, formatter_class=_Formatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the positional argument ``run``, which `require_checkpoint` checks."""
    parser.add_argument("run", help="the folder of a training run")


def require_checkpoint(run: str | Path) -> None:
    """Checks that the folder of a run has checkpoints."""
    if not any(Path(run, "checkpoints").glob("*")):
        raise ConfigError(
            f"there is no checkpoint in {run}; train first, or give the folder of a run"
        )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds the options --threads and --device."""
    add_threads(parser)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds key=value overrides to a parser; call ``parse_intermixed_args`` to parse them."""
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without it, argparse says that overrides are required
        metavar="key=value",
        help="options of the configuration to override",
    )


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Adds the option --seeds, the seeds of the runs, to a parser."""
    parser.add_argument(
        "--seeds",
        type=at_least(0, SEED_LIMIT),
        nargs="+",
        default=DEFAULT_SEEDS,
        help="seeds of the runs",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the option ``--output`` of the studies."""
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs", "results"),
        help="folder of the page and its data",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Adds the option --threads to the parser of a command without a configuration."""
    parser.add_argument(
        "--threads",
        type=at_least(0, THREAD_LIMIT),
        default=0,
        help="number of threads; 0 is torch's number",
    )


def at_least(minimum: int, below: int | None = None) -> Callable[[str], int]:
    """Makes an argparse type for whole numbers of at least `minimum`, and less than `below`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or (below is not None and value >= below):
            rule = f"of at least {minimum}" if below is None else f"in [{minimum}, {below})"
            raise argparse.ArgumentTypeError(f"must be a whole number {rule}, got {text!r}")
        return value

    return parse


def plot_file(text: str) -> Path:
    """Parses the path of a .png or .pdf file, as an argparse type."""
    path = Path(text)
    if path.suffix.lower() not in (".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png or .pdf, got {text!r}")
    return path


def positive(*, finite: bool = True) -> Callable[[str], float]:
    """Makes an argparse type for positive numbers; `finite` excludes infinity."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not value > 0 or (finite and math.isinf(value)):
            raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
        return value

    return parse
