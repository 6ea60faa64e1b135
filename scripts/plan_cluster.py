"""What a language model takes of a cluster: memory, bytes on the wire, step time and efficiency.

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.commands.plan_cluster import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
