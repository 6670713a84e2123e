"""`moeprune inspect` and `moeprune families`: what a path holds, and the table of families."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import load_metrics, read_json
from moeprune.commands.arguments import Json, finish, start
from moeprune.reference import named

Description = tuple[list[str], dict[str, Any]]  # lines for people, and the same as plain data


def inspect(path: Path, as_json: Json = False) -> None:
    """What is in a statistics file, a plan, a metrics file, a run, a checkpoint or a model."""
    start(as_json)
    _show(inspect_path(path), as_json=as_json)


def families(as_json: Json = False) -> None:
    """The model families, with what is verified in the installed transformers release."""
    _show(families_table(), as_json=as_json)


def _show(description: Description, *, as_json: bool) -> None:
    lines, summary = description
    if as_json:
        finish(summary, None, as_json=True)
    else:
        print("\n".join(lines))


def inspect_path(path: Path) -> Description:
    """Lines and data about the path. Raises InputError when it holds nothing that moeprune knows."""
    path = named(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if path.is_dir():
        return _directory(path)
    if path.suffix == ".safetensors":
        return _statistics(path)
    from moeprune.artifacts.plan import FORMAT

    value = read_json(path)
    if isinstance(value, Mapping) and value.get("format") == FORMAT:
        return _plan(path)
    metrics = load_metrics(path)
    return [f"{name:48s} {value:.6g}" for name, value in metrics.items()], {"kind": "metrics", "metrics": metrics}


def _statistics(path: Path) -> Description:
    from moeprune.artifacts.statistics import FORMAT, RoutingStatistics

    statistics = RoutingStatistics.load(path)
    model = statistics.manifest["model"]
    lines = [
        f"routing statistics ({FORMAT}), key {statistics.key}",
        f"model: {model.get('path', '-')} ({model['model_type']}), fingerprint {statistics.fingerprint}",
    ]
    domains: dict[str, Any] = {}
    for domain, layers in statistics.domains.items():
        first = next(iter(layers.values()))
        unrouted = {name: [int(e) for e in (sums.count == 0).nonzero()[0]] for name, sums in layers.items()}
        never = sum(map(len, unrouted.values()))
        lines.append(f"domain {domain}: {int(first.tokens):,} counted tokens, {never} experts never routed")
        domains[domain] = {"tokens": int(first.tokens), "never_routed": {n: ids for n, ids in unrouted.items() if ids}}
    for layer in statistics.layers:
        groups = f", {layer.num_groups} groups" if layer.num_groups > 1 else ""
        lines.append(f"{layer.name}: {layer.num_experts} experts, top-{layer.top_k}{groups}; {layer.routing}")
    return lines, {"kind": "statistics", "manifest": dict(statistics.manifest), "domains": domains}


def _plan(path: Path) -> Description:
    from moeprune.artifacts.plan import FORMAT, PrunePlan

    plan = PrunePlan.load(path)
    lines = [
        f"prune plan ({FORMAT}) for {plan.model_type}, fingerprint {plan.model_fingerprint}",
        f"criterion {json.dumps(plan.criterion)}, budget {json.dumps(plan.budget)}, statistics {plan.statistics_key}",
    ]
    for layer in plan.layers:
        gap = "" if layer.gap is None else f", gap {100 * layer.gap:.2f} %"
        lines.append(
            f"{layer.name}: keeps {len(layer.kept)} of {layer.num_experts} ({layer.status}{gap}): {list(layer.kept)}"
        )
    return [*lines, *(f"warning: {w}" for w in plan.warnings)], {"kind": "plan", **plan.model_dump(mode="json")}


def _directory(path: Path) -> Description:
    from moeprune.artifacts.run import RunFile

    if (path / "run.json").is_file():
        run = RunFile.load(path)
        lines = [f"run {run.name}, created {run.created}, commit {run.commit or '-'}"]
        lines += [f"{stage}: done in {e['seconds']} s, key {e['key']}" for stage, e in run.stages.items()]
        lines += [f"{stage}: outdated, made from earlier inputs" for stage in run.outdated]
        return [*lines, *(f"warning: {w}" for w in run.warnings)], {"kind": "run", **run.model_dump(exclude_unset=True)}
    if (path / "grid.json").is_file():
        raise InputError(f"{path}: a grid; `moeprune report {path}` compares its runs, or inspect one of them")
    if not (path / "config.json").is_file():
        raise InputError(f"{path}: neither a run (run.json) nor a checkpoint (config.json)")
    from moeprune.checkpoint.inventory import checkpoint_fingerprint, inventory

    checkpoint = inventory(path)
    size = checkpoint.tensor_bytes
    data: dict[str, Any] = {
        "kind": "checkpoint",
        "model_type": checkpoint.config["model_type"],
        "fingerprint": checkpoint_fingerprint(checkpoint),
        "tensors": len(checkpoint.tensors),
        "bytes": size,
        "layers": [{"name": la.name, "num_experts": la.num_experts, "top_k": la.top_k} for la in checkpoint.layers],
    }
    lines = [
        f"checkpoint of {data['model_type']}, {len(checkpoint.tensors)} tensors, {size / 1e6:,.1f} MB, "
        f"fingerprint {data['fingerprint']}"
    ]
    lines += [f"{la.name}: {la.num_experts} experts, top-{la.top_k}; {la.routing}" for la in checkpoint.layers]
    if (path / "moeprune.json").is_file():
        data["moeprune"] = read_json(path / "moeprune.json")
        lines += _record(data["moeprune"])
    return lines, data


def _record(record: Mapping[str, Any]) -> list[str]:
    """What moeprune did to a checkpoint, by its moeprune.json."""
    base = record.get("base_model", {}).get("name") or "-"
    lines = []
    if record.get("plan"):
        layers = record["plan"]["layers"]
        experts = sum(layer["num_experts"] for layer in layers)
        pruned = experts - sum(len(layer["kept"]) for layer in layers)
        lines.append(f"{pruned:,} of {experts:,} experts pruned from {base}; the plan and config are in moeprune.json")
    for entry in record.get("dense", []):
        methods = ", ".join(str(method["name"]) for method in entry["methods"])
        changed = [row for row in entry["coverage"] if not str(row["methods"]).startswith("unchanged")]
        weights, parameters = (sum(row[name] for row in changed) for name in ("weights", "parameters"))
        lines.append(
            f"weights compressed by {methods}: {weights:,} weights with {parameters:,} parameters; the coverage table "
            "and config are in moeprune.json"
        )
    return lines


def families_table() -> Description:
    """The family table; a family the conformance suite covers is verified for the transformers release it ran on."""
    import transformers

    from moeprune.models.families import FAMILIES, VERIFIED_WITH

    same = transformers.__version__.startswith(VERIFIED_WITH + ".")
    rows: list[dict[str, Any]] = [
        {"model_type": row.model_type, "verified": row.verified and same, "how": row.how, "routing": row.routing}
        for row in FAMILIES.values()
    ]
    width = max(len(row["model_type"]) for row in rows)
    lines = [f"{'model_type':{width}s}  verified  how"]
    lines += [
        f"{r['model_type']:{width}s}  {'yes' if r['verified'] else 'no':8s}  "
        + "; ".join(filter(None, (r["how"], r["routing"])))
        for r in rows
    ]
    if not same:
        lines.append(
            f"warning: verified with transformers {VERIFIED_WITH}, installed is {transformers.__version__}; "
            "run `pytest tests/models` to verify here"
        )
    return lines, {"families": rows, "transformers": transformers.__version__, "verified_with": VERIFIED_WITH}
