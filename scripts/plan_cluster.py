"""Computes the memory, network traffic, step time and efficiency of a language model on a cluster.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.plan_cluster import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
