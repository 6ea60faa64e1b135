"""Compares the training step of a small transformer with the same model in plain torch.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.training_step import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
