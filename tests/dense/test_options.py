"""`dense:` of a config: what round-trips, and what is refused."""

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from moeprune.dense.options import METHODS, DenseOptions


def test_the_union_holds_every_method_and_config_sections_round_trip():
    adapter = TypeAdapter(DenseOptions)
    for method in METHODS:
        options = method()
        assert adapter.validate_python(options.model_dump()) == options
    assert len({method.model_fields["name"].default for method in METHODS}) == len(METHODS)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "sparsegpt", "sparsity": 1.0}, "less than 1"),
        ({"name": "sparsegpt", "sparsity": 0}, "greater than 0"),
        ({"name": "sparsegpt", "sparsity": math.nan}, "finite number|less than|greater than"),
        ({"name": "sparsegpt", "sparsity": 0.6, "pattern": "2:4"}, "contradicts pattern 2:4"),
        ({"name": "wanda", "pattern": "4:2"}, "less than M"),
        ({"name": "gptq", "bits": 1}, "greater than or equal to 2"),
        ({"name": "gptq", "group_size": 0}, "greater than or equal to 2"),
        ({"name": "rtn", "targets": ["attn"]}, "target 'attn' is unknown"),
        ({"name": "rtn", "targets": []}, "at least 1"),
        ({"name": "rtn", "targets": ["re:("]}, "not a regular expression"),
        ({"name": "hwpq"}, "hwpq .* is not offered"),
        ({"name": "sparsgpt"}, "sparsegpt"),
        ({"name": "fp8", "scales": "channel"}, "Extra inputs"),
    ],
)
def test_bad_sections_are_refused(section, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(DenseOptions).validate_python(section)
