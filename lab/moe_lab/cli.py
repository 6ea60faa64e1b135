"""Options, parsers and exit statuses of the commands, without the import of torch."""

import argparse
import ast
import math
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from moe_ext_command import with_streams
from moe_lab.errors import ConfigError

SEED_LIMIT = 2**62  # torch's generators take 64-bit seeds
THREAD_LIMIT = 2**12  # of num_threads; more would end the process instead of an error
CONFIG = "a TOML file, or a name such as small/moe-32"  # the help of the argument `config`
DEFAULT_SEEDS = [1, 2, 3]  # of comparisons and studies
Option = dict[str, Any]  # the settings of `add_argument`
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
        return _refused(str(error))
    except UnicodeEncodeError as error:
        return _refused(f"a text or path must be {error.encoding}, got {error.object!r}")
    except BrokenPipeError:
        raise  # `with_streams` ends the command
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _refused(f"{place}{error.strerror or error}")
    except FloatingPointError as error:
        return _refused(str(error), status=1)
    except RuntimeError as error:
        layer = sys.modules.get("moe_ext.distributed")  # imported only by commands that need it
        if layer is None or not isinstance(error, layer.CheckpointError):
            raise
        return _refused(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def _refused(text: str, status: int = 2) -> int:
    """Prints an error message in one line; the text may contain parts of a corrupted file."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if len(shown) > _LONGEST_ERROR:
        shown = f"{shown[: _LONGEST_ERROR // 2]} ... {shown[-_LONGEST_ERROR // 2 :]}"
    print(f"error: {shown}", file=sys.stderr)
    return status


def print_version() -> None:
    """Prints the version of the package."""
    from importlib.metadata import version  # only one option needs it

    print(f"moe_lab {version('moe_lab')}")


class _Version(argparse.Action):
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


def one(parse: Callable[[str], Any], default: Any, help: str) -> Option:
    return {"type": parse, "default": default, "help": help}


def several(parse: Callable[[str], Any], default: Any, help: str) -> Option:
    return one(parse, default, help) | {"nargs": "+"}


def some_of(
    choices: Sequence[str], default: Sequence[str], help: str, metavar: str | None = None
) -> Option:
    return several(str, [*default], help) | {"choices": choices, "metavar": metavar}


def flag(help: str) -> Option:
    return {"action": "store_true", "help": help}


# Options of several commands.
RUN_FOLDER: dict[str, Option] = {"run": {"help": "the folder of a training run"}}
OVERRIDES: dict[str, Option] = {
    "overrides": {
        "nargs": "*",
        "default": [],  # without it, argparse says that overrides are required
        "metavar": "key=value",
        "help": "options of the configuration to override",
    }
}
SEEDS = {"--seeds": several(at_least(0, SEED_LIMIT), DEFAULT_SEEDS, "seeds of the runs")}
THREADS = {"--threads": one(at_least(0, THREAD_LIMIT), 0, "number of threads; 0 is torch's number")}
DEVICE = THREADS | {"--device": one(str, "cpu", "cpu, cuda or cuda:N")}
REPORT = {"--report": flag("write the page of the stored runs, and run nothing")}


def parse(
    help: str | None,
    options: Mapping[str, Option],
    arguments: Sequence[str] | None = None,
    *,
    epilog: str | None = None,
    alone: Collection[str] = (),
    **defaults: Any,
) -> Any:
    """Parses the arguments of a command, by default those of the command line.

    `help` is the docstring of the command, and `options` has the settings of each argument. A user
    may give only one of the options in `alone`. `defaults` are other defaults of options.
    """
    parser = _Parser(description=help, epilog=epilog, formatter_class=_Formatter)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    group = parser.add_mutually_exclusive_group() if alone else parser
    for name, settings in options.items():
        (group if name in alone else parser).add_argument(name, **settings)
    parser.set_defaults(**defaults)
    return parser.parse_intermixed_args(arguments)


def _file_of(package: str, name: str) -> Path:
    """Returns the file of a command, from its package in moe_lab: commands, studies, benchmarks."""
    return Path(__file__).parent / package / f"{name.replace('-', '_')}.py"


def help_of(package: str, name: str) -> str:
    """Returns the docstring of a command's module, which is its help, without its import."""
    return ast.get_docstring(ast.parse(_file_of(package, name).read_text("utf-8"))) or ""


def module_of(package: str, name: str) -> Any:
    """Imports the module of a command."""
    return import_module(f"moe_lab.{package}.{_file_of(package, name).stem}")


def require_checkpoint(run: str | Path) -> None:
    """Checks that the folder of a run has checkpoints."""
    if not any(Path(run, "checkpoints").glob("*")):
        raise ConfigError(
            f"there is no checkpoint in {run}; train first, or give the folder of a run"
        )
