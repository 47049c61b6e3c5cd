"""The GPU kernels in Triton's interpreter beside torch: ``python tests/interpreted.py COUNT [SPINS UNITS]``.

Prints the number of spins that differ, and of how many: for descent with whole numbers, which have many ties,
for descent with sums that are rounded, and for annealing.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from test_operators import descended, noise_for, random_numbers, sizes, whole_numbers

from spingrad.kernels import gpu, plain


def descent(count: int, spins: int, units: int, rounded: bool) -> tuple[int, int]:
    different = total = 0
    for seed, (r, n, m) in enumerate(sizes(count, spins, units)):
        if seed % 2 != rounded:
            continue
        made = random_numbers if rounded else whole_numbers
        started, groups = bool(seed & 2), () if seed % 10 else (2,)
        numbers = made(r, n, m, seed, groups, started)
        found, expected = (descended(module, *numbers, 2, started) for module in (gpu, plain))
        different, total = different + int((found != expected).sum()), total + found.numel()
    return different, total


def annealing(count: int, spins: int, units: int) -> tuple[int, int]:
    different = total = 0
    for seed, (r, n, m) in enumerate(sizes(count, spins, units)):
        Z, H, G = whole_numbers(r, n, m, seed, start=True)
        G = torch.where(G >= 0, 1.0, -1.0)
        found, expected = G.clone(), G.clone()
        for module, own in ((gpu, found), (plain, expected)):
            module.anneal_(Z, H, own, [2.0, 1.0], *noise_for(H, 2, 2, seed), bool(seed % 2))
        different, total = different + int((found != expected).sum()), total + found.numel()
    return different, total


if __name__ == "__main__":
    count, spins, units = map(int, [*sys.argv[1:], "64", "64"][:3])
    print("whole", *descent(count, spins, units, rounded=False))
    print("rounded", *descent(count, spins, units, rounded=True))
    print("annealing", *annealing(count // 10, spins, units))
