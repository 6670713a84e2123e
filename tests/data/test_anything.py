"""Whatever stands in a record: it is used, or counted under a reason, or an error says what is wrong."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeprune.artifacts.errors import InputError
from moeprune.data.chats import Encoded
from moeprune.data.encoding import Encoder
from moeprune.data.options import Intake
from moeprune.data.readers import RecordProblem
from moeprune.data.records import normalise
from tests.data.conftest import CALCULATOR

scalar = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800")
junk = st.recursive(
    scalar,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


def mostly(good: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(good, good, good, good, junk)


arguments = mostly(st.sampled_from(['{"expression": "1"}', {"expression": "1"}, "null", "[1]", "{", ""]))
function = mostly(st.fixed_dictionaries({"name": mostly(st.just("f")), "arguments": arguments}))
call = mostly(
    st.fixed_dictionaries(
        {}, optional={"type": st.just("function"), "function": function, "name": st.just("f"), "arguments": arguments}
    )
)
part = mostly(st.fixed_dictionaries({"type": mostly(st.just("text")), "text": mostly(st.text(max_size=5))}))
message = mostly(
    st.fixed_dictionaries(
        {"role": mostly(st.sampled_from(["system", "user", "assistant", "tool", "developer"]))},
        optional={
            "content": mostly(st.text(max_size=10) | st.lists(part, max_size=2)),
            "tool_calls": mostly(st.lists(call, max_size=2)),
            "reasoning_content": junk,
            "name": junk,
        },
    )
)
tools = mostly(st.lists(st.just(CALCULATOR) | junk, max_size=2))
value = mostly(
    st.one_of(
        st.fixed_dictionaries({"messages": mostly(st.lists(message, max_size=5))}, optional={"tools": tools}),
        st.fixed_dictionaries(
            {
                "conversations": st.lists(
                    st.fixed_dictionaries(
                        {"from": mostly(st.sampled_from(["human", "gpt", "function_call"])), "value": junk}
                    ),
                    max_size=3,
                )
            }
        ),
        st.fixed_dictionaries({"prompt": mostly(st.text(max_size=9)), "completion": mostly(st.text(max_size=9))}),
        st.fixed_dictionaries({"text": mostly(st.text(max_size=30))}),
        st.fixed_dictionaries(
            {"input_ids": mostly(st.lists(st.integers(-1, 5000), max_size=9))}, optional={"attention_mask": junk}
        ),
    )
)


@pytest.mark.parametrize("count", ["all", "assistant", "completion", "tool"])
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=value, tabular=st.booleans())
def test_anything(tokenizer: Any, count: Any, record: Any, tabular: bool) -> None:
    try:
        normal = normalise(record, "f:1", tabular=tabular)
        normal.digest(0)
        encoded = Encoder(tokenizer, Intake(), count=count).encode([normal])[0]
    except (RecordProblem, InputError):  # InputError: the template drops a call
        return
    if isinstance(encoded, Encoded):
        assert len(encoded.ids) == len(encoded.counted) == len(encoded.roles) > 0
        assert encoded.counted.dtype == bool
        assert 0 <= encoded.ids.min() <= encoded.ids.max() < len(tokenizer)
    else:
        assert isinstance(encoded, RecordProblem)
