"""Computes the memory, network traffic, step time and efficiency of a language model on a cluster.

Run it with `--help` to see its commands and options.
"""

import sys

from moe_ext.lab.commands.plan_cluster import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
