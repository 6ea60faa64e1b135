"""Times a training step of the softmax, sampled and full, side by side.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.softmax import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
