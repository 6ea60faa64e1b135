"""Translates text, a sentence a line, with a trained model.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.commands.translate import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
