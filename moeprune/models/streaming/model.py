"""A model whose weights stay on disk: each of its modules gets them for as long as it computes.

Weights that compressed-tensors keeps packed, made plain module by module while a model is read layer by layer.

A plain load unpacks the whole model at its first forward pass; a streamed model has never all of it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moeprune.artifacts.errors import InputError
from moeprune.models.layers import MoELayer, decoder_layers
from moeprune.models.loading import (
    device_of,
    load_config,
    local_directory,
    pretrained,
    without_bars,
)
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.conversion import WeightsOnDisk, keep, weights_left_out
from moeprune.models.streaming.waiting import tensors_in


class PackedWeights:
    """What was packed in the modules that are unpacked now.

    through: a dtype that unpacked weights are rounded to before they get the model's, as if the model had been loaded
    in it and widened then, with all that is not packed (which transformers leaves narrow beside packed weights).
    """

    def __init__(self, model: Any, through: torch.dtype | None = None) -> None:
        self._model, self._through = model, through
        self._stores: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}  # module -> (its store, what it held)
        hook = getattr(model, "ct_decompress_hook", None)
        if hook is not None:  # it would unpack all modules, filled or not
            hook.remove()

    def unpack(self, paths: Iterable[str]) -> None:
        """Make the weights of these modules plain, where they are packed and all there."""
        for path in paths:
            module = self._model.get_submodule(path)
            if self._through is not None and self._model.dtype == torch.float32:
                _cast(module, torch.float32)
            if path in self._stores or getattr(module, "quantization_scheme", None) is None:
                continue
            stores = (module._parameters, module._buffers)
            if any(tensor is not None and tensor.is_meta for store in stores for tensor in store.values()):
                continue
            from compressed_tensors.compressors.base import decompress_module

            self._stores[path] = [(store, dict(store)) for store in stores]
            if self._through is not None:
                _cast(module, self._through)
            decompress_module(module)
            if self._through is not None:
                _cast(module, self._model.dtype)

    def pack_again(self, paths: Iterable[str]) -> None:
        """Put back what was packed."""
        for path in paths:
            for store, content in self._stores.pop(path, ()):
                store.clear()
                store.update(content)


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give the module's floating-point numbers another width; packed ones are none."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dtype in (torch.float32, torch.bfloat16, torch.float16):
            module._parameters[name] = nn.Parameter(parameter.data.to(dtype), requires_grad=False)


FLOOR = 2**24  # bytes of activations that are always affordable


@dataclass(frozen=True)
class _Slot:
    """One parameter or persistent buffer: where it is kept, and what stands there while its bytes are on disk."""

    store: dict[str, Any]  # a module's _parameters or _buffers
    key: str
    empty: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        return self.store[self.key]

    @property
    def is_empty(self) -> bool:
        return self.store.get(self.key) is self.empty  # while it is unpacked, a packed tensor is not there at all


class StreamedModel:
    """A transformers model on the meta device and the weights that belong into it.

    `layers` are the decoder layers by name, in forward order: the elements of the model's largest list of modules.
    `stem` are the modules beside them that have weights; `containers` the weights of modules that layers lie in.
    """

    def __init__(
        self, model: Any, weights: WeightsOnDisk, device: str, *, unpacked_through: torch.dtype | None = None
    ) -> None:
        self.model, self.device = model, torch.device(device)
        self._weights, self._packed = weights, PackedWeights(model, unpacked_through)
        self.layers = decoder_layers(model)
        self._slots = dict(_slots(model))
        by_identity: dict[int, list[str]] = {}
        for name, slot in self._slots.items():
            by_identity.setdefault(id(slot.empty), []).append(name)
        self._tied = {name: names for names in by_identity.values() for name in names}
        self._require_complete()
        self.stem, self.containers = self._beside_the_layers()

    def _beside_the_layers(self) -> tuple[dict[str, list[str]], list[str]]:
        """Module -> its own weights, for modules outside of decoder layers; and the weights of those around them."""
        stem: dict[str, list[str]] = {}
        for name in self._slots:
            module = name.rpartition(".")[0]
            if not self._inside_a_layer(module):
                stem.setdefault(module, []).append(name)
        for name in {self._tied[name][0] for names in stem.values() for name in names}:
            self._stand_in(name)
        self._outside = [module for name, module in self.model.named_modules() if not self._inside_a_layer(name)]
        around = [module for module in stem if not module or self.layers[0].startswith(f"{module}.")]
        return stem, [name for module in around for name in stem.pop(module)]

    def _stand_in(self, name: str) -> None:
        """Let what stands for a weight of the stem be on the device, without memory: the model's code may ask an
        embedding for its device before it calls it. NaN, so that numbers that are used all the same are noticed."""
        meta = self._slots[name].empty
        number = torch.tensor(torch.nan if meta.is_floating_point() else 0).to(meta.dtype).to(self.device)
        stand_in: Tensor = number.expand(meta.shape)
        if isinstance(meta, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=False)
        keep(stand_in)
        for other in self._tied[name]:
            slot = replace(self._slots[other], empty=stand_in)
            self._slots[other] = slot
            slot.store[slot.key] = stand_in

    def _inside_a_layer(self, module: str) -> bool:
        return module.startswith(self.layers[0].removesuffix("0")) and module.count(".") >= self.layers[0].count(".")

    @property
    def names(self) -> list[str]:
        """All parameters and persistent buffers."""
        return list(self._slots)

    @property
    def unexpected(self) -> set[str]:
        """Names on disk that the model does not load."""
        return self._weights.unexpected

    def names_in(self, prefix: str) -> list[str]:
        """Parameters and persistent buffers of a module and all below it."""
        return [name for name in self._slots if name.startswith(prefix + ".")]

    def fill(self, names: Iterable[str]) -> None:
        """Read these parameters and buffers from disk and unpack packed ones; those that are there already stay."""
        wanted = {self._source(name) for name in names if self._slots[name].is_empty}
        with without_bars():
            self._weights.load(wanted)
        for source in wanted:
            assert not self._slots[source].is_empty, source
            value = self._slots[source].value
            for name in self._tied[source]:
                self._slots[name].store[self._slots[name].key] = value
        self._packed.unpack({name.rpartition(".")[0] for name in wanted})

    def empty(self, names: Iterable[str]) -> None:
        """Drop these parameters and buffers, and what is tied to them."""
        names = list(names)
        self._packed.pack_again({name.rpartition(".")[0] for name in names})
        for name in names:
            for other in self._tied[name]:
                slot = self._slots[other]
                slot.store[slot.key] = slot.empty

    def read_ahead(self, names: Iterable[str]) -> None:
        self._weights.read_ahead({self._source(name) for name in names})

    def _source(self, name: str) -> str:
        """The one of the names tied to this one that is on disk."""
        return next((other for other in self._tied[name] if self._weights.first_of(other) is not None), name)

    def _require_complete(self) -> None:
        lost = sorted(name for name in self._slots if self._weights.first_of(self._source(name)) is None)
        if lost:
            raise InputError(
                f"{lost[0]}: no tensor on disk makes it; the checkpoint is incomplete or of another architecture"
                + (f" ({len(lost)} parameters in all)" if len(lost) > 1 else "")
            )

    def bytes_of(self, names: Iterable[str]) -> int:
        """Bytes in memory."""
        return sum(self._slots[name].empty.nbytes for name in names)

    def addresses(self) -> set[int]:
        """Where the tensors that modules beside the layers hold lie in memory: weights, buffers, what they remember."""
        values = (value for module in self._outside for value in vars(module).values())
        held = (
            tensor
            for value in values
            if isinstance(value, Tensor | dict | tuple | list)
            for tensor in tensors_in(value)
        )
        return {tensor.untyped_storage().data_ptr() for tensor in held if not tensor.is_meta}

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest decoder layer in memory."""
        return max(self.bytes_of(self.names_in(layer)) for layer in self.layers)


def open_streamed(options: ModelOptions, *, device: str = "auto", rounded: bool = False) -> StreamedModel:
    """The model of a checkpoint without its weights, as `load_model` would give it otherwise.

    rounded: unpacked weights have no more digits than the checkpoint's own dtype, as in a plain load in that dtype.
    Raises InputError for a bad path, an unknown config and a checkpoint that does not fit the model.
    """
    directory = local_directory(options)
    stored = load_config(directory).dtype
    place = device_of(device)
    with weights_left_out() as left_out, without_bars():
        model = pretrained(directory, options.dtype, device=place, device_map={"": place})
    return StreamedModel(model, left_out[0], place, unpacked_through=stored if rounded else None)


def affordable_tokens(streamed: StreamedModel, moe_layers: Sequence[MoELayer]) -> int:
    """Tokens of a batch for which a layer computes with about half of the memory that its weights take."""
    return tokens_beside(streamed.model, streamed.layers, moe_layers, streamed.layer_bytes)


def affordable_tokens_in_memory(model: Any, moe_layers: Sequence[MoELayer]) -> int:
    """What `affordable_tokens` would be if the model were streamed: a pass of the same batches gives the same bits."""
    layers = decoder_layers(model)
    sizes = [sum(tensor.nbytes for tensor in model.get_submodule(name).state_dict().values()) for name in layers]
    return tokens_beside(model, layers, moe_layers, max(sizes))


def tokens_beside(model: Any, layers: Sequence[str], moe_layers: Sequence[MoELayer], layer_bytes: int) -> int:
    """Tokens of a batch whose activations take half of `layer_bytes`, or FLOOR.

    A token's activations are counted from the weights it meets: `weights / hidden` numbers come out of them, and about
    as many are made of those; an expert's inputs and outputs are held once for each of the top_k.
    """
    hidden, most = int(model.config.get_text_config().hidden_size), 1
    experts_of = {layer.name: layer for layer in moe_layers}
    for name in layers:
        everything = sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
        inside = [layer for path, layer in experts_of.items() if path.startswith(f"{name}.")]
        routed = 0
        for layer in inside:
            experts = sum(parameter.numel() for parameter in layer.experts.parameters())
            everything -= experts
            routed += layer.info.top_k * (2 * experts // layer.info.num_experts // hidden + 2 * hidden)
        most = max(most, routed + 2 * everything // hidden + 8 * hidden)
    width = max(4, model.dtype.itemsize)  # kernels and our own sums work in float32
    return max(1, max(FLOOR, layer_bytes // 2) // (most * width))


def _slots(model: nn.Module) -> Iterator[tuple[str, _Slot]]:
    for path, module in model.named_modules():
        transient = module._non_persistent_buffers_set
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None and not (store is module._buffers and key in transient):
                    yield f"{path}.{key}" if path else key, _Slot(store, key, tensor)
