"""The command moe-lab, which `python -m moe_lab` runs too."""

import sys
from pathlib import Path

from moe_lab.benchmarks import cases
from moe_lab.cli import exit_status, help_of, module_of, print_version
from moe_lab.studies import entries

GROUPS = {"": "commands", "study": "studies", "benchmark": "benchmarks"}  # with their packages


def commands(group: str = "") -> list[str]:
    """Returns the names of the commands of a group."""
    if group:
        return list(cases.CASES if group == "benchmark" else entries.STUDIES)
    files = sorted((Path(__file__).parent / "commands").glob("[!_]*.py"))
    return [file.stem.replace("_", "-") for file in files]


def overview(group: str = "") -> str:
    """Returns the help of a group, with the first line of each command's docstring."""
    program = f"moe-lab {group}".strip()
    helps = {name: help_of(GROUPS[group], name) for name in commands(group)}
    summaries = {name: help.partition("\n")[0] for name, help in helps.items()}
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
    names = commands(group)
    name, *arguments = words
    if name not in names:
        what = group.upper() or "COMMAND"
        print(f"{program}: {what} must be one of {', '.join(names)}, got {name}", file=sys.stderr)
        return 2
    sys.argv = [f"{program} {name}", *arguments]  # the usage line begins with it
    if group == "benchmark":
        return cases.run(name)
    if group == "study":
        return entries.run(name)
    return module_of("commands", name).main()


if __name__ == "__main__":
    sys.exit(main())
