"""When a matrix is worth compressing, and to what rank: pure integer functions.

The rule is Optimus-CC's and PowerSGD's: an (n, m) matrix travels as two factors of r columns, so r*(n+m)
values instead of n*m (PyTorch's `powerSGD_hook.py` asks the same question in `_should_compress`).
"""

__all__ = ["effective_rank", "packed_numel", "pays"]


def effective_rank(n: int, m: int, compression_rank: int) -> int:
    """The rank that an (n, m) matrix is really compressed to: min(n, m, compression_rank).

    More columns than min(n, m) carry nothing, and the orthogonalisation needs rows >= columns.

    Raises:
        ValueError: if a dimension or the compression rank is not positive.
    """
    if n < 1 or m < 1:
        raise ValueError(f"a matrix to compress needs rows and columns, got {n} x {m}")
    if compression_rank < 1:
        raise ValueError(f"compression rank must be at least 1, got {compression_rank}")
    return min(n, m, compression_rank)


def packed_numel(n: int, m: int, r: int) -> int:
    """Values in the two factors P (n, r) and Q (m, r) together."""
    return r * (n + m)


def pays(n: int, m: int, compression_rank: int) -> bool:
    """Whether the factors are smaller than the (n, m) matrix; where nothing is saved, it is sent as it is."""
    return packed_numel(n, m, effective_rank(n, m, compression_rank)) < n * m
