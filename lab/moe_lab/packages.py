"""Import of optional packages."""

import importlib
from types import ModuleType

__all__ = ["require_package"]


def require_package(owner: str, module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        owner: name of the function or option that needs the package, shown in the error message.
        module: full module name; its first part is the package.
        extra: the extra in pyproject.toml that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{owner}: {package} must be installed (pip install 'moe_lab[{extra}]'), got: {error}"
        ) from error
