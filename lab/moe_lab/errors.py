"""The error of the lab's commands that a user can mend."""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigError(ValueError):
    """Raised if a configuration, corpus or run folder is invalid; the message says what to do."""


@contextmanager
def config_errors(
    before: str = "",
    after: str = "",
    kinds: type[Exception] | tuple[type[Exception], ...] = ValueError,
) -> Iterator[None]:
    """Makes a ConfigError of an error of these kinds; before and after surround its message."""
    try:
        yield
    except ConfigError:
        raise
    except kinds as error:
        raise ConfigError(f"{before}{error}{after}") from error
