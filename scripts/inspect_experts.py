"""Shows what the experts of a trained model specialise in (Table 9 of the paper).

Run this script with `--help` to see its arguments.
"""

import sys

from moe_ext.lab.commands.inspect_experts import main
from moe_ext.lab.training.command import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
