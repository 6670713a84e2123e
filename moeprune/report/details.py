"""The second half of a run's report: layers, calibration data, warnings and provenance."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moeprune.artifacts.plan import LayerPlan
from moeprune.artifacts.run import STAGES
from moeprune.report.page import Bullets, Cell, Code, Paragraph, Part, Section, Table
from moeprune.report.run_record import RunRecord
from moeprune.report.style import amount, data_size, duration, number, percent
from moeprune.selection.stability import UNSTABLE

WIDE_GAP = 0.05  # certified gap above which a better set may be worth looking for
ROLES = ("system", "user", "assistant", "tool", "text", "template")
STATUS = {
    "proved_optimal": "proved optimal",
    "certified_gap": "certified gap",
    "local_optimum": "local optimum",
    "given": "given",
    "time_limit": "stopped by time limit",
    "not_converged": "not converged",
}


def layers(record: RunRecord) -> Section:
    """One row a layer: what is kept, what it costs, how good the choice provably is and how stable."""
    title = "Layer by layer"
    if record.plan is None:
        return Section(title, [Paragraph("There is no plan yet.")])
    rows: list[list[str | Cell]] = []
    for layer in record.plan.layers:
        stable = (layer.stability or {}).get("jaccard")
        weak = layer.status in ("time_limit", "not_converged")
        rows.append(
            [
                f"`{layer.name}`",
                f"{len(layer.kept)} of {layer.num_experts}",
                "–" if layer.cost is None else number(layer.cost),
                "–" if layer.bound is None else number(layer.bound),
                "–" if layer.gap is None else percent(layer.gap, places=2),
                Cell(STATUS[layer.status], "bad" if weak else ""),
                "–" if stable is None else Cell(f"{stable:.2f}", "bad" if stable < UNSTABLE else ""),
                _regret(layer.stability),
            ]
        )
    columns = ["Layer", "#Kept", "#Cost", "#Lower bound", "#Gap", "Status", "#Stability", "#Regret"]
    note = (
        "Cost: the criterion's value of the pruned set, in its own units. No set within the budget costs less than "
        "the lower bound; the gap is (cost − bound) / cost. Stability: Jaccard index of the sets pruned by the two "
        "halves of the trajectories; regret: how much more one half's set costs on the other half than that half's own "
        "(the larger of the two)."
    )
    parts: list[Part] = [Table(columns, rows, note)]
    if all(layer.bound is None for layer in record.plan.layers):
        parts.append(Paragraph("No certificate was computed (`selection.solver.certificate: true` asks for one)."))
    if all(layer.stability is None for layer in record.plan.layers):
        parts.append(Paragraph("The plan holds no stability figures."))
    return Section(title, parts)


def _regret(stability: Mapping[str, float] | None) -> str:
    regrets = [value for name, value in (stability or {}).items() if name.startswith("regret")]
    return percent(max(regrets), places=1) if regrets else "–"


def compression(record: RunRecord) -> Section | None:
    """What the dense stage did to which weights, and how the checkpoint loads again; None for runs without one."""
    entry = record.stages.get("dense")
    if entry is None:
        return None
    rows: list[list[str | Cell]] = [
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
    columns = ["Role", "Method", "#Weights", "#Parameters", "#Zeros", "#Bits", "For example"]
    sizes = f"{data_size(entry['bytes'])} of {data_size(entry['bytes_base'])} on disk"
    note = (
        f"The pruned model's weights were compressed in {duration(entry['seconds'])}: {sizes}. The checkpoint was "
        "loaded again and compared weight by weight before it was put in place; quality is measured on what loads."
    )
    return Section("Dense weights", [Table(columns, rows, note)])


def _measured(counts: Mapping[str, float], row: Mapping[str, Any]) -> list[str]:
    """The share of zeros and the bits a compressed weight of this role takes."""
    if str(row["methods"]).startswith("unchanged"):
        return ["–", "–"]
    zeros, bits = (counts.get(f"dense/{row['role']}/{name}") for name in ("sparsity", "bits"))
    return ["–" if zeros is None else percent(zeros, places=1), "–" if bits is None else number(bits)]


def data(record: RunRecord) -> Section:
    """What calibration read, used and left out, and whose tokens they were."""
    title = "Calibration data"
    if record.statistics is None:
        return Section(title, [Paragraph("The statistics file is not there, so its data cannot be shown.")])
    manifest: Mapping[str, Mapping[str, Any]] = record.statistics.manifest["domains"]
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
    columns = [
        "Domain",
        "Source",
        "#Records read",
        "#Used",
        "Skipped",
        "#Tokens",
        "#Counted",
        "#Share",
        "#Lost to length",
    ]
    note = "Counted: tokens that entered the statistics. Share: of the mix that the plan was selected from."
    parts: list[Part] = [Table(columns, rows, note)]
    found = {role for info in manifest.values() for role in info.get("tokens_by_role", {})}
    roles = [role for role in ROLES if role in found] + sorted(found - {*ROLES})
    if roles:
        by_role = [
            [name, *(_count(i.get("tokens_by_role", {}).get(r, 0)) for r in roles)] for name, i in manifest.items()
        ]
        parts.append(Table(["Tokens by role", *(f"#{role}" for role in roles)], by_role))
    examples = [e for info in manifest.values() for e in info.get("skipped_examples", [])]
    if examples:
        parts += [Paragraph("Records that were skipped, for example:"), Bullets([f"`{e}`" for e in examples[:5]])]
    return Section(title, parts)


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


def warnings(record: RunRecord) -> Section:
    """Everything a reader has to know before believing the numbers."""
    said = [*record.run.get("warnings", []), *(record.plan.warnings if record.plan else ())]
    said += [f"{label}: {w}" for label, plan in record.baselines.items() for w in plan.warnings if w not in said]
    items = [*_unfinished(record), *_doubts(record), *dict.fromkeys(said)]
    return Section("Warnings", [Bullets(items) if items else Paragraph("None.")])


def _unfinished(record: RunRecord) -> list[str]:
    asked = [stage for stage in STAGES[:-1] if stage != "dense" or record.section("dense")]
    left_out = [f"`{stage}`" for stage in asked if stage not in record.stages]
    items = [f"**Unfinished**: the run has not done {', '.join(left_out)}"] if left_out else []
    expected = {"select": "plan.json", "evaluate": "metrics.json"}
    optional = {name for stage, name in expected.items() if stage not in record.stages}
    return items + [f"**Missing**: {sentence}" for sentence in record.missing if sentence.split()[0] not in optional]


def _doubts(record: RunRecord) -> list[str]:
    """What the numbers themselves say, unless a stage has said it already."""
    said = " ".join([*record.run.get("warnings", []), *(record.plan.warnings if record.plan else ())])
    plans = record.plan.layers if record.plan else ()
    items = []
    outside = [domain for domain in record.domains if domain not in record.calibrated]
    if outside:
        items.append(
            f"**Not in calibration**: {', '.join(outside)}. Experts that only such data needs look useless and go; "
            "expect these abilities to be lost, not weakened"
        )
    if record.dead and "no token was routed" not in said:
        dead = "; ".join(f"`{name}`: {', '.join(map(str, ids))}" for name, ids in record.dead.items())
        items.append(f"**Dead experts**, which no calibration token was routed to: {dead}")
    for status in ("time_limit", "not_converged"):
        named = [f"`{layer.name}`" for layer in plans if layer.status == status]
        if named:
            items.append(f"**Solver {STATUS[status]}** in {', '.join(named)}: the sets may be far from the best")
    shaky = [f"`{layer.name}` ({_jaccard(layer):.2f})" for layer in plans if _jaccard(layer) < UNSTABLE]
    if shaky and "unstable sets" not in said:
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


def provenance(record: RunRecord) -> Section:
    """Enough to run this again: stages and keys, versions, commit, fingerprint, command, config as written."""
    rows = [
        [
            stage,
            f"`{entry.get('key', '–')}`",
            "–" if entry.get("seconds") is None else duration(entry["seconds"]),
            _stage_note(entry),
        ]
        for stage, entry in record.stages.items()
    ]
    parts: list[Part] = [Table(["Stage", "Key", "#Time", ""], rows)] if rows else []
    facts = []
    versions = record.run.get("versions", {})
    if versions:
        facts.append("**Versions** " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    commit = record.run.get("commit")
    if commit:
        dirty = ", with uncommitted changes" if str(commit).endswith("+") else ""
        facts.append(f"**Commit** `{str(commit).rstrip('+')}`{dirty}")
    if record.plan:
        facts.append(f"**Model fingerprint** `{record.plan.model_fingerprint}`")
        facts.append(f"**Statistics key** `{record.plan.statistics_key}`")
    parts.append(Bullets(facts))
    if record.config_text:
        name = f"{record.name}.yaml"
        parts.append(Paragraph(f"To run it again, save the config below as `{name}` and:"))
        parts.append(Code(f"moeprune run {name} --output again", "sh"))
        parts.append(Code(record.config_text, "yaml"))
    return Section("Provenance", parts)


def _stage_note(entry: Mapping[str, Any]) -> str:
    notes = [
        "reused an earlier recording" if entry.get("reused") else "",
        f"{entry['tokens_per_second']:,.0f} tokens/s" if entry.get("tokens_per_second") else "",
    ]
    return ", ".join(filter(None, notes))
