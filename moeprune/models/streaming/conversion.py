"""From tensors on disk to parameters in memory, a few parameters at a time, by transformers' own conversions.

The only module of this room that touches transformers' loading internals. A model is opened by `from_pretrained`
itself with the weights left out, so dtypes, buffers, quantisation and tied weights are exactly those of a plain load.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from moeprune.artifacts.errors import InputError
from moeprune.models.disk_names import DiskNames, expert_number
from moeprune.models.disk_tensors import TensorOnDisk, read_ahead, tensors_on_disk
from moeprune.models.families import VERIFIED_WITH

BLOCK = 2**20  # bytes of a parameter that are converted at a time where experts are stored one by one


class WeightsOnDisk:
    """What every parameter and persistent buffer of an opened model is made from, and how to make it."""

    def __init__(self, model: Any, files: Iterable[str], load_config: Any) -> None:
        self._model, self._load_config = model, load_config
        self.tensors = tensors_on_disk(files)
        self.names = set(model.state_dict())
        self._made_from, self._also_makes = self._sources()

    def _sources(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Parameter -> names on disk; and for what a conversion makes beside its first parameter, that parameter."""
        names = DiskNames(self._model, self._load_config.weight_mapping or [])
        made_from: dict[str, list[str]] = {}
        also_makes: dict[str, str] = {}
        for name in self.tensors:
            target, others = names.conversion(name)
            made_from.setdefault(target, []).append(name)
            also_makes |= dict.fromkeys(others, target)
        return made_from, also_makes

    def first_of(self, name: str) -> str | None:
        """The parameter to ask for in order to get `name`: itself, or the first one of the same conversion."""
        return name if name in self._made_from else self._also_makes.get(name)

    @property
    def missing(self) -> set[str]:
        """Names in memory that nothing on disk makes; tied ones are among them."""
        return {name for name in self.names if self.first_of(name) is None}

    @property
    def unexpected(self) -> set[str]:
        """Names on disk that make nothing in memory."""
        return {source for target, sources in self._made_from.items() if target not in self.names for source in sources}

    def load(self, names: Iterable[str]) -> None:
        """Set these parameters and buffers of the model, the largest first, so that what converting one needs beside
        itself is held while the others are not.

        Raises InputError when a tensor on disk does not fit the model.
        """
        names = set(names)
        for target in sorted(self._targets(names), key=lambda name: (-self._bytes(self._made_from[name]), name)):
            blocks = self._blocks(target)
            if len(blocks) == 1:
                self._convert(blocks[0])
            else:
                self._convert_in_blocks(target, blocks)
        self._settle({name.rpartition(".")[0] for name in names})

    def _settle(self, paths: Iterable[str]) -> None:
        """What a plain load does once weights are set: a model may write constants into tensors that were loaded."""
        from transformers import PreTrainedModel
        from transformers.initialization import guard_torch_init_functions

        with torch.no_grad(), guard_torch_init_functions():
            for path in sorted(paths):
                around = accumulate(path.split("."), "{}.{}".format)
                models = [m for m in map(self._model.get_submodule, around) if isinstance(m, PreTrainedModel)]
                [self._model, *models][-1]._init_weights(self._model.get_submodule(path))

    def read_ahead(self, names: Iterable[str]) -> None:
        """Start reading what `load` will need into the operating system's cache."""
        read_ahead([self.tensors[source] for target in self._targets(names) for source in self._made_from[target]])

    def _targets(self, names: Iterable[str]) -> set[str]:
        return {first for first in map(self.first_of, names) if first is not None}

    def _bytes(self, sources: Iterable[str]) -> int:
        return sum(self.tensors[name].size for name in sources)

    def _blocks(self, target: str) -> list[list[str]]:
        """The names on disk, cut into runs of experts of at most BLOCK bytes where every expert has its own tensors."""
        sources = self._made_from[target]
        experts: dict[int, list[str]] = {}
        for name in sources:
            number = expert_number(name)
            if number is None:
                return [sources]
            experts.setdefault(number, []).append(name)
        rows = self._model.get_parameter_or_buffer(target).shape[0]
        if sorted(experts) != list(range(rows)) or len({len(names) for names in experts.values()}) != 1:
            return [sources]
        each = max(1, BLOCK // self._bytes(experts[0]))
        starts = range(0, rows, each)
        return [[name for expert in range(s, min(s + each, rows)) for name in experts[expert]] for s in starts]

    def _convert(self, sources: list[str]) -> None:
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        lazy: dict[str, TensorOnDisk] = {name: self.tensors[name] for name in sources}
        information, _ = convert_and_load_state_dict_in_model(self._model, lazy, self._load_config)
        for name, on_disk, here in information.mismatched_keys:
            raise InputError(
                f"{name}: has shape {tuple(on_disk)} on disk and {tuple(here)} in the model; config and weights differ"
            )
        for name, error in information.conversion_errors.items():
            raise InputError(f"{name}: transformers cannot convert what is on disk ({error.strip().splitlines()[-1]})")

    def _convert_in_blocks(self, target: str, blocks: list[list[str]]) -> None:
        """The same tensor as in one go: block by block the model has a parameter of fewer experts for a moment."""
        path, _, name = target.rpartition(".")
        store = self._model.get_submodule(path)._parameters
        whole = store[name]
        assert whole is not None
        filled = whole.data  # without memory, until the dtype and the device that a conversion gives are known
        position = 0
        for block in blocks:
            rows = len({expert_number(source) for source in block})
            store[name] = nn.Parameter(whole.new_empty((rows, *whole.shape[1:])), requires_grad=False)
            self._convert(block)
            part = store[name].data
            if not position:
                filled = torch.empty(whole.shape, dtype=part.dtype, device=part.device)
            filled[position : position + rows] = part
            position += rows
        store[name] = nn.Parameter(filled, requires_grad=False)
        keep(store[name])


def keep(tensor: Any) -> None:
    """Mark a tensor as one that transformers must not initialise."""
    tensor._is_hf_initialized = True


@contextmanager
def weights_left_out() -> Iterator[list[WeightsOnDisk]]:
    """Inside, `from_pretrained` opens models without weights: parameters and persistent buffers are on the meta device,
    all else is as it always is. The list fills with the weights that each one left out.

    Raises InputError when transformers lacks what this needs.
    """
    owner, convert = _internals()
    left_out: list[WeightsOnDisk] = []

    def leave_out(model: Any, state_dict: Any, files: Any, load_config: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        weights = WeightsOnDisk(model, files or [], load_config)
        information, index = convert(model, {}, load_config)
        information.missing_keys = weights.missing  # so that tied weights are tied, as they are after a plain load
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name not in information.missing_keys:
                keep(tensor)
        left_out.append(weights)
        return information, index

    original = owner.__dict__["_load_pretrained_model"]
    owner._load_pretrained_model = staticmethod(leave_out)
    try:
        yield left_out
    finally:
        owner._load_pretrained_model = original


def _internals() -> tuple[Any, Callable[..., Any]]:
    """The class whose loading step is replaced, and the function that converts and sets weights."""
    import transformers

    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import convert_and_load_state_dict_in_model

        assert isinstance(PreTrainedModel.__dict__["_load_pretrained_model"], staticmethod)
    except (ImportError, KeyError, AssertionError) as error:
        raise InputError(
            f"transformers {transformers.__version__} loads weights in a way that is not known here, so a model cannot "
            f"be streamed ({error}); install transformers {VERIFIED_WITH}, or set runtime.streaming=off"
        ) from error
    return PreTrainedModel, convert_and_load_state_dict_in_model
