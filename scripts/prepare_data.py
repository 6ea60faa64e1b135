"""Prepare a corpus for training: download, verify, unpack, make a vocabulary, encode.

Run it with `--help` to see its commands and options.
"""

import sys

from moe_ext.lab.commands.prepare_data import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
