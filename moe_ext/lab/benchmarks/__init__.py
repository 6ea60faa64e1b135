"""What the benchmarks share, and one module for each benchmark.

harness       functions timed side by side
memory        what a function takes at its peak, and what autograd saves
roofline      the machine's limits
peers         Eq. 1 as other implementations compute it
all others    a benchmark each, with `main(arguments)`: see scripts/benchmarks/
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
