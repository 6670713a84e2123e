"""`model:` of a config, and how a model spreads over devices. Imports no torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# How accelerate spreads a model: module -> a GPU's number, "cuda:1", "cpu" or "disk"; or a rule of its own.
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | str]


class ModelOptions(BaseModel):
    """`model:` of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = "reference"  # a directory, a hub name, or `reference` for the embedded model
    revision: str | None = None
    dtype: Dtype = "auto"  # auto: float32 on CPU, the checkpoint's dtype on a GPU
