"""A few training steps of a model on random words: time, floating-point operations, memory.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.step import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
