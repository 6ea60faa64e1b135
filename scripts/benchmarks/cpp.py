"""Compares calls from C++ with calls from Python for one token (T = 1), on one thread.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.cpp import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
