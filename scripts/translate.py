"""Translates text with one sentence per line, using a trained model.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.translate import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
