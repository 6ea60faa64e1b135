"""Times the routing operators against the same mathematics in plain torch, side by side.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.ops import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
