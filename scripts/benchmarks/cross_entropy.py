"""Compares the time of `ops.linear_cross_entropy` with the functions of torch and with its limit.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.cross_entropy import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
