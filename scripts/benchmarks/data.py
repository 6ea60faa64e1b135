"""Speed and memory of the data pipeline on a made-up corpus in the 1-billion-word layout.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.data import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
