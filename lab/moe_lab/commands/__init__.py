"""The commands of moe-lab, one module each: `main` runs a command, its docstring is the help.

A command parses its arguments before it imports torch. ``moe-lab --help`` lists the commands.
"""

__all__: list[str] = []
