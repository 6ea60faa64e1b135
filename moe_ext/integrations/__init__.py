"""Other libraries' models on moe_ext's operators; each module needs the library of its name."""

__all__: list[str] = []
