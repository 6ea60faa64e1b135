"""Prepares a corpus for training: downloads, verifies, unpacks and encodes it.

Run it with `--help` to see its commands and options.
"""

import sys

from moe_ext.lab.commands.prepare_data import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
