"""What recomputing the experts' hidden layers saves, and what it costs.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.recompute import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
