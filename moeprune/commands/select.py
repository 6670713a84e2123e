"""`moeprune select`: the prune plan of a statistics file; options as they are typed on the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from moeprune.artifacts.errors import InputError
from moeprune.commands.arguments import Json, Values, finish, name_and_value, number, require_writable, start
from moeprune.console import warn


def select(
    statistics: Path,
    output: Annotated[Path, typer.Option("-o", "--output", help="The plan to write (.json).")],
    criterion: Annotated[str, typer.Option(help="A criterion's name, file:PATH or package.module:Class.")] = "hope",
    product: Annotated[str | None, typer.Option(help="hope: norms or outputs.")] = None,
    normalise: Annotated[str | None, typer.Option(help="hope: co_selected or all_tokens.")] = None,
    no_pairwise: Annotated[bool, typer.Option("--no-pairwise", help="hope: the diagonal alone.")] = False,
    prune: Annotated[str, typer.Option(help="0.25: a fraction; 8: a count a layer.")] = "0.5",
    scope: Annotated[str, typer.Option(help="layer or global.")] = "layer",
    solver: Annotated[str, typer.Option(help="swap, thorough, relaxed, slsqp, exact or greedy.")] = "swap",
    certificate: Annotated[bool, typer.Option("--certificate", help="Also a lower bound and the gap.")] = False,
    mix: Annotated[list[str] | None, typer.Option(help="NAME=WEIGHT; may be given again.")] = None,
    multiple_of: Annotated[int, typer.Option(help="Keep a multiple of this many.")] = 1,
    floor: Annotated[str | None, typer.Option(help="A layer keeps at least this share (0.25) or count (8).")] = None,
    ceiling: Annotated[str | None, typer.Option(help="A layer keeps at most this share or count.")] = None,
    must_keep: Annotated[list[str] | None, typer.Option(help="LAYER=3,7; may be given again.")] = None,
    keep_at_least: Annotated[
        list[str] | None, typer.Option(help="Share of routed tokens that must stay, or NAME=SHARE; may be given again.")
    ] = None,
    protect_super_experts: Annotated[
        bool, typer.Option("--protect-super-experts", help="Experts with extreme outputs stay.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the solver and of the random criterion.")] = 0,
    as_json: Json = False,
) -> None:
    """A prune plan from recorded statistics; needs no model."""
    start(as_json)
    require_writable(output, ".json")
    from moeprune.artifacts.statistics import RoutingStatistics
    from moeprune.config.load import parse_scalar, validate
    from moeprune.run.select_stage import describe_mix, describe_plan
    from moeprune.selection import select as selection
    from moeprune.selection.options import SelectionOptions

    hope = {"product": product, "normalise": normalise, "pairwise": False if no_pairwise else None}
    # A typed number keeps its point, which tells shares from counts.
    numbers = {"prune": prune, "floor": floor, "ceiling": ceiling}
    budget = {
        **{name: parse_scalar(text) for name, text in numbers.items() if text is not None},
        "scope": scope,
        "multiple_of": multiple_of,
        "must_keep": _must_keep(must_keep or []),
        "keep_at_least": _keep_at_least(keep_at_least or []),
        "protect_super_experts": protect_super_experts,
    }
    value = {
        "criterion": _criterion(criterion, hope, seed),
        "budget": budget,
        "solver": {"name": solver, "certificate": certificate, "seed": seed},
        "mix": _mix(mix or []),
    }
    options = validate(SelectionOptions, value, place="select")
    recorded = RoutingStatistics.load(statistics)
    describe_mix(recorded, options)
    plan = selection.select(recorded, options)
    plan.save(output)
    describe_plan(plan)
    for warning in plan.warnings:
        warn(warning)
    finish({"plan": output, **plan.model_dump(mode="json")}, output, as_json=as_json)


def _criterion(name: str, hope: Values, seed: int) -> dict[str, Any]:
    given = {key: value for key, value in hope.items() if value is not None}
    if name != "hope" and given:
        option = next(iter(given)).replace("pairwise", "no-pairwise")
        raise InputError(f"--{option} belongs to --criterion hope, not {name}")
    if name.startswith("file:"):
        return {"name": "file", "path": name.removeprefix("file:")}
    return {"name": name, **given} | ({"seed": seed} if name == "random" else {})


def _mix(entries: Sequence[str]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for name, weight in map(name_and_value, entries):
        if name in weights:
            raise InputError(f"--mix {name}: given twice; give each domain one weight")
        weights[name] = number(weight, f"--mix {name}")
    return weights


def _keep_at_least(entries: Sequence[str]) -> float | dict[str, float] | None:
    if not entries:
        return None
    if len(entries) == 1 and "=" not in entries[0]:
        return number(entries[0], "--keep-at-least")
    return {name: number(share, f"--keep-at-least {name}") for name, share in map(name_and_value, entries)}


def _must_keep(entries: Sequence[str]) -> dict[str, list[int]]:
    kept: dict[str, list[int]] = {}
    for layer, ids in map(name_and_value, entries):
        if not all(part.strip().isdigit() for part in ids.split(",")):
            raise InputError(f"--must-keep {layer}={ids}: expected LAYER=3,7 with expert ids")
        kept[layer] = kept.get(layer, []) + [int(part) for part in ids.split(",")]
    return kept
