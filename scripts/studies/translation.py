"""Compares translation models with and without experts, at small scale (Fig. 4, Tables 2 to 4).

Run this script with `--help` to see its arguments.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.translation import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
