"""Measures whole MoE layers on few tokens: the steps of a decoder.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.few_tokens import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
