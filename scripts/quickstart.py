"""Trains a small MoE language model and its dense counterpart, and compares them.

Run this script with `--help` to see its arguments.
"""

import sys
from pathlib import Path

from moe_ext.lab.commands.quickstart import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.exit(exit_status(lambda: main(root=root)))
