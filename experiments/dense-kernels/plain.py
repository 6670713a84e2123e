"""The papers' kernels written the direct way: (out, in) layout, explicit inverse, sort, one outer product a column."""

import torch


def upper_factor(hessian, damping=0.01):
    """U upper with inv(H + damping) = U' U."""
    hessian = hessian.clone()
    hessian.diagonal().add_(damping * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    return torch.linalg.cholesky(inverse, upper=True)


def wanda(weight, norms, *, sparsity=0.5, group=None):
    scores = weight.abs() * norms
    if group is None:
        order = torch.sort(scores, dim=1, stable=True).indices[:, : int(sparsity * weight.shape[1])]
        return weight.scatter(1, order, 0.0)
    grouped = scores.unflatten(1, (-1, group))
    order = torch.topk(grouped, group // 2, dim=2, largest=False).indices
    return weight.unflatten(1, (-1, group)).scatter(2, order, 0.0).flatten(1)


def sweep(weight, hessian, *, sparsity=None, group=None, round_column=None, block=128):
    """SparseGPT (sparsity, or half of each group) or GPTQ (round_column(column, values) -> rounded)."""
    weight = weight.clone()
    factor = upper_factor(hessian)
    for start in range(0, weight.shape[1], block):
        stop = min(start + block, weight.shape[1])
        work = weight[:, start:stop].clone()
        small = factor[start:stop, start:stop]
        errors = torch.zeros_like(work)
        drop = torch.zeros_like(work, dtype=torch.bool)
        if sparsity is not None:
            scores = (work / small.diagonal()).square()
            drop = scores <= torch.sort(scores.flatten()).values[int(sparsity * scores.numel()) - 1]
        for column in range(stop - start):
            if group is not None and column % group == 0:
                scores = (work[:, column : column + group] / small.diagonal()[column : column + group]).square()
                places = column + torch.topk(scores, group // 2, dim=1, largest=False).indices
                drop.scatter_(1, places, True)
            current = work[:, column]
            fixed = current.masked_fill(drop[:, column], 0)
            if round_column is not None:
                fixed = round_column(start + column, fixed)
            error = (current - fixed) / small[column, column]
            work[:, column:] -= error[:, None] * small[column, column:]
            work[:, column] = fixed
            errors[:, column] = error
        weight[:, start:stop] = work
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return weight


def gptq(weight, hessian, *, bits=4, group=128):
    """GPTQ with symmetric scales of the original weights' groups."""
    high = 2 ** (bits - 1) - 1
    scale = weight.unflatten(1, (-1, group)).abs().amax(2) * 2 / (2**bits - 1)

    def round_column(column, values):
        unit = scale[:, column // group]
        return (values / unit).round().clamp(-high - 1, high) * unit

    return sweep(weight, hessian, round_column=round_column)
