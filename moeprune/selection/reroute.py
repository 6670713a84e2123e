"""The criterion `reroute`: prune what changes the block's output least, re-routing included."""

from typing import ClassVar, Literal

from moeprune.artifacts.errors import InputError
from moeprune.selection.criterion import Criterion
from moeprune.selection.evidence import LayerEvidence
from moeprune.selection.rerouting import Rerouted


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
