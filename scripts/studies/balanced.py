"""Trains a model with strictly balanced gates and compares its two kinds of masks (App. F).

Run this script with `--help` to see its arguments.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.balanced import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
