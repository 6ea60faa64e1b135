"""The commands of moe-lab, one module each: `main` runs a command, its docstring is the help.

A command parses its arguments before it imports torch. If its own work needs torch and is long, the
work is in the module of the same name with an underscore: `_train` has what only ``moe-lab train``
prints. The other packages know no command. ``moe-lab --help`` lists the commands.
"""

__all__: list[str] = []
