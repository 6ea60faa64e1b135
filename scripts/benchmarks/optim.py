"""Compares the speed of factored Adam and of torch's optimizers on a layer of experts.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.optim import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
