"""The error of the lab's commands that a user can mend."""


class ConfigError(ValueError):
    """Raised if a configuration, corpus or run folder is invalid; the message says what to do."""
