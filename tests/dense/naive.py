"""The papers' formulas as slow loops in float64: what the kernels are measured against."""

import torch


def upper_inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """U upper with inv(H + damping mean(diag H) I) = U' U, dead inputs set to 1; 2301.00774, section 3."""
    hessian = hessian.double().clone()
    dead = hessian.diagonal() == 0
    mean = hessian.diagonal()[~dead].mean()
    hessian[dead, dead] = 1
    hessian += damping * mean * torch.eye(len(hessian), dtype=torch.float64)
    return torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)


def integer_scale(values: torch.Tensor, bits: int, symmetric: bool) -> tuple[float, float]:
    """(scale, zero) of one group of values."""
    levels = 2**bits - 1
    if symmetric:
        return float(values.abs().max() * 2 / levels) or 1.0, 0.0
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    scale = (high - low) / levels or 1.0
    return scale, round(-(2 ** (bits - 1)) - low / scale)


def to_integer(value: float, scale: float, zero: float, bits: int) -> float:
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return (min(max(round(value / scale + zero), low), high) - zero) * scale


def drop_smallest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """True where a score stays: the `count` smallest of all of them go, ties by position."""
    keep = torch.ones(scores.numel(), dtype=torch.bool)
    keep[torch.argsort(scores.flatten(), stable=True)[:count]] = False
    return keep.view_as(scores)


def drop_by_group(scores: torch.Tensor, pattern: tuple[int, int]) -> torch.Tensor:
    """True where a score (rows, columns) stays: in every run of M columns of a row the N largest."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    kept, group = pattern
    for row in range(scores.shape[0]):
        for start in range(0, scores.shape[1], group):
            keep[row, start : start + group] = drop_smallest(scores[row, start : start + group], group - kept)
    return keep


def sweep(weight, hessian, damping, *, sparsity=None, pattern=None, mask=None, bits=None, group=None, symmetric=True):
    """One column after the other, errors spread with rows of U; the mask by block of 128, by N:M group, or given.

    `group` is the number of columns that share a scale, fitted when the sweep arrives there on the values that would
    stay by then. Returns weight and mask, True where a weight stays.
    """
    work = weight.double().clone()
    rows, columns = work.shape
    factor = upper_inverse_factor(hessian, damping)
    work[:, hessian.diagonal() == 0] = 0
    keep = torch.ones_like(work, dtype=torch.bool) if mask is None else mask.clone()
    scales: list[tuple[float, float]] = []

    def scores(start: int, stop: int) -> torch.Tensor:
        return work[:, start:stop] ** 2 / factor.diagonal()[start:stop] ** 2

    for column in range(columns):
        if sparsity is not None and column % 128 == 0:
            stop = min(column + 128, columns)
            count = int(sparsity * stop * rows + 1e-6) - int(sparsity * column * rows + 1e-6)
            keep[:, column:stop] = drop_smallest(scores(column, stop).T, count).T  # ties column by column
        if pattern is not None and column % pattern[1] == 0:
            stop = column + pattern[1]
            keep[:, column:stop] = drop_by_group(scores(column, stop), pattern)
        if bits is not None and column % group == 0:
            stop = column + group
            would_stay = keep[:, column:stop] if pattern is None else drop_by_group(scores(column, stop), pattern)
            values = work[:, column:stop] * would_stay
            scales = [integer_scale(values[row], bits, symmetric) for row in range(rows)]
        fixed = work[:, column].clone()
        if bits is not None:
            for row, (scale, zero) in enumerate(scales):
                fixed[row] = to_integer(float(fixed[row]), scale, zero, bits)
        fixed *= keep[:, column]
        error = (work[:, column] - fixed) / factor[column, column]
        work[:, column:] -= error[:, None] * factor[column, column:][None]
        work[:, column] = fixed
    return work, keep


def output_error(weight, other, hessian) -> float:
    """||W X - W' X||^2 / ||W X||^2."""
    weight, other, hessian = weight.double(), other.double(), hessian.double()
    change = weight - other
    return float(torch.trace(change @ hessian @ change.T) / torch.trace(weight @ hessian @ weight.T))
