"""Compares the experts of transformers' models on moe_ext with transformers' implementations.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.transformers_experts import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
