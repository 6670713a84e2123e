"""Loading: what packed checkpoints become in memory."""

import torch
from transformers import AutoModelForCausalLM

from moeprune.models.loading import unpacked
from tests.tiny import save_tiny


def test_what_is_kept_in_float32_stays_so_when_weights_get_another_width(tmp_path):
    source = save_tiny("qwen3_moe", tmp_path, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    frequencies = dict(model.named_buffers())["model.rotary_emb.inv_freq"].clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        plain = unpacked(model, dtype)
        assert {parameter.dtype for parameter in plain.parameters()} == {dtype}
        assert torch.equal(dict(plain.named_buffers())["model.rotary_emb.inv_freq"], frequencies)
