"""A compressed model as edits of its source checkpoint: plain numbers with zeros, or packed by compressed-tensors.

export = Export(inventory(source), model, methods)     # before the walk: refuses what would load wrong
result = compress_model(model, methods, tokens, dtype=export.dtype)
export.edits(result), export.config_edits              # for the checkpoint writer
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from einops import rearrange

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.edits import Edit, Inventory, NewTensor, Replace
from moeprune.checkpoint.options import Layout
from moeprune.dense.chain import chains
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.methods.result import Quantised
from moeprune.dense.packed_layout import (
    UNUSED_EXPERTS,
    Scheme,
    bitsandbytes_section,
    names_of_kind,
    quantization_config,
    schemes,
)
from moeprune.dense.places import StoredAs, locate, rows_of, source_part
from moeprune.dense.report import DenseReport
from moeprune.dense.walk import Compressed
from moeprune.dense.weights import Weight, look

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


class Export:
    """What will be written for a model that `compress_model` is about to change. Made before the walk, used after it.

    places: where the weights lie in the checkpoint (default: found by the numbers of the model, all of it in memory).
    layout auto packs integers and float8 with compressed-tensors; plain writes all results in the source's dtype.
    Raises InputError for combinations that engines load wrong, for weights the checkpoint stores in a way that is not
    understood, for a missing compressed-tensors, and for weights of several dtypes.
    """

    def __init__(
        self,
        checkpoint: Inventory,
        model: Any,
        methods: Sequence[DenseMethod],
        *,
        layout: Layout = "auto",
        places: Mapping[str, StoredAs] | None = None,
    ) -> None:
        seen = look(model)
        chain_of = chains(seen, methods)
        self.checkpoint, self._tied = checkpoint, seen.tied
        self.schemes: dict[str, Scheme] = schemes(seen, chain_of) if layout == "auto" else {}
        self.places = locate(checkpoint, seen, chain_of) if places is None else places
        self.dtype = self._common_dtype()
        self.elements = sum(math.prod(weight.shape) for weight in seen.weights if weight.name in chain_of)
        self.config_edits: dict[tuple[str, ...], Any] = {}
        self.texts: dict[str, str] = {}  # files to add: name -> text
        self.warnings: list[str] = []
        if self.schemes:
            self._require_separate_experts()
            section = quantization_config(model, seen, self.schemes, _version())
            self.config_edits[("quantization_config",)] = section
            if UNUSED_EXPERTS in (target for group in section["config_groups"].values() for target in group["targets"]):
                self.warnings.append(
                    "integers beside routed experts that stay plain: config.json names a float8 group that no module "
                    "belongs to, so that transformers leaves the experts alone; tried with transformers only"
                )
        nf4 = names_of_kind(chain_of, "nf4") if layout == "auto" else []
        if nf4:
            self._describe_nf4(model, nf4, bool(self.schemes))
        if any(method.kind != "quantise" for method in methods):
            self.warnings.append(
                "zeros are stored as plain numbers: stock engines run them at dense speed; real 2:4 speed needs "
                "torch's semi-structured tensors on an Ampere or newer GPU"
            )

    def edits(self, compressed: Compressed) -> dict[str, Edit]:
        """Tensor on disk -> what replaces it. Bytes are made when the writer asks, one tensor at a time."""
        return {name: Replace(self._tensors(stored, compressed)) for name, stored in self.places.items()}

    @property
    def replaced_bytes(self) -> tuple[int, int]:
        """Bytes of the tensors that change, before and after; known before the walk."""
        nothing = Compressed(DenseReport(), {})
        before = sum(self.checkpoint.by_name[name].entry.size for name in self.places)
        return before, sum(new.size for stored in self.places.values() for new in self._tensors(stored, nothing))

    def _tensors(self, stored: StoredAs, compressed: Compressed) -> tuple[NewTensor, ...]:
        scheme = self.schemes.get(stored.weights[0].name)
        if scheme is None:
            dtype = DTYPES[stored.dtype]
            return (_new(stored.name, dtype, stored.shape, lambda: self._plain(stored, compressed, dtype)),)
        (weight,) = stored.weights
        name = self._name(weight)
        base = stored.name.removesuffix("weight")

        def part(kind: str) -> Callable[[], torch.Tensor]:
            if kind == "weight_shape":
                return lambda: torch.tensor(stored.shape)
            if kind == "weight_scale":
                return lambda: stored_scale(stored, compressed.quantised[name], scheme, self.dtype)
            return lambda: pack(stored, self._value(weight, compressed), compressed.quantised[name], scheme)[kind]

        shape = _Shapes(stored.shape, scheme)
        return tuple(_new(base + kind, dtype, size, part(kind)) for kind, dtype, size in shape.parts(self.dtype))

    def _plain(self, stored: StoredAs, compressed: Compressed, dtype: torch.dtype) -> torch.Tensor:
        """The tensor on disk; of a tensor of all experts, those that no method had are the source's."""

        def part(number: int, weight: Weight) -> torch.Tensor:
            if compressed.weights is not None and self._name(weight) not in compressed.weights:
                return source_part(self.checkpoint, stored.name, number)
            return stored.part(self._value(weight, compressed)).to(dtype).cpu()

        return stored.stacked(part(number, weight) for number, weight in enumerate(stored.weights))

    def _value(self, weight: Weight, compressed: Compressed) -> torch.Tensor:
        """The weight (out, in) float32 after the walk."""
        if compressed.weights is None:
            return weight.read()
        return compressed.weights[self._name(weight)].float()

    def _name(self, weight: Weight) -> str:
        """The name under which the weight was compressed: of tied ones, that of the first."""
        return self._tied.get(weight, weight).name

    def _common_dtype(self) -> torch.dtype:
        dtypes = {stored.dtype for stored in self.places.values()}
        if len(dtypes) != 1:
            raise InputError(
                f"the targeted weights are stored in {', '.join(sorted(dtypes))}; target one dtype at a time"
            )
        return DTYPES[dtypes.pop()]

    def _require_separate_experts(self) -> None:
        for stored in self.places.values():
            if stored.weights[0].name in self.schemes and (
                stored.fused or not stored.name.endswith(".weight") or stored.flipped
            ):
                raise InputError(
                    f"{stored.name}: holds all experts of a layer in one tensor; compressed-tensors packs one matrix a "
                    "tensor. Leave routed_expert out of the quantising targets, or export with layout plain"
                )

    def _describe_nf4(self, model: Any, names: list[str], packed: bool) -> None:
        experts = [
            stored.name
            for stored in self.places.values()
            if stored.weights[0].name in names and stored.weights[0].expert is not None
        ]
        if packed or experts:
            why = (
                f"{experts[0]} is a routed expert, which it leaves alone silently"
                if experts
                else "two formats are asked for"
            )
            raise InputError(f"dense: nf4 is packed by bitsandbytes when a model loads, and {why}; use layout plain")
        section = bitsandbytes_section(model, names, str(self.dtype).removeprefix("torch."))
        self.texts["bitsandbytes.json"] = json.dumps(section, indent=2) + "\n"
        self.warnings.append(
            "nf4: the rounded numbers are stored in the source's dtype; load with the BitsAndBytesConfig in "
            "bitsandbytes.json, which packs them without further loss"
        )


class _Shapes:
    """Names, dtypes and shapes of a packed weight's tensors, known before anything is packed."""

    def __init__(self, shape: tuple[int, ...], scheme: Scheme) -> None:
        self.rows, self.columns = shape
        self.scheme = scheme
        self.groups = 1 if scheme.group_size is None else self.columns // scheme.group_size

    def parts(self, dtype: torch.dtype) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        if self.scheme.kind == "fp8":
            scale = (1,) if self.scheme.per_tensor else (self.rows, 1)
            return [("weight", torch.float8_e4m3fn, (self.rows, self.columns)), ("weight_scale", dtype, scale)]
        bits = self.scheme.bits
        return [
            ("weight_packed", torch.int32, (self.rows, -(-self.columns * bits // 32))),
            ("weight_scale", dtype, (self.rows, self.groups)),
            ("weight_shape", torch.int64, (2,)),
        ]


def stored_scale(stored: StoredAs, quantised: Quantised, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Scales as they are stored: (out, groups), or (1,) for one a tensor."""
    if scheme.per_tensor:
        return quantised.scale.view(1).to(dtype)
    return rows_of(quantised.scale, stored.rows).to(dtype)


def pack(stored: StoredAs, weight: torch.Tensor, quantised: Quantised, scheme: Scheme) -> dict[str, torch.Tensor]:
    """A weight's codes as compressed-tensors packs them."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scale = rows_of(quantised.scale, "all" if scheme.per_tensor else stored.rows).cpu()
    numbers = rows_of(weight, stored.rows).cpu()
    state = {"weight": _on_codes(numbers, scale, scheme), "weight_scale": scale}
    section = QuantizationScheme.model_validate(scheme.section(["Linear"]))
    packed: dict[str, torch.Tensor] = BaseCompressor.get_value_from_registry(scheme.format).compress(state, section)
    return packed


def _on_codes(numbers: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Numbers (out, in), possibly rounded to 16 bits, moved to the multiple of the scale that they stand for.

    A 16-bit rounding moves code 255 by less than half a step, so the nearest code is the right one at every width.
    """
    if scheme.kind == "fp8":
        return (numbers / scale).to(torch.float8_e4m3fn).float() * scale
    groups = rearrange(numbers, "rows (groups size) -> rows groups size", groups=scale.shape[1])
    codes = (groups / scale[..., None]).round_()
    return rearrange(codes * scale[..., None], "rows groups size -> rows (groups size)")


def _new(name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], torch.Tensor]) -> NewTensor:
    def data() -> bytes | bytearray | memoryview:
        tensor = make().contiguous().cpu()
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, announced {shape}"
        assert tensor.dtype == dtype, f"{name}: {tensor.dtype}, announced {dtype}"
        # Flat first: an axis of length 1 keeps any stride, and `view` looks at it. The tensor's own memory.
        return tensor.reshape(-1).view(torch.uint8).numpy().data

    return NewTensor(name, NAMES[dtype], shape, dtype.itemsize * math.prod(shape), data)


def _version() -> str:
    """compressed-tensors' version. Raises InputError when it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("compressed-tensors")
    except PackageNotFoundError as error:
        raise InputError(
            "packing needs compressed-tensors; pip install 'moeprune[compress]', or export with layout plain"
        ) from error
