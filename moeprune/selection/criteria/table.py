"""The list of criteria. Each class is its own config section (`selection.criterion`)."""

import difflib
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, Discriminator, Tag

from moeprune.selection.criteria.criterion import Criterion
from moeprune.selection.criteria.first_order import (
    Ean,
    EanCa,
    Frequency,
    GateSum,
    Man,
    Mone,
    Msan,
    Random,
    Reap,
    ReapL2,
    WeightedEan,
)
from moeprune.selection.criteria.hope import Hope
from moeprune.selection.criteria.outside import Custom, PruneSetFile
from moeprune.selection.criteria.reroute import Reroute
from moeprune.selection.criteria.worst_domain import WorstDomain

ScoringCriterion = Criterion | Custom  # everything but a prune set from a file

# A new criterion is one more row here.
_Row = (
    Annotated[Random, Tag("random")]
    | Annotated[Frequency, Tag("frequency")]
    | Annotated[GateSum, Tag("gate_sum")]
    | Annotated[Ean, Tag("ean")]
    | Annotated[Man, Tag("man")]
    | Annotated[Msan, Tag("msan")]
    | Annotated[WeightedEan, Tag("weighted_ean")]
    | Annotated[Reap, Tag("reap")]
    | Annotated[ReapL2, Tag("reap_l2")]
    | Annotated[EanCa, Tag("ean_ca")]
    | Annotated[Mone, Tag("mone")]
    | Annotated[Hope, Tag("hope")]
    | Annotated[WorstDomain, Tag("worst_domain")]
    | Annotated[Reroute, Tag("reroute")]
    | Annotated[PruneSetFile, Tag("file")]
)
CRITERIA: tuple[type[BaseModel], ...] = tuple(get_args(row)[0] for row in get_args(_Row))
CRITERION_NAMES: tuple[str, ...] = tuple(str(criterion.model_fields["name"].default) for criterion in CRITERIA)
_CUSTOM = "package.module:Class"


def _named(value: Any) -> Any:
    """A bare name stands for the criterion with default options; an unknown name is refused with the nearest."""
    if isinstance(value, str):
        value = {"name": value}
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str):
        raise ValueError(f"a criterion needs a name, one of {', '.join(CRITERION_NAMES)} or {_CUSTOM}")
    if name not in CRITERION_NAMES and ":" not in name:
        near = difflib.get_close_matches(name, CRITERION_NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown criterion {name!r}{hint} known: {', '.join(CRITERION_NAMES)} and {_CUSTOM}")
    return value


def _tag(value: Any) -> str:
    name = str(value.get("name") if isinstance(value, dict) else value.name)
    return _CUSTOM if ":" in name else name


AnyCriterion = Annotated[
    _Row | Annotated[Custom, Tag(_CUSTOM)],
    Discriminator(_tag),
    BeforeValidator(_named),
]
