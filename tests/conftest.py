"""Every test runs on the CPU with one thread and without a network; the suite in two processes, a file in one."""

import io
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start: their metrics are compared to the byte

from collections.abc import Iterator

import pytest
import torch
from PIL import Image

from moeprune.console import LOGGER
from moeprune.models.loading import LoadedModel, load_model
from moeprune.models.options import ModelOptions

torch.set_num_threads(1)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for folders; none for files, so that a debugger and `-s` work there. `-n` says otherwise."""
    return 0 if all(name.partition("::")[0].endswith(".py") for name in config.args) else 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a slow test come first: a long file at the end would keep one process busy and the other idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def reference() -> LoadedModel:
    """The embedded reference model and its tokenizer, float32, loaded once: a test must leave it as it found it."""
    return load_model(ModelOptions(path="reference", dtype="float32"), device="cpu")


@pytest.fixture(scope="module")
def plain_figures() -> Iterator[None]:
    """Reports with pictures of one pixel: drawing takes most of the time of a small run, and is not what it shows."""
    pixel = io.BytesIO()
    Image.new("RGB", (1, 1)).save(pixel, format="png")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeprune.report.page.png", lambda draw, theme: pixel.getvalue())
        yield


@pytest.fixture(autouse=True)
def fresh_console() -> Iterator[None]:
    """After a test that ran the command line in this process, the package's lines reach `caplog` again."""
    yield
    LOGGER.handlers.clear()
    LOGGER.propagate = True
