"""Compares the time of `ops.lstm` with the LSTM of torch and with the limit of its products.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.lstm import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
