"""The config section `selection`: what to prune, by which criterion, within which budget, with which solver."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from moeprune.artifacts.errors import InputError
from moeprune.selection.criteria import AnyCriterion, Hope
from moeprune.selection.solvers import AnySolver, Swap


def _prune(value: Any) -> Any:
    """A float in (0, 1) or an integer >= 1, as typed. Text, booleans and NaN are refused, with a way out."""
    way_out = "give a fraction between 0 and 1 (0.5 prunes half) or a whole number of experts (8)"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"prune: {value!r} is not a number; {way_out}")
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"prune: {value} would remove nothing; {way_out}")
        return value
    if not math.isfinite(value) or not 0 < value < 1:
        percent = f"; for {value:g} % write {value / 100:g}" if math.isfinite(value) and 1 < value < 100 else ""
        raise ValueError(f"prune: {value} is not a fraction between 0 and 1; {way_out}{percent}")
    return value


class Budget(BaseModel):
    """How many experts go, and which may not. `prune` with a decimal point is a fraction, without one a count."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prune: Annotated[int | float, BeforeValidator(_prune)] = 0.5
    multiple_of: int = Field(default=1, ge=1)  # kept counts round up to a multiple of this and of the router's groups
    must_keep: dict[str, tuple[int, ...]] = Field(default_factory=dict)  # layer name -> expert ids


class SelectionOptions(BaseModel):
    """Everything `select` needs beside the statistics. `mix` multiplies the domains' raw sums (default 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mix: dict[str, float] = Field(default_factory=dict)
    criterion: AnyCriterion = Field(default_factory=Hope)
    budget: Budget = Field(default_factory=Budget)
    solver: AnySolver = Field(default_factory=Swap)

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, place: str = "selection") -> "SelectionOptions":
        """The options from plain data. Raises InputError naming every field that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, (place, *e['loc'])))}: {e['msg']}" for e in error.errors())
            raise InputError(problems.replace("Value error, ", "")) from error
