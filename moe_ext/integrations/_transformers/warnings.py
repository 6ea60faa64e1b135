"""Warnings that come once."""

import warnings

import torch

__all__ = ["warn_once"]

_messages: set[str] = set()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def warn_once(message: str) -> None:
    """Warns unless the same warning came before."""
    if message not in _messages:
        _messages.add(message)
        warnings.warn(message, stacklevel=2)
