"""The heart of a run's report: the pruned model against the unpruned one, and the methods side by side."""

from collections.abc import Mapping

from moeprune.artifacts.plan import PrunePlan
from moeprune.experiment.numbers import change, data_size, listed, number, points, share
from moeprune.experiment.report_parts import Cell, Paragraph, Part, Section, Table
from moeprune.experiment.run_record import Method, RunRecord, measure, perplexity, task_names

KL = "KL (nats per token)"


def result(record: RunRecord) -> Section:
    """The pruned model against the unpruned one: domain by domain, the worst first, then as a whole."""
    parts: list[Part] = []
    if record.domains:
        parts.append(_domain_table(record))
    whole = _whole_table(record)
    if not record.domains:
        parts.append(Paragraph(f"No held-out domain was measured: {record.why_unmeasured}."))
    if whole.rows:
        parts.append(whole)
    if "prune" in record.stages and not record.stages["prune"].get("checkpoint"):
        parts.append(Paragraph("No checkpoint was written (`checkpoint.save: false`); sizes are those it would have."))
    elif "prune" not in record.stages and not record.sizes:
        parts.append(Paragraph("No checkpoint was written, so sizes are not known."))
    if not record.tasks:
        parts.append(Paragraph("No task was measured; perplexity alone can hide that a model no longer works."))
    return Section("Result against the unpruned model", parts)


def _domain_table(record: RunRecord) -> Table:
    rows: list[list[str | Cell]] = []
    for domain in record.domains:
        kl, top1 = (measure(record.metrics, f"fidelity/{kind}/{domain}") for kind in ("kl", "top1"))
        moved = perplexity(record.metrics, domain)
        seen = domain in record.calibrated
        row: list[str | Cell] = [domain, "yes" if seen else Cell("no", "bad"), str(kl) if kl else "–"]
        base = moved.base if moved else None
        row.append("–" if base is None else number(base))
        row.append(str(moved) if moved else "–")
        row.append(change(moved.value, base) if moved and base is not None else "–")
        rows.append([*row, str(top1) if top1 else "–"])
    return Table(
        columns=[
            "Domain",
            "In calibration",
            f"#{KL}",
            "#Perplexity, unpruned",
            "#Perplexity, pruned",
            "#Change",
            "#Top-1 agreement",
        ],
        rows=rows,
        note="KL is measured from the unpruned model's next-token distribution, "
        f"{'on trajectories that were partly recorded' if record.recorded else 'on held-out trajectories'}. Brackets "
        "hold 95 % intervals (bootstrap over trajectories; Wilson for shares). Top-1: positions where both models put "
        "the same token first.",
    )


def _whole_table(record: RunRecord) -> Table:
    rows: list[list[str | Cell]] = []
    for name, words, show in (("size/parameters", "Parameters", _whole), ("size/bytes", "Weights on disk", data_size)):
        size = measure(record.sizes, name)
        if size and size.base:
            rows.append([words, show(size.base), show(size.value), change(size.value, size.base)])
    shares = {f"task/accuracy/{name}": f"{_of_kind(name)} accuracy" for name in task_names(record.metrics)}
    loop_names = [name for name in record.metrics if name.startswith("generation/loop_rate") and name.count("/") == 1]
    shares |= {name: _loop_words(name) for name in loop_names}
    for name, words in shares.items():
        found = measure(record.metrics, name)
        assert found is not None
        base, moved = ("–", "–") if found.base is None else (share(found.base), points(found.value - found.base))
        rows.append([words, base, found.as_share, moved])
    for name in _other_names(record.metrics):
        other = measure(record.metrics, name)
        assert other is not None
        moved = "–" if other.base is None else change(other.value, other.base)
        rows.append([f"`{name}`", "–" if other.base is None else number(other.base), str(other), moved])
    return Table(columns=["Whole model", "#Unpruned", "#Pruned", "#Change"], rows=rows)


def methods(record: RunRecord) -> Section:
    """The run's method beside its baselines, all from the same recording and measured on the same tokens."""
    title = "Methods side by side"
    measured = [method for method in record.methods if method.metrics]
    if len(measured) < 2:
        why = "No baseline was measured beside this method; name some under `evaluation.baselines` to compare."
        if len(record.methods) > 1:
            why = f"{len(record.methods) - 1} baselines were selected but not measured: {record.why_unmeasured}."
        return Section(title, [Paragraph(why)])
    columns = {f"#KL, {domain}": _column(record, f"fidelity/kl/{domain}") for domain in record.domains}
    columns |= {f"#{name} accuracy": _column(record, f"task/accuracy/{name}") for name in record.tasks}
    if any(method.measure("generation/loop_rate") for method in record.methods):
        columns["#Loop rate"] = _column(record, "generation/loop_rate")
    own = record.methods[0]
    rows: list[list[str | Cell]] = [
        [f"**{method.name}**" if method is own else method.name, *(c[i] for c in columns.values()), _same(method, own)]
        for i, method in enumerate(record.methods)
    ]
    table = Table(
        columns=["Method", *columns, "#Same experts kept"],
        rows=rows,
        note="Best value of each column shaded; ≈ marks those whose interval overlaps the best one's. KL in nats per "
        "token. Same experts kept: Jaccard index with this run's sets, mean over layers.",
    )
    return Section(title, [Paragraph(_reading(record)), table])


def _column(record: RunRecord, name: str) -> list[Cell]:
    """A metric of every method, the best one marked and those that cannot be told from it."""
    values = [method.measure(name) for method in record.methods]
    known = [value for value in values if value]
    accuracy = name.startswith("task/")
    best = (max if accuracy else min)(known, key=lambda value: value.value, default=None)
    cells = []
    for value in values:
        if value is None or best is None:
            cells.append(Cell("–", "note"))
            continue
        text = str(value) if name.startswith("fidelity/") else value.as_share
        is_best = value.value == best.value
        cells.append(Cell(text if is_best or not value.overlaps(best) else f"≈ {text}", "best" if is_best else ""))
    return cells


def _reading(record: RunRecord) -> str:
    """Who is best where, and where the intervals do not tell."""
    sentences: dict[str, list[str]] = {}
    for domain in record.domains:
        known = {m.name: v for m in record.methods if (v := m.measure(f"fidelity/kl/{domain}"))}
        if len(known) < 2:
            continue
        best = min(known, key=lambda name: known[name].value)
        rivals = [name for name, value in known.items() if name != best and value.overlaps(known[best])]
        words = f"{best} has the lowest KL" + (f", not clearly below {listed(rivals)}," if rivals else "")
        sentences.setdefault(words, []).append(domain)
    if not sentences:
        return "No domain was measured for more than one method."
    return "; ".join(f"{words} on {listed(domains)}" for words, domains in sentences.items()) + "."


def _same(method: Method, own: Method) -> str:
    return "–" if method is own else f"{jaccard(method.plan, own.plan):.2f}"


def jaccard(a: PrunePlan, b: PrunePlan) -> float:
    """Mean over layers of |kept by both| / |kept by either|; layers that only one plan has count 0."""
    names = {*a.kept, *b.kept}
    scores = []
    for name in names:
        one, other = set(a.kept.get(name, ())), set(b.kept.get(name, ()))
        scores.append(len(one & other) / len(one | other))
    return sum(scores) / len(scores)


def _other_names(metrics: Mapping[str, float]) -> list[str]:
    """Metrics that no other table shows."""
    shown = ("fidelity/", "size/", "task/accuracy/", "generation/loop_rate", "baseline/", "stability/")
    ends = ("/base", "/ci_low", "/ci_high", "/low", "/high")
    return sorted(name for name in metrics if not name.startswith(shown) and not name.endswith(ends))


def _of_kind(name: str) -> str:
    task, _, kind = name.partition(".")
    return f"{task}, {kind} questions:" if kind else task


def _loop_words(name: str) -> str:
    _, _, domain = name.partition(".")
    return "Answers that loop" + (f", {domain}" if domain else "")


def _whole(value: float) -> str:
    return f"{int(value):,}"
