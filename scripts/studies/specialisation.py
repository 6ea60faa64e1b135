"""Measures what experts specialise in, and shows the contexts of some experts (Table 9).

Run it with `--help` to see its commands and options.
"""

import sys

from moe_ext.lab.studies.specialisation import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
