"""The interaction matrix F of HOPE: what pruning two experts together costs (arXiv:2609.18916)."""

from typing import Literal

import numpy as np

from moeprune.artifacts.statistics import LayerStatistics

Product = Literal["norms", "outputs"]
Normalise = Literal["co_selected", "all_tokens"]


def interaction(
    statistics: LayerStatistics,
    *,
    product: Product,
    normalise: Normalise,
    pairwise: bool = True,
    shrinkage: float = 0.0,
) -> np.ndarray:
    """Pairwise cost of pruning two experts together, F (experts, experts), float64, symmetric.

    F_ij = sum over tokens that select both of g_i n_i g_j n_j (product="norms", >= 0) or of <g_i f_i, g_j f_j>
    (product="outputs"), divided by the number of those tokens (normalise="co_selected": Eq. 3 of arXiv:2609.18916;
    indefinite as a rule) or of all counted tokens ("all_tokens": a Gram matrix, positive semidefinite). Pairs that
    never fired together are 0. pairwise=False keeps the diagonal alone.

    `shrinkage` is a number of tokens: for "norms" over "co_selected" every off-diagonal mean is drawn towards
    mean(g_i n_i) mean(g_j n_j) as if that many tokens had shown it; the diagonal stays.
    Re-routing after pruning is not modelled. Raises ValueError when the layer saw no token.
    """
    tokens = float(statistics.tokens)
    if not tokens > 0:
        raise ValueError("no counted token")
    sums = np.asarray(statistics.norm_product if product == "norms" else statistics.output_product, dtype=np.float64)
    pairs = np.asarray(statistics.co_count, dtype=np.float64)
    if normalise == "all_tokens":
        matrix = sums / tokens
    elif shrinkage > 0 and product == "norms":
        matrix = _shrunk(sums, pairs, np.asarray(statistics.gated_norm_sum, dtype=np.float64), shrinkage)
    else:
        matrix = np.divide(sums, pairs, out=np.zeros_like(sums), where=pairs > 0)
    matrix = (matrix + matrix.T) / 2
    return matrix if pairwise else np.diag(np.diagonal(matrix))


def _shrunk(sums: np.ndarray, pairs: np.ndarray, gated_norm_sum: np.ndarray, shrinkage: float) -> np.ndarray:
    """(sum + k m_i m_j) / (count + k) off the diagonal, m = mean gated norm of an expert, 0 where it never fired."""
    count = np.diagonal(pairs)
    mean = np.divide(gated_norm_sum, count, out=np.zeros_like(gated_norm_sum), where=count > 0)
    matrix = (sums + shrinkage * np.outer(mean, mean)) / (pairs + shrinkage)
    own = np.divide(np.diagonal(sums), count, out=np.zeros_like(mean), where=count > 0)
    np.fill_diagonal(matrix, own)
    return matrix
