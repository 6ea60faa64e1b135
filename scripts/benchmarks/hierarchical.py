"""Compares the speed of a hierarchical mixture of 131,072 experts with mixtures of 1,024 experts.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.benchmarks.hierarchical import main
from moe_ext.lab.benchmarks.memory import keep_freed_memory
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(exit_status(main))
