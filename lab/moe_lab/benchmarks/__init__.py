"""The benchmarks: a table of cases, the harness that runs them, and a module for each case.

- cases: the cases and their command lines, which ``moe-lab benchmark`` parses without torch
- harness: threads, interleaved rounds, clocks, the printed table and its JSON file
- memory: peak memory of a function, and what autograd saves for backward
- roofline: lower bounds of a computation's time
- shapes, peers, measurement, tables: the benchmarks of experts against other implementations

A new benchmark is a row of `cases.CASES` and a module. Its docstring is the help; `harness.run`
lists its other parts.
"""

__all__: list[str] = []
