"""Measures how many bits of facts a layer stores with its parameters, at equal operations (Sec. 1).

Run this script with `--help` to see its arguments.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.facts import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
