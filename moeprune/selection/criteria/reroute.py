"""The criterion `reroute`: prune what changes the block's output least, re-routing included, on a token sample.

    sum over tokens t of w_t || sum_e g'_e(t) f_e(t) - sum_e g_e(t) f_e(t) ||^2

with g the gates of the whole router, g' those of a router that has the kept experts only (artifacts.routing), w_t the
counted tokens that t stands for. Nothing is assumed. Not covered are a norm of the sum, where a block has one, and the
effect of the error on the layers above.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.routing import affinities, choices, gate_factor, routed
from moeprune.artifacts.sample import TokenSample
from moeprune.artifacts.statistics import Layer
from moeprune.selection.criteria.criterion import Criterion, LayerEvidence

BLOCK = 2**22  # numbers a gather holds at a time
REMEMBERED = 4096  # sets whose marginal costs are kept: a search needs the same ones many times
CANCELLED = 1e-6  # an exchange that leaves less than this share of the affinities is summed anew


@dataclass(frozen=True)
class RoutedBlock:
    """The output of the sampled tokens for one set of experts, before the factor that makes gates of affinities."""

    ids: np.ndarray  # (tokens, top_k)
    filled: np.ndarray  # (tokens, top_k) bool: False where there was nothing left to choose
    chosen: np.ndarray  # (tokens,) sum of the chosen experts' affinities
    kept: np.ndarray  # (tokens,) sum of the kept experts' affinities
    summed: np.ndarray  # (tokens, D) sum of affinity times output

    def rows(self, tokens: np.ndarray) -> "RoutedBlock":
        return RoutedBlock(*(getattr(self, f.name)[tokens] for f in fields(self)))


@dataclass(frozen=True)
class Rerouted:
    """An objective (selection.objective): the measured error of pruning a set of experts."""

    layer: Layer
    sample: TokenSample
    linear: None = None
    quadratic: None = None
    _known: dict[bytes, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @property
    def size(self) -> int:
        return self.layer.num_experts

    def cost(self, pruned: np.ndarray) -> float:
        return float((self.sample.weight * self._errors(self._block(~pruned))).sum())

    def marginal_costs(self, pruned: np.ndarray) -> np.ndarray:
        key = pruned.tobytes()
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = self._flips(pruned)
        return self._known[key].copy()

    def swap_costs(self, pruned: np.ndarray) -> np.ndarray:
        alone = self.marginal_costs(pruned)
        rows = []
        for expert in np.flatnonzero(pruned):
            without = pruned.copy()
            without[expert] = False
            rows.append(alone[expert] + self.marginal_costs(without)[~pruned])
        return np.array(rows).reshape(int(pruned.sum()), int((~pruned).sum()))

    @cached_property
    def affinity(self) -> np.ndarray:
        return affinities(self.layer, self.sample.logits)

    @cached_property
    def choice(self) -> np.ndarray:
        return choices(self.layer, self.sample.logits, self.sample.bias)

    @cached_property
    def outputs(self) -> np.ndarray:
        """Of every expert (tokens, experts, D), with the factor that the block puts on their gated sum."""
        return self.sample.outputs.astype(np.float64) * self.layer.post_scale

    @cached_property
    def whole(self) -> np.ndarray:
        """The block's output with every expert (tokens, D)."""
        block = self._block(np.ones(self.size, dtype=bool))
        return block.summed * gate_factor(self.layer, block.chosen, block.kept)[:, None]

    def _block(self, kept: np.ndarray, tokens: np.ndarray | None = None) -> RoutedBlock:
        """Of all tokens, or of these; `kept` (experts,) or (tokens, experts) bool."""
        every = np.arange(len(self.choice)) if tokens is None else tokens
        affinity = self.affinity[every]
        ids, gates = routed(self.layer, affinity, self.choice[every], kept)
        filled = gates > 0
        weights = np.where(filled, np.take_along_axis(affinity, ids, axis=1), 0.0)
        summed = np.einsum("tk,tkd->td", weights, self.outputs[every[:, None], ids])
        return RoutedBlock(ids, filled, weights.sum(axis=1), (affinity * kept).sum(axis=1), summed)

    def _errors(self, block: RoutedBlock, tokens: np.ndarray | slice = slice(None)) -> np.ndarray:
        factor = gate_factor(self.layer, block.chosen, block.kept)
        return np.square(block.summed * factor[:, None] - self.whole[tokens]).sum(axis=1)

    def _flips(self, pruned: np.ndarray) -> np.ndarray:
        """Change of the cost (experts,) when one expert changes sides."""
        block = self._block(~pruned)
        before = self._errors(block)
        after = self._rescaled(block, before, pruned)
        touched = self._touched(block, pruned)
        tokens, experts = np.nonzero(touched)
        step = max(1, BLOCK // (self.layer.top_k * self.outputs.shape[2] + self.size))
        for start in range(0, len(tokens), step):
            pairs = tokens[start : start + step], experts[start : start + step]
            after[pairs] = self._flipped(block, pruned, *pairs)
        # Sums of rows, not a BLAS product: the same on any number of threads.
        return np.asarray((self.sample.weight[:, None] * (after - before[:, None])).sum(axis=0))

    def _flipped(self, block: RoutedBlock, pruned: np.ndarray, tokens: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """Errors (pairs,) of these tokens, each after the flip of one expert."""
        if self.layer.num_groups > 1:
            return self._replayed(pruned, tokens, experts)
        exchanged = self._exchanged(block, pruned, tokens, experts)
        errors = self._errors(exchanged, tokens)
        lost = exchanged.chosen < CANCELLED * block.chosen[tokens]
        errors[lost] = self._replayed(pruned, tokens[lost], experts[lost])
        return errors

    def _replayed(self, pruned: np.ndarray, tokens: np.ndarray, experts: np.ndarray) -> np.ndarray:
        """The same by the router's whole rule, whatever it is."""
        kept = np.repeat(~pruned[None, :], len(tokens), axis=0)
        kept[np.arange(len(tokens)), experts] ^= True
        return self._errors(self._block(kept, tokens), tokens)

    def _exchanged(
        self, block: RoutedBlock, pruned: np.ndarray, tokens: np.ndarray, experts: np.ndarray
    ) -> RoutedBlock:
        """The same without groups: one expert leaves a token's choice, the next one enters, or the other way round."""
        back = pruned[experts]
        last, following = self._edge(pruned)
        leaving, entering = np.where(back, last[tokens], experts), np.where(back, experts, following[tokens])
        out = np.where(leaving < 0, 0.0, self.affinity[tokens, leaving])
        into = np.where(entering < 0, 0.0, self.affinity[tokens, entering])
        own = self.affinity[tokens, experts]
        summed = block.summed[tokens] - out[:, None] * self.outputs[tokens, leaving]
        summed += into[:, None] * self.outputs[tokens, entering]
        chosen, kept = block.chosen[tokens] - out + into, block.kept[tokens] + np.where(back, own, -own)
        return replace(block.rows(tokens), chosen=chosen, kept=np.maximum(kept, 0.0), summed=summed)

    def _edge(self, pruned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of every token the last expert it chooses, -1 while there is room, and the first it does not, -1 for none."""
        top_k, kept = self.layer.top_k, int((~pruned).sum())
        none = np.full(len(self.choice), -1)
        if kept < top_k:
            return none, none
        ids = np.argsort(-np.where(pruned, -np.inf, self.choice), axis=1, kind="stable")[:, top_k - 1 : top_k + 1]
        return ids[:, 0], ids[:, 1] if kept > top_k else none

    def _rescaled(self, block: RoutedBlock, before: np.ndarray, pruned: np.ndarray) -> np.ndarray:
        """Errors (tokens, experts) after one flip where the choice of experts stays the same.

        Only gates that sum to 1 over all experts that are there, not over the chosen ones, change at all.
        """
        if self.layer.renormalise or self.layer.scoring == "sigmoid":
            return np.repeat(before[:, None], self.size, axis=1)
        kept = block.kept[:, None] + np.where(pruned, self.affinity, -self.affinity)
        factor = gate_factor(self.layer, np.broadcast_to(block.chosen[:, None], kept.shape), np.maximum(kept, 0.0))
        square, across = np.square(block.summed).sum(axis=1), (block.summed * self.whole).sum(axis=1)
        whole = np.square(self.whole).sum(axis=1)
        return factor**2 * square[:, None] - 2 * factor * across[:, None] + whole[:, None]

    def _touched(self, block: RoutedBlock, pruned: np.ndarray) -> np.ndarray:
        """True (tokens, experts) where a flip can change which experts the token goes to; it may not change them."""
        if self.layer.num_groups > 1:
            return self._touched_in_groups(block, pruned)
        touched = np.zeros(self.choice.shape, dtype=bool)
        np.put_along_axis(touched, block.ids, block.filled, axis=1)
        last = np.take_along_axis(self.choice, block.ids, axis=1)
        last = np.where(block.filled, last, -np.inf).min(axis=1, keepdims=True)
        return np.where(pruned, self.choice >= last, touched)

    def _touched_in_groups(self, block: RoutedBlock, pruned: np.ndarray) -> np.ndarray:
        """Chosen experts, those that make their group's score, and those that would."""
        grouped = np.where(pruned, -np.inf, self.choice).reshape(len(self.choice), self.layer.num_groups, -1)
        last = -np.partition(-grouped, self.layer.group_minimum - 1, axis=2)[:, :, self.layer.group_minimum - 1]
        touched = self.choice.reshape(grouped.shape) >= last[:, :, None]
        touched = touched.reshape(self.choice.shape)
        np.put_along_axis(touched, block.ids, True, axis=1)
        lowest = np.where(block.filled, np.take_along_axis(self.choice, block.ids, axis=1), -np.inf).min(axis=1)
        return touched | (pruned & (self.choice >= lowest[:, None]))


class Reroute(Criterion):
    """Squared error of the block's output on a token sample, with tokens re-routed as the pruned model would.

    Other criteria price an expert by what it put out; this one also sees what its tokens get instead. With
    `solver: {name: swap, starts: 1}` it is backward elimination, one expert at a time, then exchanges; further starts
    seldom pay here and cost as much each. Needs the token sample of calibration.statistics: samples.
    """

    needs: ClassVar[tuple[str, ...]] = ("sample",)
    name: Literal["reroute"] = "reroute"

    def objective(self, evidence: LayerEvidence) -> Rerouted:
        sample = evidence.statistics.sample
        if sample is None:
            raise InputError(
                f"selection.criterion: reroute needs a token sample, which the statistics of {evidence.layer.name} do "
                "not hold; record again with calibration.statistics: samples"
            )
        return Rerouted(evidence.layer, sample)
