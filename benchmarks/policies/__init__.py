"""Traces, peers' policies in C++, and the level model for ``benchmarks.bench_policies``."""
