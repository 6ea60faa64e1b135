"""Measures what recomputing the experts' hidden layers saves in memory and costs in time.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.recompute import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
