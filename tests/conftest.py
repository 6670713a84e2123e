"""Every test runs on the CPU with one thread and without a network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start: their metrics are compared to the byte

import pytest
import torch

from moeprune.models.loading import (
    LoadedModel,
    load_model,
)
from moeprune.models.options import ModelOptions

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reference() -> LoadedModel:
    """The embedded reference model and its tokenizer, float32, loaded once: a test must leave it as it found it."""
    return load_model(ModelOptions(path="reference", dtype="float32"), device="cpu")
