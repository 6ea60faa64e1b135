"""Import of optional packages."""

import importlib
from types import ModuleType

__all__ = ["require_package"]


def require_package(owner: str, module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{owner}: {package} must be installed (pip install 'moe_lab[{extra}]'), got: {error}"
        ) from error
