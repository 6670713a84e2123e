"""What every dense method is: its config section, and the call that compresses one weight."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from moeprune.artifacts.errors import InputError
from moeprune.dense.methods.kinds import ROLES, Kind, Needs, Pattern, pruned_count

if TYPE_CHECKING:
    import torch

    from moeprune.dense.methods.inputs import Conditions, InputStatistics
    from moeprune.dense.methods.result import DenseResult


class DenseMethod(BaseModel):
    """Options that all methods share; a method adds its own fields and `_compress`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[Kind]
    needs: ClassVar[Needs]

    targets: tuple[str, ...] = Field(default=("attention", "dense_mlp", "shared_expert"), min_length=1)
    force: bool = False  # run although an earlier method has quantised the same weight; undoes that work
    minimum_tokens: int = Field(default=32, ge=1)  # a weight that saw fewer gets the weights-only fallback; counted

    @field_validator("targets")
    @classmethod
    def _known_targets(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        for target in targets:
            if target.startswith("re:"):
                try:
                    re.compile(target[3:])
                except re.error as error:
                    raise ValueError(f"target {target!r} is not a regular expression: {error}") from error
            elif target not in ROLES:
                raise ValueError(f"target {target!r} is unknown; use {', '.join(ROLES)} or re:PATTERN on module names")
        return targets

    def compress(
        self,
        weight: "torch.Tensor",
        statistics: "InputStatistics",
        *,
        held: "torch.Tensor | None" = None,
        scale_dtype: "torch.dtype | None" = None,
    ) -> "DenseResult":
        """The weight (out, in) float32 compressed; the argument is left alone.

        `held` (out, in) bool: what an earlier step pruned (False) stays exactly zero. `scale_dtype`: how scales are
        stored (default float32). With fewer than `minimum_tokens` calibration rows, or a Hessian that stays indefinite
        up to the damping cap, the named fallback is used, and the result says so.
        Raises InputError for NaN or infinity in the weight and for shapes that the pattern or group size does not fit.
        """
        import torch

        from moeprune.dense.methods.inputs import Conditions
        from moeprune.dense.methods.result import check_finite
        from moeprune.dense.methods.sweep import NotPositiveDefinite

        assert weight.ndim == 2, "a weight is (out, in)"
        assert weight.dtype == torch.float32, "kernels work in float32"
        check_finite(weight, statistics.layer, "the weight")
        self.check_shape(statistics.layer, weight.shape[1])
        given = Conditions(statistics, held, scale_dtype or torch.float32)
        if self.needs != "nothing" and statistics.tokens < self.minimum_tokens:
            reason = f"{statistics.tokens} calibration tokens, fewer than minimum_tokens={self.minimum_tokens}"
            return self._fall_back(self._weights_only(), reason, weight, given)
        try:
            return self._compress(weight, given)
        except NotPositiveDefinite as error:
            return self._fall_back(self._without_hessian(), str(error), weight, given)

    def _compress(self, weight: "torch.Tensor", given: "Conditions") -> "DenseResult":
        raise NotImplementedError

    def check_shape(self, layer: str, in_features: int) -> None:
        """Raises InputError when the method cannot serve a weight with this many inputs."""

    def _weights_only(self) -> "DenseMethod":
        """The fallback that needs no calibration."""
        raise NotImplementedError

    def _without_hessian(self) -> "DenseMethod":
        """The fallback when the Hessian cannot be factorised."""
        return self._weights_only()

    def _fall_back(
        self, method: "DenseMethod", reason: str, weight: "torch.Tensor", given: "Conditions"
    ) -> "DenseResult":
        result = method._compress(weight, given)
        name: str = method.name  # type: ignore[attr-defined]
        warning = f"{given.statistics.layer}: {reason}; fell back to {name}"
        return replace(result, fallback=result.fallback or name, warnings=[warning, *result.warnings])


class Pruning(DenseMethod):
    """How much goes: a share of each weight, or N:M."""

    kind: ClassVar[Kind] = "prune"
    by_row: ClassVar[bool] = True  # the share is taken of each row; otherwise of all rows together

    sparsity: float | None = Field(default=None, gt=0, lt=1, allow_inf_nan=False)  # share of the weights that go
    pattern: str | None = None  # "2:4": two of every four input weights stay

    @field_validator("pattern")
    @classmethod
    def _known_pattern(cls, pattern: str | None) -> str | None:
        return pattern if pattern is None else str(Pattern.parse(pattern))

    def model_post_init(self, context: object) -> None:
        if self.pattern is None:
            if self.sparsity is None:
                object.__setattr__(self, "sparsity", 0.5)
            return
        implied = Pattern.parse(self.pattern).sparsity
        if self.sparsity is None:
            object.__setattr__(self, "sparsity", implied)
        elif abs(self.sparsity - implied) > 1e-6:
            raise ValueError(
                f"sparsity {self.sparsity} contradicts pattern {self.pattern}, which removes {implied:g}; leave one out"
            )

    def check_shape(self, layer: str, in_features: int) -> None:
        if self.by_row and self.pattern is None and not pruned_count(self.sparsity or 0.0, in_features):
            raise InputError(
                f"{layer}: sparsity {self.sparsity:g} of its {in_features} inputs is less than one, so nothing "
                f"would go; give at least {1.01 / in_features:.2g}, or leave the layer out of targets"
            )
        if self.pattern is not None and in_features % Pattern.parse(self.pattern).group:
            raise InputError(
                f"{layer}: pattern {self.pattern} does not divide its {in_features} inputs; "
                "use sparsity without a pattern there, or leave the layer out of targets"
            )

    def _drops(self, scores: "torch.Tensor", held: "torch.Tensor | None") -> "torch.Tensor":
        """True (out, in) at the smallest scores of each row, or of each group; what was dropped before goes first."""
        from moeprune.dense.methods.patterns import smallest_in_groups, smallest_per_row

        if held is not None:
            scores = scores.masked_fill(~held, -1.0)
        if self.pattern is not None:
            drops = smallest_in_groups(scores, Pattern.parse(self.pattern), dim=1)
        else:
            assert self.sparsity is not None
            drops = smallest_per_row(scores, pruned_count(self.sparsity, scores.shape[1]))
        return drops if held is None else drops | ~held
