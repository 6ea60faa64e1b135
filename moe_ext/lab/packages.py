"""Packages that only some uses of the laboratory need."""

import importlib
from types import ModuleType

__all__ = ["require_package"]


def require_package(owner: str, module: str, extra: str) -> ModuleType:
    """Imports a module of an optional package.

    Args:
        owner: what needs it.
        module: by its whole name, which begins with the package's.
        extra: that of pyproject.toml which installs the package.

    Raises:
        ImportError: "<owner>: <package> must be installed (pip install ...), got: <why>".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{owner}: {package} must be installed (pip install 'moe_ext[{extra}]'), got: {error}"
        ) from error
