"""Compares a MoE with a dense model of equal operations, or two settings, over paired seeds.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.compare import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
