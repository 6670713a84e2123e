"""config.json keeps its text; counts on the language model's path change, wherever they stand (R19)."""

import json

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.checkpoint.config_json import COUNT_KEYS, count_edits, edit_text, mtp_edits, quantization_edits
from moeprune.models.families import FAMILIES

FAMILY = FAMILIES["qwen3_moe"]


def edited(config, family=FAMILY, before=8, after=6):
    return json.loads(edit_text(json.dumps(config, indent=2), count_edits(config, family, before, after)[0]))


@pytest.mark.parametrize("key", COUNT_KEYS)
def test_every_alias_changes_at_every_level(key):
    for config in (
        {key: 8},
        {"text_config": {key: 8}},
        {key: 8, "text_config": {key: 8, "x": 8}, "num_experts_per_tok": 8},
    ):
        assert edited(config) == json.loads(json.dumps(config).replace(f'"{key}": 8', f'"{key}": 6'))


def test_both_aliases_change_together():
    assert edited({"num_experts": 8, "num_local_experts": 8}) == {"num_experts": 6, "num_local_experts": 6}


def test_other_parts_of_a_multimodal_config_stay():
    other = {"num_experts": 8}
    config = {
        "vision_config": other,
        "audio_config": other,
        "talker_config": {"text_config": other},
        "thinker_config": {"text_config": other},
    }
    assert edited(config) == config | {"thinker_config": {"text_config": {"num_experts": 6}}}


def test_a_count_that_says_something_else_is_left_and_reported():
    config = {"num_experts": 128, "num_local_experts": 8}
    edits, warnings = count_edits(config, FAMILY, 8, 6)
    assert edits == {("num_local_experts",): 6}
    assert len(warnings) == 1
    assert "num_experts is 128" in warnings[0]


def test_a_count_that_was_left_to_the_default_is_written_down():
    text = '{\n  "model_type": "mixtral",\n  "x": 1\n}'
    edits, _ = count_edits(json.loads(text), FAMILIES["mixtral"], 8, 6)
    assert json.loads(edit_text(text, edits)) == {"model_type": "mixtral", "x": 1, FAMILIES["mixtral"].count_keys[0]: 6}


def test_a_count_for_each_layer_is_refused():
    with pytest.raises(InputError, match=r"text_config\.num_experts"):
        count_edits({"text_config": {"num_experts": [8, 16]}}, FAMILY, 8, 6)


def test_nothing_else_of_the_text_changes():
    text = '{"a":1e-06, "num_experts"  :8,\r\n\t"big": 1e400, "nan": NaN, "text_config" : '
    text += '{"s": "\\u00e9 { \\" }", "num_experts": 8 }, "l":[ {"num_experts":8} ]}  \n'
    new = edit_text(text, count_edits(json.loads(text), FAMILY, 8, 16)[0])
    assert new == text.replace("  :8", "  :16").replace('"num_experts": 8 }', '"num_experts": 16 }')


def test_mtp_counts_become_zero():
    config = {"num_nextn_predict_layers": 1, "text_config": {"mtp_num_hidden_layers": 2, "num_mtp_layers": 0}}
    edits = mtp_edits(config, FAMILIES["deepseek_v3"])
    assert edits == {("num_nextn_predict_layers",): 0, ("text_config", "mtp_num_hidden_layers"): 0}


def test_module_lists_are_renamed_in_place():
    config = {
        "quantization_config": {
            "quant_method": "fp8",
            "ignore": ["lm_head", "a", "b"],
            "rules": {"a": {"bits": 8}, "b": {"bits": 4}},
        }
    }
    text = json.dumps(config, indent=2)
    edits = quantization_edits(config, {"lm_head": "lm_head", "a": "z", "b": None}.get)
    # Keys that are not names of modules pass through the same function in real use; here they are listed.
    assert edits[("quantization_config", "ignore")] == ["lm_head", "z"]
    new = edit_text(text, {("quantization_config", "ignore"): ["lm_head", "z"]})
    assert new == text.replace(',\n      "a",\n      "b"\n', ',\n      "z"\n')


def test_adding_a_section():
    text = '{\n  "a": 1\n}\n'
    new = edit_text(text, {("quantization_config",): {"quant_method": "x", "ignore": ["lm_head"]}})
    assert json.loads(new) == {"a": 1, "quantization_config": {"quant_method": "x", "ignore": ["lm_head"]}}
    assert new.startswith('{\n  "quantization_config": {\n    "quant_method"')
