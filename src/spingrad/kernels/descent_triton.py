"""The kernels of descent and annealing in Triton: lanes hold units, registers the outputs of their spins.

Spins come first in all matrices, so that neighbouring lanes read neighbouring numbers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton's language has no types.

import triton
import triton.language as tl


@triton.jit
def outputs_of(Z, G, n, step, there, R: tl.constexpr, UNITS: tl.constexpr):
    """The outputs ``Z g`` of spins, shape ``(R, UNITS)``."""
    rows, lanes, U = tl.arange(0, R), tl.arange(0, UNITS), tl.zeros((R, UNITS), tl.float32)
    for i in range(n):
        spins = tl.load(G + i * step + lanes, mask=there, other=0.0)
        U += tl.load(Z + i * R + rows)[:, None] * spins[None, :]
    return U


@triton.jit
def set_spin(z, U, spins, there, field):
    """Set a spin of each unit to the sign of its field; return the outputs, and how many have changed."""
    old = tl.load(spins, mask=there, other=0.0)
    field += tl.sum(z * z, 0) * old - tl.sum(z[:, None] * U, 0)
    new = tl.where(field >= 0, 1.0, -1.0)  # zero counts as +1
    tl.store(spins, new, mask=there)
    changed = tl.sum((there & (new != old)).to(tl.int32), 0)
    return U + z[:, None] * (new - old)[None, :], changed


@triton.jit(do_not_specialize=["n", "m", "sweeps", "started"])  # so that all sizes take one compiled kernel
def descend(Z, H, G, n, m, sweeps, started, R: tl.constexpr, UNITS: tl.constexpr):
    """Set spin after spin of some units, in up to ``sweeps`` sweeps.

    Args:
        Z: Rows of each problem, shape ``(g, n, R)``.
        H: Fields, shape ``(g, n, m)``.
        G: Spins, shape ``(g, n, m)``; zero where none is set.
        n: Spins of a unit.
        m: Units of a problem.
        sweeps: Largest number of sweeps.
        started: Whether a spin is set.
        R: Rows, a power of two.
        UNITS: Units of a program.
    """
    first, problem = tl.program_id(0) * UNITS, tl.program_id(1).to(tl.int64)
    rows, lanes = tl.arange(0, R), tl.arange(0, UNITS)
    there = first + lanes < m
    step = m.to(tl.int64)
    Z += problem * n * R
    H += problem * n * step + first
    G += problem * n * step + first
    U = tl.zeros((R, UNITS), tl.float32)
    if started:
        U = outputs_of(Z, G, n, step, there, R, UNITS)
    sweep, changed = 0, 1
    while (sweep < sweeps) & (changed > 0):
        changed = 0
        for i in range(n):
            field = tl.load(H + i * step + lanes, mask=there, other=0.0)
            U, count = set_spin(tl.load(Z + i * R + rows), U, G + i * step + lanes, there, field)
            changed += count
        sweep += 1


@triton.jit(do_not_specialize=["n", "m", "reads", "sweeps", "descents", "started"])
def anneal(
    Z, H, G, work, temperatures, noise, places, n, m, reads, sweeps, descents, started,
    R: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Sweeps with noise on the fields, then descent, again and again, each time from the best spins so far.

    Args:
        Z: Rows, shape ``(n, R)``.
        H: Fields, shape ``(n, m)``.
        G: Receives the best spins of each unit, shape ``(n, m)``.
        work: Spins of each unit at the start, shape ``(n, m)``; changed.
        temperatures: Factors of the noise, one per sweep of a read.
        noise: Random numbers.
        places: Where sweeps take them, shape ``(m / 32, reads, sweeps)``.
        n: Spins of a unit.
        m: Units.
        reads: Reads.
        sweeps: Sweeps with noise in each read.
        descents: Largest number of sweeps without noise, after each read.
        started: Whether a spin is set.
        R: Rows, a power of two.
        UNITS: Units of a program.
    """
    first = tl.program_id(0) * UNITS
    rows, lanes = tl.arange(0, R), tl.arange(0, UNITS)
    there = first + lanes < m
    step = m.to(tl.int64)
    H += first
    G += first
    work += first
    noise += (first + lanes) % 32
    places += (first // 32).to(tl.int64) * reads * sweeps
    U, lowest = tl.zeros((R, UNITS), tl.float32), tl.full((UNITS,), float("inf"), tl.float32)
    if started:
        U = outputs_of(Z, work, n, step, there, R, UNITS)
        lowest = tl.sum(U * U, 0)
        for i in range(n):
            spins = tl.load(work + i * step + lanes, mask=there, other=0.0)
            lowest -= 2 * tl.load(H + i * step + lanes, mask=there, other=0.0) * spins
    for read in range(reads):
        for sweep in range(sweeps):
            temperature = tl.load(temperatures + sweep)
            place = tl.load(places + read * sweeps + sweep)
            for i in range(n):
                field = tl.load(H + i * step + lanes, mask=there, other=0.0)
                field += temperature * tl.load(noise + place + i * 32, mask=there, other=0.0)
                U, count = set_spin(tl.load(Z + i * R + rows), U, work + i * step + lanes, there, field)
        sweep, changed = 0, 1
        while (sweep < descents) & (changed > 0):
            changed = 0
            for i in range(n):
                field = tl.load(H + i * step + lanes, mask=there, other=0.0)
                U, count = set_spin(tl.load(Z + i * R + rows), U, work + i * step + lanes, there, field)
                changed += count
            sweep += 1
        energy = tl.sum(U * U, 0)
        for i in range(n):
            spins = tl.load(work + i * step + lanes, mask=there, other=0.0)
            energy -= 2 * tl.load(H + i * step + lanes, mask=there, other=0.0) * spins
        lower = energy <= lowest
        lowest = tl.where(lower, energy, lowest)
        for i in range(n):
            found = tl.load(work + i * step + lanes, mask=there, other=0.0)
            best = tl.load(G + i * step + lanes, mask=there, other=0.0)
            tl.store(G + i * step + lanes, tl.where(lower, found, best), mask=there)
            tl.store(work + i * step + lanes, tl.where(lower, found, best), mask=there)
        U = outputs_of(Z, G, n, step, there, R, UNITS)
