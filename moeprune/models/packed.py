"""Weights that compressed-tensors keeps packed, made plain module by module while a model is read layer by layer.

A plain load unpacks the whole model at its first forward pass; a streamed model has never all of it.
"""

from collections.abc import Iterable
from typing import Any


class PackedWeights:
    """What was packed in the modules that are unpacked now."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stores: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}  # module -> (its store, what it held)
        hook = getattr(model, "ct_decompress_hook", None)
        if hook is not None:  # it would unpack all modules, filled or not
            hook.remove()

    def unpack(self, paths: Iterable[str]) -> None:
        """Make the weights of these modules plain, where they are packed and all there."""
        for path in paths:
            module = self._model.get_submodule(path)
            if path in self._stores or getattr(module, "quantization_scheme", None) is None:
                continue
            stores = (module._parameters, module._buffers)
            if any(tensor is not None and tensor.is_meta for store in stores for tensor in store.values()):
                continue
            from compressed_tensors.compressors.base import decompress_module

            self._stores[path] = [(store, dict(store)) for store in stores]
            decompress_module(module)

    def pack_again(self, paths: Iterable[str]) -> None:
        """Put back what was packed."""
        for path in paths:
            for store, content in self._stores.pop(path, ()):
                store.clear()
                store.update(content)
