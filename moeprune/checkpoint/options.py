"""`checkpoint:` of a config."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

MtpPolicy = Literal["refuse", "drop"]
Layout = Literal["auto", "plain"]  # of compressed weights


class CheckpointOptions(BaseModel):
    """Whether a run writes a checkpoint, and what becomes of multi-token-prediction layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    save: bool = True
    mtp: MtpPolicy = (
        "refuse"  # drop: leave them out and set the config's count to 0; speculative decoding goes with them
    )
    layout: Layout = "auto"  # of dense weights: packed where engines load that, or plain numbers in the source's dtype
