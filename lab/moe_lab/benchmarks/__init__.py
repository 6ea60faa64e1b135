"""The benchmarks, one module each, and their shared helpers.

- harness: interleaved timing of functions
- memory: peak memory of a function, and what autograd saves for backward
- roofline: lower bounds of a computation's time
- peers: other implementations of Eq. 1

Every other module is a benchmark with `main(arguments)`, which ``moe-lab benchmark`` runs.
"""

__all__: list[str] = []
