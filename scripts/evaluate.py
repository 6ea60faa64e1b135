"""Measures the perplexity of a trained model, and the BLEU of its translations.

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.evaluate import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
