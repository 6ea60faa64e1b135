"""Sentences a second of translating a text, against one sentence after the other.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.benchmarks.translation import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
