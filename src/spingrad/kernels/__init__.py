"""Inner loops over single spins and bits, compiled by numba where it is installed."""
