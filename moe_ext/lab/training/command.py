"""How scripts begin and end: with a parser, and with a sentence for what the user can put right."""

import argparse
import os
import sys
from collections.abc import Callable

from moe_ext.distributed import CheckpointError
from moe_ext.lab.training.config import ConfigError


def exit_status(main: Callable[[], object]) -> int:
    """Run a script's `main` and say how it ended.

    Returns:
        What `main` does, if that is a number; else
        0: done. `scripts/train.py` is also done when Ctrl-C or SIGTERM came while it trained: it
            has saved and says how to go on.
        1: training diverged (FloatingPointError).
        2: a ConfigError, CheckpointError or OSError, whose sentence is on stderr; argparse ends
            with 2 as well.
        130: Ctrl-C, or SIGTERM during training. `scripts/compare.py` and `scripts/quickstart.py`
            end so in training too, because their report is not there: what was trained is saved,
            and the same command goes on from it.
        141: whoever read stdout has seen enough (`| head`).
    """
    try:
        result = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return result if isinstance(result, int) else 0


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Whose help shows the docstring of a script as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The options of a configuration that are to be changed; `parse_intermixed_args` reads them."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="options to change")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """How many threads `set_up_torch` is to give torch, of scripts without a configuration."""
    parser.add_argument(
        "--threads", type=at_least(0), default=0, help="torch's threads (0: its default)"
    )


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: a whole number that is not below `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got {text!r}"
            )
        return value

    return parse
