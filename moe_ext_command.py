"""The command moe-ext. It is not part of moe_ext, because the import of moe_ext takes seconds."""

import ast
import sys
from importlib import import_module
from pathlib import Path

_ROOT = Path(__file__).parent


def commands() -> dict[str, Path]:
    """Returns the file of each command: its function `main` runs it, its docstring is the help."""
    files = [*_ROOT.glob("moe_ext/lab/commands/[!_]*.py"), _ROOT / "moe_ext" / "info.py"]
    return {file.stem.replace("_", "-"): file for file in sorted(files, key=lambda file: file.stem)}


def overview() -> str:
    """Returns the help of moe-ext, with the first line of each command's docstring."""
    lines = ["usage: moe-ext COMMAND ...", ""]
    for name, file in commands().items():
        summary = (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]
        lines.append(f"  {name:17}{summary}")
    return "\n".join([*lines, "", "`moe-ext COMMAND --help` shows the arguments of a command."])


def main() -> int:
    """Runs the command that the command line names and returns the exit status."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(overview())
        return 0
    files = commands()
    if name not in files:
        print(f"moe-ext: COMMAND must be one of {', '.join(files)}, got {name}", file=sys.stderr)
        return 2
    sys.argv[:2] = [f"moe-ext {name}"]  # the usage line begins with it
    module = ".".join(files[name].relative_to(_ROOT).with_suffix("").parts)
    from moe_ext.lab.training.command import exit_status

    return exit_status(import_module(module).main)
