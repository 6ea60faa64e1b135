"""Compares models with 4 to 256 experts on text of many kinds, at equal operations (Figs. 2 and 3).

Run this script with `--help` to see its arguments.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.mixed_text import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
