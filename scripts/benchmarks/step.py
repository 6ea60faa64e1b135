"""Measures a few training steps of a model on random words: time, operations, memory.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.step import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
