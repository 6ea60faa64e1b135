"""Compares the time of a training step with the sampled softmax and with the full softmax.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.softmax import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
