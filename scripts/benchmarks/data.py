"""Measures speed and memory of the data pipeline on a generated corpus.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.data import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
