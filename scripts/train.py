"""Trains a language model or a translation model.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.train import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
