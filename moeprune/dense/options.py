"""`dense:` of a config: the list of methods in the order they run. Importing this loads no torch."""

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda, WandaUpdate
from moeprune.dense.methods.quantising import AWQ, FP8, GPTQ, NF4, RTN, Joint


def _explain_hwpq(section: Any) -> Any:
    if isinstance(section, dict) and section.get("name") == "hwpq":
        raise ValueError(
            "hwpq (arXiv 2501.16376) is not offered: its score could not be established from what is published; "
            'use sparsegpt or wanda with pattern "2:4" followed by fp8'
        )
    return section


_Row = Magnitude | Wanda | WandaUpdate | SparseGPT | Joint | GPTQ | AWQ | RTN | FP8 | NF4  # a new method is one more
METHODS = get_args(_Row)
DenseOptions = Annotated[Annotated[_Row, Field(discriminator="name")], BeforeValidator(_explain_hwpq)]
