"""Benchmarks of speed, memory and faults: ``spingrad-lab bench``. Times are ratios within one run."""
