"""Counts the cost of a model, and measures the specialisation of its experts."""

__all__: list[str] = []
