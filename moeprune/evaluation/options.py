"""`evaluation:` of a config: which data, tasks and rulers. Imports nothing heavy."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moeprune.data.options import Domain

Task = Literal["agent"]


class EvaluationOptions(BaseModel):
    """What is measured. The baselines (selection criteria) are added by the config that composes the rooms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    domains: list[Domain] | None = None  # None: the held-out part of the calibration domains
    holdout: float = Field(0.1, gt=0, lt=1)  # share of a user's own trajectories kept out of calibration, by hash
    tasks: list[Task] = []
    task_questions: int | None = Field(None, ge=1)  # the first so many questions of a task; None: all
    loops: bool = False
    harness: list[str] = []  # lm-eval task names or local task files (.yaml); needs the extra `eval`
    speed: bool = False

    @field_validator("domains")
    @classmethod
    def _names_are_distinct(cls, domains: list[Domain] | None) -> list[Domain] | None:
        names = [domain.name for domain in domains or []]
        twice = sorted({name for name in names if names.count(name) > 1})
        if domains is not None and not domains:
            raise ValueError(
                "an empty list measures nothing; name a domain, or leave the key out for the calibration domains"
            )
        if twice:
            raise ValueError(
                f"the domain {', '.join(twice)} is named twice; metrics are kept by name, give each its own"
            )
        return domains
