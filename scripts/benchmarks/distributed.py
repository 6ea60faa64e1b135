"""Measures the cost of expert parallelism: bytes sent, time of the all-to-all, throughput.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.distributed import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
