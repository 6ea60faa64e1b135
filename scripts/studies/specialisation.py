"""Measures what experts specialise in, and shows the contexts of some experts (Table 9).

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.studies.specialisation import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
