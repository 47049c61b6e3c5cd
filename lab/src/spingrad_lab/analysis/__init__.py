"""What a projection problem looks like: its energies, samples, spectrum, directions and embedding."""

from spingrad_lab.analysis.directions import same_direction, z_value
from spingrad_lab.analysis.embedding import chain_lengths, find_embedding, logical_graph
from spingrad_lab.analysis.energies import all_energies, all_spins, sampled
from spingrad_lab.analysis.similarity import jaccard
from spingrad_lab.analysis.spectra import annealing_spectrum, ground_degeneracy, spectral_gap

__all__ = [
    "all_energies",
    "all_spins",
    "annealing_spectrum",
    "chain_lengths",
    "find_embedding",
    "ground_degeneracy",
    "jaccard",
    "logical_graph",
    "same_direction",
    "sampled",
    "spectral_gap",
    "z_value",
]
