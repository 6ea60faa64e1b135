"""The form that all rules of options share."""


def require(holds: bool, name: str, rule: str, value: object) -> None:
    """Says what is wrong with an option.

    Args:
        holds: whether the rule is kept; if so, nothing happens.
        name: the option, after "<class>: " for a module's argument.
        rule: what it must, such as "be at least 1".
        value: what it is.

    Raises:
        ValueError: "<name> must <rule>, got <value>".
    """
    if not holds:
        raise ValueError(f"{name} must {rule}, got {value!r}")
