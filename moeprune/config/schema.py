"""The configuration of a run. Every section is the options class of the room that reads it; unknown keys are errors."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moeprune.checkpoint.options import CheckpointOptions, Layout
from moeprune.data.options import Domain, Intake
from moeprune.dense.options import DenseOptions
from moeprune.evaluation.options import EvaluationOptions
from moeprune.models.options import DeviceMap, ModelOptions
from moeprune.selection.criteria.table import AnyCriterion
from moeprune.selection.options import RefineOptions, SelectionOptions


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CalibrationOptions(Intake):
    """`calibration:`: what is read, how it is cut into pieces, and which statistics are kept."""

    domains: tuple[Domain, ...] = Field(default=(Domain(name="agent", path="reference:agent"),), min_length=1)
    # all adds output_sum, for ean_ca and mone; samples adds to that a token sample, for reroute
    statistics: Literal["default", "all", "samples"] = "default"

    @model_validator(mode="after")
    def _distinct_names(self) -> "CalibrationOptions":
        names = [domain.name for domain in self.domains]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two domains are called {twice[0]!r}; give each its own name")
        return self


class Evaluation(EvaluationOptions):
    """`evaluation:`: what is measured, and the criteria measured beside the run's own from the same recording."""

    baselines: tuple[AnyCriterion, ...] = ()  # same budget, same solver options


class RuntimeOptions(Section):
    """`runtime:`: how, not what; not part of any key except the device's type."""

    device: str = "auto"
    batch_tokens: int = Field(default=8192, ge=1)
    streaming: Literal["auto", "on", "off"] = "auto"
    device_map: DeviceMap | None = None  # spread the model over devices, as accelerate does: auto, or module: device
    offload_folder: str | None = None  # takes a copy of the weights that device_map puts on disk

    @model_validator(mode="after")
    def _one_way_to_hold_the_model(self) -> "RuntimeOptions":
        if self.device_map is not None and self.streaming == "on":
            raise ValueError(
                "device_map keeps the whole model at hand and streaming reads it layer by layer; leave one of them out"
            )
        if self.offload_folder is not None and self.device_map is None:
            raise ValueError("offload_folder is for weights that device_map puts on disk; set device_map too")
        return self


class TrackingOptions(Section):
    """`tracking:`: the mirror of the records at Weights & Biases. It is in no key: it changes no result."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    project: str = "moeprune"
    group: str | None = None  # a grid sets its own name
    tags: tuple[str, ...] = ()


class RunConfig(Section):
    """Everything one run does."""

    model: ModelOptions = ModelOptions()
    calibration: CalibrationOptions = CalibrationOptions()
    selection: SelectionOptions = SelectionOptions()
    refine: RefineOptions | None = None  # choose layer by layer among several criteria's sets, by measuring
    checkpoint: CheckpointOptions = CheckpointOptions()
    dense: tuple[DenseOptions, ...] = ()
    evaluation: Evaluation = Evaluation()
    tracking: TrackingOptions = TrackingOptions()
    runtime: RuntimeOptions = RuntimeOptions()

    @property
    def criteria(self) -> tuple[AnyCriterion, ...]:
        """Every criterion that makes a plan: the run's own, those that `refine` tries, and the baselines."""
        tried = self.refine.criteria if self.refine else ()
        return (self.selection.criterion, *tried, *self.evaluation.baselines)

    @model_validator(mode="after")
    def _statistics_suffice(self) -> "RunConfig":
        recorded = {"default": (), "all": ("output_sum",), "samples": ("output_sum", "sample")}
        present = recorded[self.calibration.statistics]
        for criterion in self.criteria:
            missing = [need for need in getattr(criterion, "needs", ()) if need not in present]
            if missing:
                choice = "samples" if "sample" in missing else "all"
                name = getattr(criterion, "name", "")
                raise ValueError(f"criterion {name} needs {missing[0]}: set calibration.statistics: {choice}")
        return self


class WrittenOptions(Section):
    """`checkpoint:` of a compress config."""

    layout: Layout = "auto"


class CompressConfig(Section):
    """CONFIG of `moeprune compress`."""

    dense: tuple[DenseOptions, ...] = Field(min_length=1)
    calibration: CalibrationOptions | None = None
    checkpoint: WrittenOptions = WrittenOptions()
    runtime: RuntimeOptions = RuntimeOptions()

    @model_validator(mode="after")
    def _weights_are_here(self) -> "CompressConfig":
        if self.runtime.device_map is not None:
            raise ValueError("runtime.device_map is for pruning; what does not fit is read by runtime.streaming: on")
        return self


class GenerateOptions(Section):
    """Options of `moeprune generate` that decide the words, beside the model and the prompts."""

    tools: Literal["reference", "none"] = "none"  # reference: calculator and lookup are offered and executed
    temperature: float = Field(default=0.7, ge=0, allow_inf_nan=False)  # 0: the most likely token
    seed: int = Field(default=0, ge=0, lt=2**63)
    max_new_tokens: int = Field(default=256, ge=1)  # of one turn
    turns: int = Field(default=5, ge=1)  # of the model, for one question
