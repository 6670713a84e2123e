"""The model of a run: its checkpoint as it lies on disk, and the same model in memory or with its weights on disk."""

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.inventory import Inventory, checkpoint_fingerprint, inventory
from moeprune.config.schema import RuntimeOptions
from moeprune.models.families import family_of
from moeprune.models.layers import family_for
from moeprune.models.loading import (
    LoadedModel,
    device_of,
    load_config,
    load_model,
    load_tokenizer,
    local_directory,
    number_bytes,
)
from moeprune.models.memory import free_bytes, loading_bytes
from moeprune.models.options import ModelOptions
from moeprune.models.streaming.model import StreamedModel, open_streamed

UNPACKING = "unpacked 2"  # how packed weights become numbers; raised when those change
SAMPLES, SAMPLE_BYTES = 256, 65_536


class Opened:
    """One model. Everything is made on first use: a resumed run whose stages are done loads no weights."""

    def __init__(self, options: ModelOptions, runtime: RuntimeOptions | None = None) -> None:
        self.options, self.runtime = options, runtime or RuntimeOptions()

    @cached_property
    def directory(self) -> Path:
        """The checkpoint's directory; its config is a supported MoE family."""
        directory = local_directory(self.options)
        family_of(family_for(load_config(directory)).model_type)
        return directory

    @cached_property
    def checkpoint(self) -> Inventory:
        """Every tensor of the checkpoint, from its headers alone."""
        return inventory(self.directory)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.checkpoint.layers

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.checkpoint)

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def loaded(self) -> LoadedModel:
        """The model in memory, with its tokenizer."""
        runtime = self.runtime
        return load_model(
            self.options,
            device=runtime.device,
            device_map=runtime.device_map,
            offload_folder=runtime.offload_folder,
        )

    @cached_property
    def streamed(self) -> StreamedModel:
        """The model with its weights on disk, for a pass that reads them layer by layer."""
        return open_streamed(self.options, device=self.runtime.device, rounded=True)

    @cached_property
    def streaming(self) -> bool:
        """Whether recording and fidelity read the weights layer by layer: as configured, or because they do not fit."""
        wanted = self.runtime.streaming
        return not self.fits if wanted == "auto" else wanted == "on"

    @property
    def fits(self) -> bool:
        """Whether the weights are in memory or there is room for them; a device_map makes room for itself."""
        if self.runtime.device_map is not None:
            return True
        free = free_bytes(device_of(self.runtime.device))
        if self.device_type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes share the machine
        return "loaded" in self.__dict__ or self.loading_bytes <= free

    @property
    def loading_bytes(self) -> int:
        """The most that loading the weights may hold."""
        return loading_bytes(self.weight_bytes, self.device_type)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return number_bytes(self.options.dtype, self.device_type) * self.checkpoint.memory.elements

    @cached_property
    def device_type(self) -> str:
        return device_of(self.runtime.device).partition(":")[0]

    @cached_property
    def identity(self) -> list[Any]:
        """What decides the model's numbers; part of the keys of stages."""
        contents = sorted((file.name, _sampled(file)) for file in self.directory.iterdir() if file.is_file())
        unpacked = [UNPACKING] if self.checkpoint.packed is not None else []
        return [self.options, self.fingerprint, contents, self.device_type, *unpacked]


class AnyModel(Opened):
    """A model that is only run: it may be dense."""

    @cached_property
    def directory(self) -> Path:
        directory = local_directory(self.options)
        load_config(directory)
        return directory


def _sampled(file: Path) -> str:
    """A digest of the file's size and of evenly spaced pieces of it; of all of it up to 16 MB.

    Weights that were trained on and saved to the same place change nearly every byte, so pieces tell.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(max(number * SAMPLE_BYTES if size <= SAMPLES * SAMPLE_BYTES else number * size // SAMPLES, 0))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
