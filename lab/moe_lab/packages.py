"""Import of the optional package transformers."""

import importlib
from types import ModuleType

from moe_lab.errors import ConfigError

__all__ = ["require_transformers"]


class _MissingPackage(ConfigError, ImportError):
    pass


def require_transformers(owner: str, module: str) -> ModuleType:
    """Imports a module that needs transformers.

    Raises:
        ConfigError: the module cannot be imported; the error is an ImportError too.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        rule = "transformers must be installed (pip install 'transformers>=5.23')"
        raise _MissingPackage(f"{owner}: {rule}, got: {error}") from error
