"""Get a corpus ready for training: download, check, unpack, count or take the vocabulary, encode.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.commands.prepare_data import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
