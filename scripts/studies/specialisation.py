"""What experts specialise in, in contexts and in numbers (Table 9 of the paper).

`--help` shows the commands and the options.
"""

import sys

from moe_ext.lab.studies.specialisation import main
from moe_ext.lab.training import exit_status

if __name__ == "__main__":
    sys.exit(exit_status(main))
