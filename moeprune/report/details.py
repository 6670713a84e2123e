"""The second half of a run's report: layers, dense weights, calibration data, warnings and provenance.

Functions return texts and tables for the holes of run.md.jinja.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moeprune.artifacts.plan import LayerPlan
from moeprune.artifacts.run import STAGES
from moeprune.report.page import Table, bad
from moeprune.report.run_record import RunRecord
from moeprune.report.style import amount, data_size, duration, number, percent
from moeprune.selection.stability import UNSTABLE

WIDE_GAP = 0.05  # certified gap above which a better set may be worth looking for
WEAK = ("time_limit", "not_converged")  # statuses of a search that did not end by itself
ROLES = ("system", "user", "assistant", "tool", "text", "template")
STATUS = {
    "proved_optimal": "proved optimal",
    "certified_gap": "certified gap",
    "local_optimum": "local optimum",
    "given": "given",
    "time_limit": "stopped by time limit",
    "not_converged": "not converged",
}


def layer_table(record: RunRecord) -> Table | None:
    """One row a layer: what is kept, what it costs, how good the choice provably is and how stable."""
    if record.plan is None:
        return None
    rows = []
    for layer in record.plan.layers:
        status, jaccard = STATUS[layer.status], (layer.stability or {}).get("jaccard")
        stable = "–" if jaccard is None else f"{jaccard:.2f}"
        rows.append(
            [
                f"`{layer.name}`",
                f"{len(layer.kept)} of {layer.num_experts}",
                "–" if layer.cost is None else number(layer.cost),
                "–" if layer.bound is None else number(layer.bound),
                "–" if layer.gap is None else percent(layer.gap, places=2),
                bad(status) if layer.status in WEAK else status,
                bad(stable) if jaccard is not None and jaccard < UNSTABLE else stable,
                _regret(layer.stability),
            ]
        )
    return Table(["Layer", "#Kept", "#Cost", "#Lower bound", "#Gap", "Status", "#Stability", "#Regret"], rows)


def _regret(stability: Mapping[str, float] | None) -> str:
    regrets = [value for name, value in (stability or {}).items() if name.startswith("regret")]
    return percent(max(regrets), places=1) if regrets else "–"


def dense_table(record: RunRecord) -> Table | None:
    """What the dense stage did to which weights; None for runs without one."""
    entry = record.stages.get("dense")
    if entry is None:
        return None
    rows = [
        [
            row["role"].replace("_", " ").replace("-", "–"),
            row["methods"],
            f"{row['weights']:,}",
            amount(row["parameters"]),
            *_measured(entry.get("counts", {}), row),
            f"`{row['example']}`",
        ]
        for row in entry.get("coverage", [])
    ]
    return Table(["Role", "Method", "#Weights", "#Parameters", "#Zeros", "#Bits", "For example"], rows)


def compression(record: RunRecord) -> dict[str, str]:
    """How long the dense stage took, and the weights' size after and before it."""
    entry = record.stages.get("dense")
    if entry is None:
        return {}
    size, before = data_size(entry["bytes"]), data_size(entry["bytes_base"])
    return {"time": duration(entry["seconds"]), "size": size, "size_before": before}


def _measured(counts: Mapping[str, float], row: Mapping[str, Any]) -> list[str]:
    """The share of zeros and the bits a compressed weight of this role takes."""
    if str(row["methods"]).startswith("unchanged"):
        return ["–", "–"]
    zeros, bits = (counts.get(f"dense/{row['role']}/{name}") for name in ("sparsity", "bits"))
    return ["–" if zeros is None else percent(zeros, places=1), "–" if bits is None else number(bits)]


def data_table(record: RunRecord) -> Table | None:
    """What calibration read, used and left out, a domain a row."""
    manifest = _manifest(record)
    weights = record.plan.mix if record.plan else {}
    mixed = {name: weights.get(name, 1.0) * _tokens(record, name) for name in manifest}
    total = sum(mixed.values()) or 1.0
    rows = [
        [
            name,
            f"`{info.get('path', '')}`",
            _count(info.get("records_read")),
            _count(info.get("records_used")),
            _skipped(info),
            _count(info.get("tokens")),
            f"{int(_tokens(record, name)):,}",
            percent(mixed[name] / total),
            _lost(info),
        ]
        for name, info in manifest.items()
    ]
    columns = ["Domain", "Source", "#Records read", "#Used", "Skipped", "#Tokens", "#Counted", "#Share"]
    return Table([*columns, "#Lost to length"], rows)


def role_table(record: RunRecord) -> Table | None:
    """Whose tokens they were."""
    tokens = {name: info.get("tokens_by_role", {}) for name, info in _manifest(record).items()}
    present = {role for counts in tokens.values() for role in counts}
    roles = [role for role in ROLES if role in present] + sorted(present - {*ROLES})
    rows = [[name, *(_count(counts.get(role, 0)) for role in roles)] for name, counts in tokens.items()]
    return Table(["Tokens by role", *(f"#{role}" for role in roles)], rows) if roles else None


def skipped(record: RunRecord) -> list[str]:
    """A few records that were skipped, and why."""
    return [f"`{text}`" for info in _manifest(record).values() for text in info.get("skipped_examples", [])][:5]


def _manifest(record: RunRecord) -> Mapping[str, Mapping[str, Any]]:
    domains: Mapping[str, Mapping[str, Any]] = record.statistics.manifest["domains"] if record.statistics else {}
    return domains


def _tokens(record: RunRecord, domain: str) -> float:
    assert record.statistics is not None
    sums = next(iter(record.statistics.domains[domain].values()))
    return float(np.sum(sums.tokens))


def _count(value: Any) -> str:
    return "–" if value is None else f"{int(value):,}"


def _skipped(info: Mapping[str, Any]) -> str:
    reasons = [f"{count} {reason}" for reason, count in info.get("records_skipped", {}).items()]
    for key, words in (("records_beyond_limit", "beyond the token limit"), ("records_of_other_part", "held out")):
        if info.get(key):
            reasons.append(f"{info[key]} {words}")
    return ", ".join(reasons) or "none"


def _lost(info: Mapping[str, Any]) -> str:
    share = info.get("overflow", {}).get("share_tokens_lost")
    return "–" if share is None else percent(share, places=1 if 0 < share < 0.1 else 0)


def warnings(record: RunRecord) -> list[str]:
    """Everything a reader has to know before believing the numbers."""
    recorded = _recorded(record)
    recorded += [
        f"{label}: {w}" for label, plan in record.baselines.items() for w in plan.warnings if w not in recorded
    ]
    return [*_unfinished(record), *_doubts(record), *dict.fromkeys(recorded)]


def _recorded(record: RunRecord) -> list[str]:
    """The warnings of the run's stages and of its plan."""
    return [*record.run.get("warnings", []), *(record.plan.warnings if record.plan else ())]


def _unfinished(record: RunRecord) -> list[str]:
    wanted = [stage for stage in STAGES[:-1] if stage != "dense" or record.section("dense")]
    open_stages = [f"`{stage}`" for stage in wanted if stage not in record.stages]
    items = [f"**Unfinished**: the run has not done {', '.join(open_stages)}"] if open_stages else []
    expected = {"select": "plan.json", "evaluate": "metrics.json"}
    optional = {name for stage, name in expected.items() if stage not in record.stages}
    return items + [f"**Missing**: {sentence}" for sentence in record.missing if sentence.split()[0] not in optional]


def _doubts(record: RunRecord) -> list[str]:
    """What the numbers themselves show, unless a stage has recorded it."""
    recorded = " ".join(_recorded(record))
    plans = record.plan.layers if record.plan else ()
    items = []
    outside = [domain for domain in record.domains if domain not in record.calibrated]
    if outside:
        items.append(
            f"**Not in calibration**: {', '.join(outside)}. Experts that only such data needs look useless and go; "
            "expect these abilities to be lost, not weakened"
        )
    if record.dead and "no token was routed" not in recorded:
        dead = "; ".join(f"`{name}`: {', '.join(map(str, ids))}" for name, ids in record.dead.items())
        items.append(f"**Dead experts**, which no calibration token was routed to: {dead}")
    for status in WEAK:
        named = [f"`{layer.name}`" for layer in plans if layer.status == status]
        if named:
            items.append(f"**Solver {STATUS[status]}** in {', '.join(named)}: the sets may be far from the best")
    shaky = [f"`{layer.name}` ({_jaccard(layer):.2f})" for layer in plans if _jaccard(layer) < UNSTABLE]
    if shaky and "unstable sets" not in recorded:
        items.append(
            f"**Unstable sets**, chosen differently from the two halves of the data (Jaccard below {UNSTABLE}): "
            f"{', '.join(shaky)}; more calibration data would settle them"
        )
    wide = [f"`{layer.name}` ({percent(layer.gap, places=1)})" for layer in plans if layer.gap and layer.gap > WIDE_GAP]
    if wide:
        items.append(f"**Wide gap** between cost and lower bound: {', '.join(wide)}; a better set may exist")
    return items


def _jaccard(layer: LayerPlan) -> float:
    return (layer.stability or {}).get("jaccard", 1.0)


def stage_table(record: RunRecord) -> Table | None:
    """The finished stages with the keys that identify their inputs."""
    rows = [
        [
            stage,
            f"`{entry.get('key', '–')}`",
            "–" if entry.get("seconds") is None else duration(entry["seconds"]),
            _stage_note(entry),
        ]
        for stage, entry in record.stages.items()
    ]
    return Table(["Stage", "Key", "#Time", ""], rows) if rows else None


def facts(record: RunRecord) -> list[str]:
    """The software and the model that the run used."""
    items = []
    versions, commit = record.run.get("versions", {}), str(record.run.get("commit") or "")
    if versions:
        items.append("**Versions** " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if commit:
        changes = ", with uncommitted changes" if commit.endswith("+") else ""
        items.append(f"**Commit** `{commit.rstrip('+')}`{changes}")
    if record.plan:
        items.append(f"**Model fingerprint** `{record.plan.model_fingerprint}`")
        items.append(f"**Statistics key** `{record.plan.statistics_key}`")
    return items


def _stage_note(entry: Mapping[str, Any]) -> str:
    notes = [
        "reused an earlier recording" if entry.get("reused") else "",
        f"{entry['tokens_per_second']:,.0f} tokens/s" if entry.get("tokens_per_second") else "",
    ]
    return ", ".join(filter(None, notes))
