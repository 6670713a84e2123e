"""`evaluation:` of a config: which data, tasks and measures. Imports nothing heavy."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moeprune.data.options import Domain

Task = Literal["agent"]
HUMAN_EVAL = "human-eval"


class CodeOptions(BaseModel):
    """`evaluation.code`: programs that the model completes are run against their tests. Off unless this is given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problems: str = HUMAN_EVAL  # the package of that name, or a .jsonl(.gz) in its format
    run_generated_code: bool = False  # must be set: programs that a model wrote run on this machine
    count: int | None = Field(None, ge=1)  # the first so many problems; None: all
    max_new_tokens: int = Field(384, ge=1)
    seconds: int = Field(10, ge=1)  # of one program
    memory_bytes: int = Field(2**30, ge=2**26)

    @property
    def name(self) -> str:
        """What the task is called among the metrics."""
        return "human_eval" if self.problems == HUMAN_EVAL else Path(self.problems).name.partition(".")[0]


class EvaluationOptions(BaseModel):
    """What is measured. The baselines (selection criteria) are added by the config that composes the rooms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    domains: list[Domain] | None = None  # None: the held-out part of the calibration domains
    holdout: float = Field(0.1, gt=0, lt=1)  # share of a user's own trajectories kept out of calibration, by hash
    tasks: list[Task] = []
    task_questions: int | None = Field(None, ge=1)  # the first so many questions of a task; None: all
    code: CodeOptions | None = None
    loops: bool = False
    harness: list[str] = []  # lm-eval task names or local task files (.yaml); needs the extra `eval`
    speed: bool = False

    @property
    def needs_generation(self) -> bool:
        """Whether something is measured beside fidelity, for which the model must be in memory."""
        return bool(self.tasks or self.code or self.loops or self.harness or self.speed)

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
