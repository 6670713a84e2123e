"""The config sections `selection` and `refine`: criterion, budget, solver, and sets chosen by measuring."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from moeprune.artifacts.errors import InputError
from moeprune.selection.criteria.table import AnyCriterion, Hope
from moeprune.selection.solvers.table import AnySolver, Swap


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


def _kept_count(value: Any) -> Any:
    """A share in (0, 1] or a count >= 1 of kept experts."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number; give a share of the experts (0.25) or a whole number of them (8)")
    if not math.isfinite(value) or value <= 0 or (isinstance(value, float) and value > 1):
        raise ValueError(f"{value} is neither a share in (0, 1] nor a whole number of experts >= 1")
    return value


Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Budget(BaseModel):
    """How many experts go, and which may not. `prune` with a decimal point is a fraction, without one a count.

    scope: layer prunes that many in every layer; scope: global prunes as many in all, spread over the layers so that
    the sum of their costs, each on its layer's scale, is least. `floor` and `ceiling` bound what a layer keeps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prune: Annotated[int | float, BeforeValidator(_prune)] = 0.5
    scope: Literal["layer", "global"] = "layer"
    multiple_of: int = Field(default=1, ge=1)  # kept counts round up to a multiple of this and of the router's groups
    floor: Annotated[int | float, BeforeValidator(_kept_count)] | None = None  # a layer keeps at least this
    ceiling: Annotated[int | float, BeforeValidator(_kept_count)] | None = None  # a layer keeps at most this
    must_keep: dict[str, tuple[int, ...]] = Field(default_factory=dict)  # layer name -> expert ids
    protect_super_experts: bool = False  # experts with extreme outputs stay (selection.protection.super_experts)
    keep_at_least: Share | dict[str, Share] | None = None  # share of each domain's routed tokens that kept experts hold


Goal = Literal["mean", "worst"]  # of refine, over domains: their mean KL, or the largest


class RefineOptions(BaseModel):
    """`refine:`: the criteria whose sets are tried beside the run's own, and how they are judged."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    criteria: tuple[AnyCriterion, ...] = Field(min_length=1)
    tokens: int = Field(default=8192, ge=1)  # of validation, a domain
    goal: Goal = "mean"
    margin: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # standard errors an improvement must exceed
    rounds: int = Field(default=3, ge=1)  # through all layers, at most; ends when a round changes nothing


class SelectionOptions(BaseModel):
    """Everything `select` needs beside the statistics. `mix` multiplies the domains' raw sums (default 1)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mix: dict[str, float] = Field(default_factory=dict)
    criterion: AnyCriterion = Field(default_factory=Hope)
    budget: Budget = Field(default_factory=Budget)
    solver: AnySolver = Field(default_factory=Swap)

    @model_validator(mode="after")
    def _solver_fits(self) -> "SelectionOptions":
        if self.solver.name == "slsqp" and self.criterion.name in ("worst_domain", "reroute"):
            raise ValueError(f"solver slsqp needs a quadratic criterion, {self.criterion.name} is none; use swap")
        return self

    @classmethod
    def parse(cls, value: Mapping[str, Any], *, place: str = "selection") -> "SelectionOptions":
        """The options from plain data. Raises InputError naming every field that is wrong."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, (place, *e['loc'])))}: {e['msg']}" for e in error.errors())
            raise InputError(problems.replace("Value error, ", "")) from error
