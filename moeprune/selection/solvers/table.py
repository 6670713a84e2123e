"""The list of solvers. Each class is its own config section (`selection.solver`)."""

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from moeprune.selection.solvers.exact import Exact
from moeprune.selection.solvers.slsqp import Slsqp
from moeprune.selection.solvers.solver import Solver
from moeprune.selection.solvers.swap import Greedy, Relaxed, Swap, Thorough

_Row = Swap | Thorough | Relaxed | Slsqp | Exact | Greedy  # a new solver is one more here
SOLVERS: tuple[type[Solver], ...] = get_args(_Row)
SOLVER_NAMES: tuple[str, ...] = tuple(str(solver.model_fields["name"].default) for solver in SOLVERS)


def _named(value: Any) -> Any:
    """A bare name stands for the solver with default options, options without a name for the default solver's."""
    if isinstance(value, str):
        return {"name": value}
    return {"name": Swap.model_fields["name"].default, **value} if isinstance(value, dict) else value


AnySolver = Annotated[Annotated[_Row, Field(discriminator="name")], BeforeValidator(_named)]

__all__ = ["SOLVERS", "SOLVER_NAMES", "AnySolver", "Exact", "Greedy", "Relaxed", "Slsqp", "Solver", "Swap", "Thorough"]
