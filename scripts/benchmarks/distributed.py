"""What sharing the experts between processes costs: bytes, time of the exchange, throughput.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.distributed import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
