"""Compares the two ways in which ranks share the experts of a MoE-LSTM.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.recurrent_exchange import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
