"""A dimod model as a vector and a matrix, without a dictionary in between."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import dimod


def to_dense(
    bqm: "dimod.BinaryQuadraticModel",
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:  # (n,), (n, n)
    """Biases ``h`` and symmetric couplings ``J`` over spins, in the order of the model's variables."""
    import dimod

    vectors = bqm.change_vartype(dimod.SPIN, inplace=False).to_numpy_vectors(list(bqm.variables))
    J = np.zeros((bqm.num_variables, bqm.num_variables))
    row, col = vectors.quadratic.row_indices, vectors.quadratic.col_indices
    J[row, col] = J[col, row] = vectors.quadratic.biases
    return np.asarray(vectors.linear_biases, dtype=np.float64), J
