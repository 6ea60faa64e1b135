"""The benchmarks, one module each, and their shared helpers.

- harness: interleaved timing of functions
- memory: peak memory of a function, and what autograd saves for backward
- roofline: lower bounds of a computation's time
- peers: other implementations of Eq. 1

Every other module is a benchmark with `main(arguments)`, run by a script in scripts/benchmarks/.
"""

from moe_ext.lab.benchmarks.harness import (
    Quartiles,
    clock_of,
    environment,
    interleaved,
    pinned,
    ratio,
)
from moe_ext.lab.benchmarks.memory import (
    keep_freed_memory,
    peak_allocated_mib,
    peak_mib,
    saved_bytes,
)
from moe_ext.lab.benchmarks.roofline import Work, experts_work, gemm_probe, limit, stream_probe

__all__ = [
    "Quartiles",
    "Work",
    "clock_of",
    "environment",
    "experts_work",
    "gemm_probe",
    "interleaved",
    "keep_freed_memory",
    "limit",
    "peak_allocated_mib",
    "peak_mib",
    "pinned",
    "ratio",
    "saved_bytes",
    "stream_probe",
]
