"""Compares a MoE with a dense model of equal operations, or any two options, over paired seeds.

Run it with `--help` to see its commands and options.
"""

import sys

from moe_ext.lab.commands.compare import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
