"""The command moe-lab, which `python -m moe_lab` runs too."""

import sys
from importlib import import_module
from pathlib import Path

from moe_lab.benchmarks import cases
from moe_lab.cli import exit_status, help_of, print_version
from moe_lab.studies import table

GROUPS = ("", "study", "benchmark")  # of commands


def commands(group: str = "") -> dict[str, Path]:
    """Returns the file of each command of a group; the docstring of the file is its help."""
    if group == "benchmark":
        return {name: cases.file_of(name) for name in cases.CASES}
    if group == "study":
        return {name: table.file_of(name) for name in table.STUDIES}
    files = sorted((Path(__file__).parent / "commands").glob("[!_]*.py"))
    return {file.stem.replace("_", "-"): file for file in files}


def overview(group: str = "") -> str:
    """Returns the help of a group, with the first line of each command's docstring."""
    program = f"moe-lab {group}".strip()
    summaries = {name: help_of(file).partition("\n")[0] for name, file in commands(group).items()}
    if not group:
        summaries["study STUDY"] = "Runs an experiment of the paper."
        summaries["benchmark CASE"] = "Measures the speed of a part of moe_ext."
    width = max(map(len, summaries)) + 2
    lines = [f"  {name:{width}}{summary}" for name, summary in summaries.items()]
    what = "COMMAND" if not group else group.upper()
    usage = f"usage: {program} {what} ..."
    end = f"`{program} {what} --help` shows the arguments of a command."
    return "\n".join([usage, "", *lines, "", end])


def main() -> int:
    """Runs the command that the command line names and returns the exit status."""
    return exit_status(_run)


def _run() -> object:
    program, *words = ["moe-lab", *sys.argv[1:]]
    group = ""
    if words and words[0] in GROUPS:
        group = words.pop(0)
        program += f" {group}"
    if not words or words[0] in ("-h", "--help"):
        print(overview(group))
        return 0
    if words[0] == "--version":
        print_version()
        return 0
    files = commands(group)
    name, *arguments = words
    if name not in files:
        what = group.upper() or "COMMAND"
        print(f"{program}: {what} must be one of {', '.join(files)}, got {name}", file=sys.stderr)
        return 2
    sys.argv = [f"{program} {name}", *arguments]  # the usage line begins with it
    if group == "benchmark":
        return cases.run(name)
    if group == "study":
        return table.run(name)
    return import_module(f"moe_lab.commands.{files[name].stem}").main()


if __name__ == "__main__":
    sys.exit(main())
