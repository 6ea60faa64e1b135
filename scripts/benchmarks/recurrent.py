"""Compares bounded-memory back-propagation through a MoE-LSTM with plain back-propagation.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.recurrent import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
