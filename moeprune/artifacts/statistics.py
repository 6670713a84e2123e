"""Routing statistics: what a calibration pass saw, as sums that add.

One self-contained .safetensors file. Tensors are named `<domain>/<module path of the MoE block>/<statistic>`; the
trajectories whose sha256 of token ids is even are also kept apart under `<domain>/<block>/half/<statistic>` (the other
half is the difference), and a token sample, where there is one, under `<domain>/<block>/sample/<field>`. The manifest
is JSON in the file's metadata under the key `manifest`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import whole_file
from moeprune.artifacts.sample import FIELDS, TokenSample, joined

FORMAT = "moeprune.statistics/1"
Part = Literal["all", "even", "odd"]


@dataclass(frozen=True)
class Layer:
    """One MoE layer as selection needs to know it; selection never sees the model."""

    name: str  # module path of the MoE block, e.g. "model.layers.3.mlp"
    num_experts: int
    top_k: int
    num_groups: int = 1  # router groups; experts g*E/G .. (g+1)*E/G - 1 form group g
    topk_group: int = 1  # groups a token may draw from
    group_minimum: int = 1  # experts a group must keep for the router's group score to exist (2 for a top-2 sum)
    routing: str = ""  # the rule in words, e.g. "softmax over all, top-k, renormalised"
    gates_input: bool = False  # llama4: the gate g multiplies the expert's input, and f is f(g x) / g
    # The rule in numbers, to replay it (artifacts.routing). Older files lack it, and are still of the same layer.
    scoring: Literal["", "softmax", "sigmoid"] = field(default="", compare=False)  # "": cannot be replayed
    renormalise: bool = field(default=True, compare=False)  # gates of the chosen experts sum to `scaling`
    scaling: float = field(default=1.0, compare=False)
    post_scale: float = field(default=1.0, compare=False)  # on the gated sum, outside the experts; not in the gates
    null_slots: bool = field(default=False, compare=False)  # a token's slot may go to a class that is no expert


@dataclass(frozen=True)
class LayerStatistics:
    """Sums over the counted tokens of one layer (E experts, H hidden). Only routed (token, expert) pairs enter.

    g is the coefficient the model multiplies an expert's output f with, n = ||f||_2 (float32). Sums are float64,
    counts int64 (float64 after mixing domains with weights).
    """

    tokens: np.ndarray  # ()      counted tokens
    co_count: np.ndarray  # (E, E)  tokens that select both; the diagonal is the routing count
    norm_product: np.ndarray  # (E, E)  sum g_i n_i g_j n_j
    output_product: np.ndarray  # (E, E)  sum <g_i f_i, g_j f_j>
    gate_sum: np.ndarray  # (E,)    sum g
    norm_sum: np.ndarray  # (E,)    sum n
    norm_square_sum: np.ndarray  # (E,)    sum n^2
    gated_norm_sum: np.ndarray  # (E,)    sum g n
    output_max: np.ndarray  # (E,)    signed maximum of f over routed tokens and channels; -inf where never routed
    output_sum: np.ndarray | None = None  # (E, H)  sum f; only with calibration.statistics: all or samples
    sample: TokenSample | None = None  # only with calibration.statistics: samples

    @property
    def count(self) -> np.ndarray:
        """Routing count N_e (E,)."""
        return np.diagonal(self.co_count)

    def __add__(self, other: "LayerStatistics") -> "LayerStatistics":
        return _combine([self, other], [1, 1])

    def __sub__(self, other: "LayerStatistics") -> "LayerStatistics":
        """The sums of the tokens that are in `self` and not in `other`; output_max stays an upper bound.

        Of a token sample the odd half is left: `other` is the even one.
        """
        assert other.sample is None or other.sample.even.all()
        odd = None if self.sample is None else self.sample.part(~self.sample.even)
        return replace(_combine([self, other], [1, -1]), output_max=self.output_max, sample=odd)


SUMS = tuple(f.name for f in fields(LayerStatistics) if f.name not in ("output_max", "sample"))


def _combine(parts: list[LayerStatistics], weights: Iterable[float]) -> LayerStatistics:
    values: dict[str, Any] = {}
    weights = list(weights)
    for name in SUMS:
        arrays = [getattr(part, name) for part in parts]
        if any(array is None for array in arrays):
            values[name] = None
            continue
        terms = [
            array if weight == 1 else -array if weight == -1 else array * weight
            for array, weight in zip(arrays, weights)
        ]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        values[name] = np.asarray(total)
    maxima = [part.output_max for part, weight in zip(parts, weights) if weight > 0]
    values["output_max"] = np.maximum.reduce(maxima)
    return LayerStatistics(**values, sample=joined([part.sample for part in parts], weights))


@dataclass(frozen=True)
class RoutingStatistics:
    """Statistics of every domain and layer, the even half of the trajectories, and the manifest that explains them."""

    manifest: Mapping[str, Any]
    layers: tuple[Layer, ...]
    domains: Mapping[str, Mapping[str, LayerStatistics]]  # domain -> layer name -> sums
    half: Mapping[str, Mapping[str, LayerStatistics]] = field(default_factory=dict)  # the even trajectories alone

    @property
    def key(self) -> str:
        return str(self.manifest.get("key", ""))

    @property
    def fingerprint(self) -> str:
        return str(self.manifest["model"]["fingerprint"])

    def mix(self, weights: Mapping[str, float] | None = None, *, part: Part = "all") -> dict[str, LayerStatistics]:
        """Layer name -> weighted sum over domains; a domain that is not named has weight 1.

        `part` takes all trajectories, or the "even" or the "odd" half of them.
        Raises InputError for an unknown domain, a negative or non-finite weight, or when every weight is 0.
        """
        weights = dict(weights or {})
        for domain, weight in weights.items():
            if domain not in self.domains:
                raise InputError(
                    f"selection.mix: unknown domain {domain!r}; the statistics hold {', '.join(self.domains)}"
                )
            if not np.isfinite(weight) or weight < 0:
                raise InputError(f"selection.mix.{domain}: {weight} is not a weight; give a finite number >= 0")
        used = {domain: weights.get(domain, 1.0) for domain in self.domains}
        used = {domain: weight for domain, weight in used.items() if weight > 0}
        if not used:
            raise InputError("selection.mix: every domain has weight 0; give at least one a weight above 0")
        return {
            layer.name: _combine([self._part(domain, layer.name, part) for domain in used], used.values())
            for layer in self.layers
        }

    def _part(self, domain: str, layer: str, part: Part) -> LayerStatistics:
        whole = self.domains[domain][layer]
        if part == "all":
            return whole
        even = self.half[domain][layer]
        return even if part == "even" else whole - even

    def __add__(self, other: "RoutingStatistics") -> "RoutingStatistics":
        """Sums of two recordings of the same model. Raises InputError when the models or the layers differ."""
        if self.fingerprint != other.fingerprint or self.layers != other.layers:
            raise InputError("statistics of two different models cannot be added")

        def merge(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, dict[str, LayerStatistics]]:
            out: dict[str, dict[str, LayerStatistics]] = {domain: dict(layers) for domain, layers in a.items()}
            for domain, layers in b.items():
                out[domain] = {n: out[domain][n] + s for n, s in layers.items()} if domain in out else dict(layers)
            return out

        # Counts of records and tokens are in each manifest; the sum keeps both, in order.
        manifest = {**self.manifest, "key": _joint_key(self.key, other.key), "domains": _merge_domains(self, other)}
        return RoutingStatistics(
            manifest, self.layers, merge(self.domains, other.domains), merge(self.half, other.half)
        )

    def save(self, path: Path) -> None:
        """Write one .safetensors file, whole or not at all."""
        tensors: dict[str, np.ndarray] = {}
        for prefix, group in (("", self.domains), ("half/", self.half)):
            for domain, layers in group.items():
                for name, sums in layers.items():
                    for statistic in SUMS if prefix else (*SUMS, "output_max"):
                        value = getattr(sums, statistic)
                        if value is not None:
                            tensors[f"{domain}/{name}/{prefix}{statistic}"] = np.asarray(value, order="C")
                    if sums.sample is not None and not prefix:  # its tokens know their half
                        for f in FIELDS:
                            tensors[f"{domain}/{name}/sample/{f}"] = np.ascontiguousarray(getattr(sums.sample, f))
        manifest = {**self.manifest, "format": FORMAT, "layers": [asdict(layer) for layer in self.layers]}
        with whole_file(path) as beside:
            save_file(tensors, beside, metadata={"manifest": json.dumps(manifest, allow_nan=False)})

    @classmethod
    def load(cls, path: Path) -> "RoutingStatistics":
        """Read a file written by `save`. Raises InputError when it is missing, truncated or something else."""
        path = Path(path)
        if not path.is_file():
            raise InputError(f"{path}: no such statistics file; make one with `moeprune record`")
        try:
            with safe_open(path, framework="np") as file:
                manifest = json.loads((file.metadata() or {}).get("manifest", "{}"))
                ours = manifest.get("format") == FORMAT  # numpy cannot read what others hold
                tensors = {name: file.get_tensor(name) for name in file.keys()} if ours else {}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError) as error:
            raise InputError(f"{path}: not a readable statistics file ({error}); record again") from error
        if not ours:
            raise InputError(
                f"{path}: format {manifest.get('format')!r}, expected {FORMAT!r}; make one with `moeprune record`"
            )
        try:
            layers = tuple(Layer(**layer) for layer in manifest["layers"])
            manifest["model"]["fingerprint"]  # what `select` relies on
            list(manifest["domains"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: damaged, or of another version ({error!r}); record again") from error
        domains: dict[str, dict[str, LayerStatistics]] = {}
        half: dict[str, dict[str, LayerStatistics]] = {}
        for domain in manifest["domains"]:
            domains[domain], half[domain] = {}, {}
            for layer in layers:
                prefix = f"{domain}/{layer.name}/"
                sample = _read_sample(tensors, f"{prefix}sample/", layer)
                even = None if sample is None else sample.part(sample.even)
                domains[domain][layer.name] = replace(_read(tensors, prefix, layer), sample=sample)
                half[domain][layer.name] = replace(_read(tensors, f"{prefix}half/", layer), sample=even)
        return cls(manifest, layers, domains, half)


def _read(tensors: Mapping[str, np.ndarray], prefix: str, layer: Layer) -> LayerStatistics:
    row = (layer.num_experts,)
    shapes = {"tokens": (), **dict.fromkeys(("co_count", "norm_product", "output_product"), row * 2)}
    values = {name: tensors.get(prefix + name) for name in SUMS}
    for name, value in values.items():
        if value is None and name != "output_sum":
            raise InputError(f"statistics: {prefix}{name} is missing; the file is incomplete, record again")
        if value is not None and name != "output_sum" and value.shape != shapes.get(name, row):
            raise InputError(
                f"statistics: {prefix}{name} has shape {value.shape}, expected {shapes.get(name, row)}; record again"
            )
    # halves carry sums only: a maximum has no difference
    maximum = tensors.get(prefix + "output_max", np.full(row, -np.inf))
    return LayerStatistics(output_max=maximum, **values)  # type: ignore[arg-type]


def _read_sample(tensors: Mapping[str, np.ndarray], prefix: str, layer: Layer) -> TokenSample | None:
    values = {name: tensors[prefix + name] for name in FIELDS if prefix + name in tensors}
    if not values:
        return None
    tokens, experts = len(values.get("weight", ())), layer.num_experts
    shapes = {"weight": (tokens,), "even": (tokens,), "logits": (tokens, experts), "bias": (experts,)}
    shapes["outputs"] = (tokens, experts, *values.get("outputs", np.empty((0, 0, 0))).shape[2:])
    for name in FIELDS:
        if name not in values or values[name].shape != shapes[name]:
            raise InputError(f"statistics: {prefix}{name} is missing or of another shape; record again")
    return TokenSample(**values)


def _joint_key(*keys: str) -> str:
    return hashlib.sha256("+".join(keys).encode()).hexdigest()[:12]


def _merge_domains(a: RoutingStatistics, b: RoutingStatistics) -> dict[str, Any]:
    merged = {domain: dict(info) for domain, info in a.manifest["domains"].items()}
    for domain, info in b.manifest["domains"].items():
        merged[domain] = _add_counts(merged[domain], info) if domain in merged else dict(info)
    return merged


def _add_counts(a: Any, b: Any) -> Any:
    """Numbers add, mappings merge key by key, lists join; anything else keeps the first value."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return {
            key: _add_counts(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in {**a, **b}
        }
    if isinstance(a, bool) or isinstance(b, bool):
        return a
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a + b
    if isinstance(a, list) and isinstance(b, list):
        return a + b
    return a
