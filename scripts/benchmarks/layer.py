"""Compares the speed of Eq. 1 for given gates with other implementations and hardware limits.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.layer import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
