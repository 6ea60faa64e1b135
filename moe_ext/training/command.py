"""How the scripts end: for what the user can put right, one sentence instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from moe_ext.training.config import ConfigError


def exit_status(main: Callable[[], object]) -> int:
    """Run a script's ``main``. 0: done; 2: a ConfigError; 1: training diverged; 130: Ctrl-C."""
    try:
        main()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FloatingPointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
