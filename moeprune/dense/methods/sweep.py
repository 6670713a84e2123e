"""The one sweep behind SparseGPT (2301.00774), GPTQ (2210.17323), their joint form and the update after a Wanda mask.

Columns are fixed one by one, and all later columns answer so that the layer's output moves least. The papers walk along
the Cholesky factor U of inv(H); here H = R R' (R upper, so U = inv(R)) and H is never inverted. With d = fixed -
original for the columns before a block, the block's columns answer with

    -d R[before, block] inv(R[block, block]) = -d S[before, block] inv(T),    S_ki = R_ki / R_ii, T = S[block, block]

one product that only reads the earlier columns, and a small triangle. Inside the block a column's error c = fixed -
current moves the later ones by c_j inv(T)_ji, the papers' U_ji / U_jj. A sum of d over earlier columns alone would not
do: it is the answer of a column whose neighbours may not answer, and choices look at several columns at once.
The weight is held transposed, so a column is contiguous.
"""

import math
from dataclasses import dataclass

import torch

from moeprune.dense.methods.codes import IntegerCodes
from moeprune.dense.methods.inputs import InputStatistics
from moeprune.dense.methods.patterns import Choice, Fixed, Groups
from moeprune.dense.methods.result import DenseResult, Quantised

DAMPING_CAP = 1.0  # of the mean diagonal: beyond it the inputs' correlations no longer decide anything
DAMPING_STEP = 10.0


class NotPositiveDefinite(ArithmeticError):
    """The Hessian stayed numerically indefinite up to the damping cap."""


@dataclass(frozen=True)
class Factor:
    """H + damping = R R' with R upper triangular, columns in processing order.

    R_ii^2 is the inverse of the first diagonal entry of inv(H[i:, i:]): what an error in column i costs when all later
    columns may still answer. The textbook sweep needs R's inverse; written on R itself, no matrix is inverted.
    """

    spread: torch.Tensor  # (in, in): R with every column divided by its diagonal; the strict upper part is used
    diagonal: torch.Tensor  # (in,): R_ii
    dead: torch.Tensor  # (in,) bool: inputs that were always zero
    damping: float
    steps: int


def factorise(hessian: torch.Tensor, damping: float, *, order: torch.Tensor | None = None) -> Factor:
    """The factor of H + damping * mean(diag H) * I, damping raised tenfold until it succeeds.

    Dead inputs get a diagonal of 1. Raises NotPositiveDefinite beyond DAMPING_CAP.
    """
    if order is not None:
        hessian = hessian[order][:, order]
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    live_mean = diagonal[~dead].mean() if not bool(dead.all()) else torch.ones((), device=hessian.device)
    reversed_hessian = hessian.flip(0, 1)  # Cholesky of the reversed matrix, reversed back, is the upper factor
    base = torch.where(dead, torch.ones_like(diagonal), diagonal).flip(0)
    steps = 0
    while damping <= DAMPING_CAP * (1 + 1e-9):
        reversed_hessian.diagonal().copy_(base + damping * live_mean)
        lower, info = torch.linalg.cholesky_ex(reversed_hessian)
        if int(info) == 0:
            upper = lower.flip(0, 1)
            root = upper.diagonal().clone()
            return Factor(upper.div_(root), root, dead, damping, steps)
        damping *= DAMPING_STEP
        steps += 1
    raise NotPositiveDefinite(f"not positive definite at damping {damping / DAMPING_STEP:g}")


BLOCK = 128  # columns between two matrix products, and the reach of SparseGPT's threshold, as in the paper
SUB_BLOCK = 16  # columns kept up to date by rank-1 updates


@dataclass(frozen=True)
class Swept:
    """What a sweep leaves, columns back in their own order."""

    weight: torch.Tensor  # (out, in)
    mask: torch.Tensor | None  # (out, in) bool, True where a weight stays; None without a choice
    scale: torch.Tensor | None = None  # (out, groups)
    zero: torch.Tensor | None = None  # (out, groups)


def sweep(
    weight: torch.Tensor,
    factor: Factor,
    *,
    choice: Choice | None = None,
    codes: IntegerCodes | None = None,
    held: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> Swept:
    """The weight (out, in) float32 pruned by `choice` and rounded to `codes` with errors answered along the sweep.

    What the mask `held` (out, in) dropped before stays dropped and counts towards the choice; alone it is the choice.
    `order` (in,) is the processing order the factor was made for; with it the scales are fixed before the sweep on
    groups of the original columns (static act-order), so the stored layout stays plain. Without it each group's scale
    is fitted when the sweep reaches it.
    """
    if held is not None and order is not None:
        held = held[:, order]
    if held is not None and choice is None:
        choice, held = Fixed(held), None
    state = _State(weight, factor, choice, codes, held, order)
    for start in range(0, state.columns, state.block):
        stop = min(start + state.block, state.columns)
        state.open_block(start, stop)
        for first in range(start, stop, state.sub_block):
            state.sub_block_pass(first, min(first + state.sub_block, stop))
        state.close_block()
    return state.result()


class _State:
    """Buffers of one sweep. Everything is (in, out): columns of the weight are contiguous rows here."""

    def __init__(
        self,
        weight: torch.Tensor,
        factor: Factor,
        choice: Choice | None,
        codes: IntegerCodes | None,
        held: torch.Tensor | None,
        order: torch.Tensor | None,
    ) -> None:
        assert weight.dtype == torch.float32, "kernels work in float32"
        self.factor, self.choice, self.codes, self.order = factor, choice, codes, order
        self.columns, self.rows = weight.shape[1], weight.shape[0]
        self.values = (weight if order is None else weight[:, order]).T.contiguous()
        if self.values.data_ptr() == weight.data_ptr():  # a single row or column: .T.contiguous() did not copy
            self.values = self.values.clone()
        self.values[factor.dead] = 0
        self.absent = None if held is None else ~held.T  # (in, out): dropped by an earlier step
        self.changes = torch.empty_like(self.values)  # d = fixed - original, (in, out)
        self.keeps = None if choice is None else torch.empty_like(self.values, dtype=torch.bool)
        self.scales: torch.Tensor | None = None  # (groups, out)
        self.zeros: torch.Tensor | None = None
        self.group_of: list[int] = []
        self.fit_on_the_way = False
        self.block, self.sub_block = self._sizes()
        self._fit_scales_ahead()

    def _sizes(self) -> tuple[int, int]:
        """Block and sub-block width so that no group of the pattern or of the codes straddles a border."""
        units = [1]
        if isinstance(self.choice, Groups):
            units.append(self.choice.unit)
        if self.codes is not None and self.codes.group_size is not None and self.order is None:
            units.append(self.codes.group_size)
        common = math.lcm(*units)
        block = common * -(-BLOCK // common)
        fits = (size for size in range(SUB_BLOCK, block + 1) if block % size == 0)
        sub_block = next(s for s in fits if all(s % unit == 0 or unit % s == 0 for unit in units))
        return block, sub_block

    def _fit_scales_ahead(self) -> None:
        """Scales (groups, out) that do not depend on the sweep: one a row, or static act-order groups."""
        if self.codes is None:
            return
        size = self.codes.group_size or self.columns
        groups = self.columns // size
        columns = torch.arange(self.columns, device=self.values.device) if self.order is None else self.order
        self.group_of = (columns // size).tolist()
        self.fit_on_the_way = self.order is None and groups > 1
        if self.fit_on_the_way:
            self.scales = self.values.new_empty(groups, self.rows)
            self.zeros = None if self.codes.symmetric else torch.empty_like(self.scales)
            return
        original = self.values if self.order is None else self.values[torch.argsort(self.order)]
        self.scales, self.zeros = self.codes.fit(original.view(groups, size, self.rows), dim=1)

    def open_block(self, start: int, stop: int) -> None:
        """`current`: the block's columns as they should be after everything that earlier blocks did."""
        self.start, self.stop = start, stop
        spread = self.factor.spread[:, start:stop]
        eye = torch.eye(stop - start, device=spread.device)
        self.answers_to = torch.linalg.solve_triangular(spread[start:stop], eye, upper=True, unitriangular=True)
        moved = spread[:start].T @ self.changes[:start]
        self.current = torch.addmm(self.values[start:stop], self.answers_to.T, moved, alpha=-1)
        self.errors = torch.empty_like(self.current)  # c = fixed - current
        self.costs = self.factor.diagonal[start:stop]

    def sub_block_pass(self, first: int, last: int) -> None:
        """Fix the columns first..last, then let the rest of the block answer them in one product."""
        for column in range(first, last):
            self._choose(column)
            self._fit(column)
            self._fix(column, last)
        if last < self.stop:
            a, b = first - self.start, last - self.start
            self.current[b:].addmm_(self.answers_to[a:b, b:].T, self.errors[a:b])

    def _choose(self, column: int) -> None:
        if self.choice is None or self.keeps is None:
            return
        unit = self.choice.unit or self.block
        if (column - self.start) % unit == 0:
            pruned = self._pruned(self.choice, column, min(unit, self.stop - column))
            torch.logical_not(pruned, out=self.keeps[column : column + pruned.shape[0]])

    def _pruned(self, choice: Choice, column: int, count: int) -> torch.Tensor:
        """What the choice drops among `count` columns from `column` on, as they are now; (count, out) bool."""
        a = column - self.start
        values, costs = self.current[a : a + count], self.costs[a : a + count]
        if self.absent is None:
            return choice.prune(values, costs, column)
        absent = self.absent[column : column + count]
        return choice.prune(values.masked_fill(absent, 0), costs, column) | absent

    def _fit(self, column: int) -> None:
        """Fit the scale of the group that starts here, on the weights that would stay as things are now."""
        if self.codes is None or not self.fit_on_the_way or column % (self.codes.group_size or 1) != 0:
            return
        assert self.codes.group_size is not None
        assert self.scales is not None
        a, count = column - self.start, self.codes.group_size
        values = self.current[a : a + count]
        if isinstance(self.choice, Groups):
            values = values.masked_fill(self._pruned(self.choice, column, count), 0)
        elif self.keeps is not None:
            values = values * self.keeps[column : column + count]
        group = column // count
        scale, zero = self.codes.fit(values, dim=0)
        self.scales[group] = scale
        if zero is not None and self.zeros is not None:
            self.zeros[group] = zero

    def _fix(self, column: int, last: int) -> None:
        a, b = column - self.start, last - self.start
        target, error = self.current[a], self.errors[a].copy_(self.current[a])
        if self.codes is not None:
            assert self.scales is not None
            group = self.group_of[column]
            self.codes.round_into(target, self.scales[group], None if self.zeros is None else self.zeros[group])
        if self.keeps is not None:
            target.mul_(self.keeps[column])
        torch.sub(target, error, out=error)
        if a + 1 < b:
            self.current[a + 1 : b].addr_(self.answers_to[a, a + 1 : b], error)

    def close_block(self) -> None:
        block = slice(self.start, self.stop)
        torch.sub(self.current, self.values[block], out=self.changes[block])
        self.values[block] = self.current

    def result(self) -> Swept:
        back = slice(None) if self.order is None else torch.argsort(self.order)
        mask = None if self.keeps is None else self.keeps[back].T.contiguous()
        scale = None if self.scales is None else self.scales.T.contiguous()
        zero = None if self.zeros is None else self.zeros.T.contiguous()
        return Swept(self.values[back].T.contiguous(), mask, scale, zero)


def swept_result(
    weight: torch.Tensor,
    statistics: InputStatistics,
    damping: float,
    *,
    choice: Choice | None = None,
    codes: IntegerCodes | None = None,
    held: torch.Tensor | None = None,
    activation_order: bool = False,
) -> DenseResult:
    """`sweep` on the statistics' Hessian; `activation_order` processes the inputs with the largest sums first.

    Raises NotPositiveDefinite when damping reaches its cap.
    """
    factor, order = _factor(statistics, damping, activation_order)
    swept = sweep(weight, factor, choice=choice, codes=codes, held=held, order=order)
    quantised = None
    if codes is not None and swept.scale is not None:
        quantised = Quantised("int", codes.bits, codes.group_size, codes.symmetric, swept.scale, swept.zero)
    raised = f"{statistics.layer}: damping raised {factor.steps} times, from {damping:g} to {factor.damping:g}"
    return DenseResult(
        swept.weight,
        swept.mask,
        quantised,
        damping=factor.damping,
        damping_steps=factor.steps,
        dead_columns=int(factor.dead.sum()),
        warnings=[raised] if factor.steps else [],
    )


def _factor(statistics: InputStatistics, damping: float, activation_order: bool) -> tuple[Factor, torch.Tensor | None]:
    """The factor and its order, kept with the statistics: query, key and value, or gate and up, share their inputs."""
    key = (damping, activation_order)
    if key not in statistics.factors:
        hessian = statistics.hessian
        assert hessian is not None, "this method needs the Hessian"
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True) if activation_order else None
        statistics.factors[key] = (factorise(hessian, damping, order=order), order)
    return statistics.factors[key]
