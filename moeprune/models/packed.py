"""Weights that compressed-tensors keeps packed, made plain module by module while a model is read layer by layer.

A plain load unpacks the whole model at its first forward pass; a streamed model has never all of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


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
