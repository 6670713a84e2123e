"""Open a model and its tokenizer from a path, a hub name or `reference`, with errors before the expensive step."""

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.models.options import DeviceMap, Dtype, ModelOptions
from moeprune.reference import MODEL_DIR

ALIGNMENT = 64  # bytes; what torch gives to memory it allocates


@dataclass(frozen=True)
class LoadedModel:
    model: Any  # a transformers PreTrainedModel in eval mode
    tokenizer: Any
    path: Path | None  # the local directory of the checkpoint, None for a hub model that was not resolved


def resolve_path(path: str) -> str:
    """A local directory as it is, `reference` as the embedded model's directory, anything else as a hub name.

    Raises InputError for something that looks like a local path and does not exist or has no config.json.
    """
    if path == "reference":
        return str(MODEL_DIR)
    local = Path(path).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise InputError(f"model.path: {path} has no config.json; give the directory of a checkpoint")
        return str(local)
    if local.exists():
        raise InputError(f"model.path: {path} is a file; give the directory of a checkpoint")
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise InputError(f"model.path: {path} does not exist; give a checkpoint directory, a hub name or `reference`")
    return path


def local_directory(options: ModelOptions) -> Path:
    """The checkpoint's directory on this machine; a hub model is downloaded into the hub's cache first."""
    path = resolve_path(options.path)
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(path, revision=options.revision))
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise InputError(f"model.path: {path} is neither a directory nor a model the hub gave ({error})") from error


def number_bytes(dtype: Dtype, device_type: str) -> int:
    """Bytes of one weight in memory when it is loaded as `dtype`; 16-bit checkpoints for `auto` on a GPU."""
    return 4 if dtype == "float32" or (dtype == "auto" and device_type == "cpu") else 2


def device_of(device: str) -> str:
    """`auto` resolved to cuda where torch has one, otherwise cpu. Raises InputError for a device that is not there.

    Each of torchrun's processes on a machine takes a GPU of its own, unless one is named.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"runtime.device: {device!r} is not a device; give auto, cpu, cuda or cuda:1") from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"runtime.device: torch sees {torch.cuda.device_count()} GPUs, not {device}; give auto or cpu")
    return device


def load_config(directory: Path) -> Any:
    """The transformers config of a checkpoint directory. Raises InputError when transformers does not know it."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory)
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"{directory}: transformers cannot read this config ({error})") from error


def load_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (ValueError, KeyError, OSError) as error:
        raise InputError(f"{directory}: no tokenizer that transformers can read ({error})") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # without its files transformers makes an empty one
        raise InputError(f"{directory}: the tokenizer is empty; are its files (tokenizer.json, ...) in the directory?")
    return tokenizer


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws a bar for every load, also into logs; ours are enough."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_model(
    options: ModelOptions,
    *,
    device: str = "auto",
    device_map: DeviceMap | None = None,
    offload_folder: str | None = None,
) -> LoadedModel:
    """The model in eval mode on the device, or spread by accelerate as `device_map` says, and its tokenizer.

    InputError for a bad path, an unknown config and a map that names what is not there.
    """
    directory = local_directory(options)
    load_config(directory)
    place = device_of(device)
    with without_bars():
        if device_map is None:
            model = _whole(directory, options.dtype, place)
        else:
            model = _spread(directory, options.dtype, place, device_map, offload_folder)
    align(model)
    return LoadedModel(model, load_tokenizer(directory), directory)


def _whole(directory: Path, dtype: Dtype, device: str) -> Any:
    """The model on one device. What compressed-tensors packed is unpacked, which its first forward does."""
    import torch

    packed = getattr(load_config(directory), "quantization_config", None) or {}
    if packed.get("quant_method") != "compressed-tensors":
        return pretrained(directory, dtype, device=device).to(device)
    model = auto_class(load_config(directory)).from_pretrained(directory, dtype="auto").eval()
    if dtype == "auto":
        wanted = torch.float32 if device == "cpu" else model.dtype
    else:
        wanted = getattr(torch, dtype)
    return unpacked(model, wanted).to(device)


def load_written(directory: Path, *, like: Any) -> Any:
    """The checkpoint as stock transformers loads it, on the device and in the dtype of `like`."""
    with without_bars():
        model = type(like).from_pretrained(directory, dtype="auto").eval()
    return unpacked(model, like.dtype).to(like.device)


def unpacked(model: Any, dtype: Any) -> Any:
    """The model with what compressed-tensors packed made plain, in its own dtype first and in `dtype` then.

    What is kept in float32 (inverse frequencies, a router's bias) stays so, as in a plain load.
    """
    import torch

    with torch.no_grad():
        model(input_ids=torch.arange(8)[None], use_cache=False)  # unpacks
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.to(dtype)
    return model


def _spread(directory: Path, dtype: Dtype, device: str, device_map: DeviceMap, folder: str | None) -> Any:
    """The model with its modules on several devices, or waiting in memory or in `folder`."""
    from moeprune.models.device_map import align_waiting, require_device_map, resolved
    from moeprune.models.layers import require_movable

    require_device_map(device_map, folder)
    if not isinstance(device_map, str):
        empty = empty_model(load_config(directory))
        device_map = resolved(empty, device_map)
        require_movable(empty, device_map)
    try:
        with warnings.catch_warnings():  # a parameter beside submodules is named by itself, which accelerate remarks on
            warnings.filterwarnings("ignore", message="The following device_map keys do not match")
            model = pretrained(directory, dtype, device=device, device_map=device_map, offload_folder=folder)
    except ValueError as error:  # accelerate's answer to what does not fit where it was told to go
        raise InputError(f"runtime.device_map: {error}") from error
    align_waiting(model, ALIGNMENT)
    return model


def align(model: Any) -> None:
    """Move weights that lie in a mapped file at any address into memory of their own, as all other weights lie.

    CPU kernels round by the alignment of what they read: logits would depend on the order of tensors in a file.
    """
    for tensor in model.parameters():
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
            tensor.data = tensor.data.clone()


def pretrained(directory: Path, dtype: Dtype, *, device: str, **arguments: Any) -> Any:
    """What transformers makes of the checkpoint, in eval mode, on the CPU unless `arguments` for it say otherwise.

    dtype auto: float32 for a CPU, the checkpoint's own for a GPU.
    """
    import torch

    wanted: Any = dtype
    if wanted == "auto":
        wanted = "float32" if device == "cpu" else "auto"
    if wanted != "auto":
        wanted = getattr(torch, wanted)
    return auto_class(load_config(directory)).from_pretrained(directory, dtype=wanted, **arguments).eval()


def auto_class(config: Any) -> Any:
    """The transformers auto class that loads this config: causal language models first, multimodal ones second."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    for candidate in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in candidate._model_mapping:
            return candidate
    raise InputError(f"{config.model_type}: transformers has no language model class for this config")


def model_class(config: Any) -> tuple[Any, Any]:
    """(class, config) as the auto class resolves them: a language model may take only the text part of the config."""
    resolved = auto_class(config)._model_mapping[type(config)]
    return resolved, config if resolved.config_class is type(config) else config.get_text_config()


def empty_model(config: Any) -> Any:
    """The model that loading a checkpoint with this config gives, on the meta device: shapes without memory."""
    import torch

    with torch.device("meta"):
        return auto_class(config).from_config(copy.deepcopy(config)).eval()
