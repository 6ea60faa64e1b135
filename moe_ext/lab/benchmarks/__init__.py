"""What the benchmarks share: the harness, memory, the machine's limits and the peers."""
