"""Arguments of commands as settings of `add_argument`, for tables of command lines."""

import ast
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Option = dict[str, Any]  # the settings of `add_argument`


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


def help_of(file: Path) -> str:
    """Returns the docstring of a module, which is the help of a command, without its import."""
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
