"""The part of a config that says which trajectories are read and how; imports nothing heavy."""

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Count = Literal["all", "assistant", "completion", "tool"]
Overflow = Literal["split", "truncate", "skip"]
Part = Literal["all", "calibration", "heldout"]
FieldName = Literal[
    "messages", "conversations", "tools", "prompt", "completion", "text", "input_ids", "role", "content"
]


class Domain(BaseModel):
    """One kind of data; its statistics and metrics are kept apart under `name`.

    `path`: a file (.jsonl .json .parquet .txt, the text ones also .gz), a folder, a glob, a folder that
    `datasets` wrote, the name of a dataset on the hub, or `reference:NAME`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*$")  # it becomes part of tensor and metric names
    path: str = Field(min_length=1)
    tokens: int | None = Field(default=None, ge=1)  # read, before the mask; None: no limit
    count: Count = "all"  # which tokens enter the statistics
    trajectory_tokens: int | None = Field(default=None, ge=1)  # most tokens that one trajectory may give
    config: str | None = None  # of a dataset
    split: str | None = None  # of a dataset
    revision: str | None = None  # of a dataset on the hub
    streaming: bool = False  # read a hub dataset in its own order, only as far as `tokens` asks
    fields: Mapping[FieldName, str] | None = None  # our field -> the record's field ("a.b" looks inside a)

    @field_validator("name")
    @classmethod
    def _free_name(cls, name: str) -> str:
        if name in ("mean", "worst"):
            raise ValueError(f"{name!r} is the name of a metric over all domains; give the domain another")
        return name


class Intake(BaseModel):
    """How records become token sequences, for every domain alike."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence_length: int = Field(default=512, ge=1)
    overflow: Overflow = "split"  # split: each piece starts without its past
    on_bad_record: Literal["error", "skip"] = "error"
    minimum_tokens: int = Field(default=1, ge=1)  # counted tokens a domain must have; below 1,000 warns
    seed: int = Field(default=0, ge=0)  # of the sample that a token limit takes
    shuffle: bool = True  # with a limit: a seeded sample (true) or the first records as the files have them (false)
    near_duplicates: float | None = Field(default=None, gt=0, lt=1)  # leave out above this similarity of words
    template: Literal["model", "plain"] = "model"  # plain: "role: content" lines, for a model without a chat template
