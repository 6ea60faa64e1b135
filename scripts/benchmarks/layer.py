"""Times the experts' computation (Eq. 1 for given gates) against other implementations and limits.

Run it with `--help` to see its commands and options.
"""

import sys

from moe_ext.lab.benchmarks.layer import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
