"""Compares translation models for one and for several language pairs (Table 5, small scale).

Run this script with `--help` to see its arguments.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.multilingual import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
