"""Experiments: runs of several configurations and seeds, their results, intervals and pages."""

__all__: list[str] = []
