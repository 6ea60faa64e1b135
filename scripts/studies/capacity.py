"""Compares models with more and more experts at equal operations (Figs. 2 and 3, Table 7).

Run it with `--help` to see its commands and options.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.capacity import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
