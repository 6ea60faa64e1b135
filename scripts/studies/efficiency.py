"""What sparsity costs in speed (Section 5.1's TFLOPS, in small).

`--help` shows the commands and the options.
"""

import sys
from pathlib import Path

from moe_ext.lab.studies.efficiency import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.exit(exit_status(lambda: main(root=root)))
