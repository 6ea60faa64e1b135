"""Prepares a corpus for training: downloads, verifies, unpacks and encodes it.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.prepare_data import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
