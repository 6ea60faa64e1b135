"""Compares the speed of translation in batches and of one sentence at a time.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.translation import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
