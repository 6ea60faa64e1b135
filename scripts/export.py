"""Exports a trained language model to an AOTInductor package, which C++ runs without Python.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.export import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
