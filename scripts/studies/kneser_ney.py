"""Fits the n-gram baseline of App. C.1, an interpolated Kneser-Ney model, to a run's corpus.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.studies.kneser_ney import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
