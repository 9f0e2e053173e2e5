"""Benchmarks: workloads, the plain loops and rival frameworks that they are timed against, and the timing itself."""
