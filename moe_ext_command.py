"""The command moe-ext. It is not part of moe_ext, because the import of moe_ext takes seconds."""

import sys

_HELP = """\
usage: moe-ext info [--cmake-prefix]

  info  Prints the build configuration and runs a self-test.

The package moe_lab has the commands that train, evaluate and translate: `moe-lab --help`."""
_MOVED = {
    *("compare", "evaluate", "export", "inspect-experts", "plan-cluster", "prepare-data"),
    *("quickstart", "train", "translate"),
}


def main() -> int:
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
    if name != "info":
        print(f"moe-ext: COMMAND must be info, got {name}", file=sys.stderr)
        return 2
    sys.argv[:2] = ["moe-ext info"]  # the usage line begins with it
    from moe_ext.info import main as info

    return info()
