"""What a run's report says of the result: the verdict in one sentence, the first numbers, what was asked, the tables.

Functions return texts and tables for the holes of run.md.jinja.
"""

from collections.abc import Mapping
from typing import Any

from moeprune.artifacts.plan import PrunePlan
from moeprune.report.page import Table, bad, best
from moeprune.report.run_record import Measure, RunRecord, measure, perplexity, task_names
from moeprune.report.style import amount, change, data_size, listed, method_name, number, percent, points, rough, share


def domain_table(record: RunRecord) -> Table | None:
    """The pruned model against the unpruned one on every domain, the worst first."""
    rows = []
    for domain in record.domains:
        kl, top1 = (measure(record.metrics, f"fidelity/{kind}/{domain}") for kind in ("kl", "top1"))
        pruned = perplexity(record.metrics, domain)
        base = pruned.base if pruned else None
        rows.append(
            [
                domain,
                "yes" if domain in record.calibrated else bad("no"),
                _text(kl),
                "–" if base is None else number(base),
                _text(pruned),
                "–" if pruned is None or base is None else change(pruned.value, base),
                _text(top1),
            ]
        )
    columns = ["Domain", "In calibration", "#KL (nats per token)", "#Perplexity, unpruned", "#Perplexity, pruned"]
    return Table([*columns, "#Change", "#Top-1 agreement"], rows) if rows else None


def model_table(record: RunRecord) -> Table | None:
    """Sizes, accuracies, loops and every measure that no other table shows, unpruned and pruned."""
    rows = []
    for name, words, show in (("size/parameters", "Parameters", _whole), ("size/bytes", "Weights on disk", data_size)):
        size = measure(record.sizes, name)
        if size and size.base:
            rows.append([words, show(size.base), show(size.value), change(size.value, size.base)])
    names = {f"task/accuracy/{name}": f"{_of_kind(name)} accuracy" for name in task_names(record.metrics)}
    loop_names = [name for name in record.metrics if name.startswith("generation/loop_rate") and name.count("/") == 1]
    names |= {name: _loop_words(name) for name in loop_names}
    for name, words in names.items():
        rate = measure(record.metrics, name)
        assert rate is not None
        base, difference = ("–", "–") if rate.base is None else (share(rate.base), points(rate.value - rate.base))
        rows.append([words, base, rate.as_share, difference])
    for name in _other_names(record.metrics):
        other = measure(record.metrics, name)
        assert other is not None
        base, difference = ("–", "–") if other.base is None else (number(other.base), change(other.value, other.base))
        rows.append([f"`{name}`", base, str(other), difference])
    return Table(["Whole model", "#Unpruned", "#Pruned", "#Change"], rows) if rows else None


def method_table(record: RunRecord) -> Table | None:
    """The run's method beside its baselines, all from the same recording and measured on the same tokens."""
    if sum(bool(method.metrics) for method in record.methods) < 2:
        return None
    columns = {f"#KL, {domain}": _column(record, f"fidelity/kl/{domain}") for domain in record.domains}
    columns |= {f"#{name} accuracy": _column(record, f"task/accuracy/{name}") for name in record.tasks}
    if any(method.measure("generation/loop_rate") for method in record.methods):
        columns["#Loop rate"] = _column(record, "generation/loop_rate")
    own, *others = record.methods
    columns["#Same experts kept"] = ["–", *(f"{jaccard(method.plan, own.plan):.2f}" for method in others)]
    names = [f"**{own.name}**", *(method.name for method in others)]
    return Table(["Method", *columns], list(zip(names, *columns.values())))


def _column(record: RunRecord, name: str) -> list[str]:
    """A metric of every method, the best one marked and those that cannot be told from it."""
    values = [method.measure(name) for method in record.methods]
    known = [value for value in values if value]
    accuracy = name.startswith("task/")
    top = (max if accuracy else min)(known, key=lambda value: value.value, default=None)
    cells = []
    for value in values:
        if value is None or top is None:
            cells.append("–")
            continue
        text = str(value) if name.startswith("fidelity/") else value.as_share
        cells.append(best(text) if value.value == top.value else f"≈ {text}" if value.overlaps(top) else text)
    return cells


def ranking(record: RunRecord) -> str:
    """Who has the lowest KL on which domain, and where the intervals do not tell."""
    sentences: dict[str, list[str]] = {}
    for domain in record.domains:
        known = {m.name: v for m in record.methods if (v := m.measure(f"fidelity/kl/{domain}"))}
        if len(known) < 2:
            continue
        lowest = min(known, key=lambda name: known[name].value)
        rivals = [name for name, value in known.items() if name != lowest and value.overlaps(known[lowest])]
        words = f"{lowest} has the lowest KL" + (f", not clearly below {listed(rivals)}," if rivals else "")
        sentences.setdefault(words, []).append(domain)
    if not sentences:
        return "No domain was measured for more than one method."
    return "; ".join(f"{words} on {listed(domains)}" for words, domains in sentences.items()) + "."


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


def _text(value: Measure | None) -> str:
    return "–" if value is None else str(value)


def _whole(value: float) -> str:
    return f"{int(value):,}"


def verdict(record: RunRecord) -> str:
    """One sentence in plain words: what was pruned and what it cost, the worst domain first."""
    if record.plan is None:
        done = ", ".join(record.stages) or "none"
        return f"Nothing has been pruned yet: this run holds no plan (stages done: {done})."
    sentence = f"{method_name(record.plan.criterion)} removed {_removed(record.plan)}"
    size = measure(record.sizes, "size/parameters")
    if size and size.base:
        sentence += f", {percent(1 - size.value / size.base)} of the parameters"
    costs = [*_domain_costs(record), *_task_costs(record)]
    if not costs:
        return f"{sentence}; what that costs has not been measured ({record.why_unmeasured})."
    *most, last = costs
    return f"{sentence}; {', '.join(most)}, and {last}." if most else f"{sentence}; {last}."


def _removed(plan: PrunePlan) -> str:
    """`16 of 32 experts in each of the 4 MoE layers`, or the range and the total where layers differ."""
    pairs = {(len(layer.pruned), layer.num_experts) for layer in plan.layers}
    count = len(plan.layers)
    if len(pairs) == 1:
        pruned, experts = pairs.pop()
        where = f"each of the {count} MoE layers" if count > 1 else "the one MoE layer"
        return f"{pruned} of {experts} experts in {where}"
    counts = [len(layer.pruned) for layer in plan.layers]
    total = sum(layer.num_experts for layer in plan.layers)
    return f"{sum(counts)} of {total} experts, {min(counts)} to {max(counts)} in each of the {count} MoE layers"


def _domain_costs(record: RunRecord) -> list[str]:
    """`prose, which calibration did not see, suffers most (...) and agent least (...)`."""
    if not record.domains:
        return []
    worst, least = record.domains[0], record.domains[-1]
    outside = "" if worst in record.calibrated else ", which calibration did not see,"
    words = f"{worst}{outside} suffers" + (" most" if least != worst else "") + f" ({_harm(record, worst)})"
    return [words + (f" and {least} least ({_harm(record, least)})" if least != worst else "")]


def _harm(record: RunRecord, domain: str) -> str:
    """`perplexity 34.4 to 164, KL 1.4 nats per token`, with what is known."""
    kl, pruned = measure(record.metrics, f"fidelity/kl/{domain}"), perplexity(record.metrics, domain)
    known = []
    if pruned and pruned.base is not None:
        known.append(f"perplexity {number(pruned.base)} to {number(pruned.value)}")
    if kl:
        known.append(f"KL {rough(kl.value)} nats per token")
    return ", ".join(known)


def _task_costs(record: RunRecord) -> list[str]:
    costs = []
    for name in record.tasks:
        accuracy = measure(record.metrics, f"task/accuracy/{name}")
        assert accuracy is not None
        now = share(accuracy.value)
        if accuracy.base is None:
            costs.append(f"{name} accuracy is {now}")
        elif share(accuracy.base) == now:
            costs.append(f"{name} accuracy stays at {now}")
        else:
            verb = "falls" if accuracy.value < accuracy.base else "rises"
            costs.append(f"{name} accuracy {verb} from {share(accuracy.base)} to {now}")
    loops = measure(record.metrics, "generation/loop_rate")
    if loops and loops.base is not None and loops.value - loops.base >= 0.05:
        costs.append(f"endless loops rise from {percent(loops.base)} to {percent(loops.value)} of the answers")
    return costs


def first_numbers(record: RunRecord) -> list[str]:
    """The few numbers a reader looks for first: `name: **value** (meaning)`."""
    facts = []
    if record.plan:
        kept = sum(len(layer.kept) for layer in record.plan.layers)
        total = sum(layer.num_experts for layer in record.plan.layers)
        share_kept, layers = percent(kept / total), len(record.plan.layers)
        facts.append(f"experts kept: **{share_kept}** ({kept:,} of {total:,} in {layers} layers)")
    size, weight = measure(record.sizes, "size/parameters"), measure(record.sizes, "size/bytes")
    if size and size.base:
        meaning = f"{amount(size.base)} to {amount(size.value)}"
        if weight and weight.base:
            meaning += f"; {data_size(weight.base)} to {data_size(weight.value)}"
        facts.append(f"parameters: **{change(size.value, size.base)}** ({meaning})")
    kl = measure(record.metrics, f"fidelity/kl/{record.domains[0]}") if record.domains else None
    if kl:
        facts.append(f"KL, worst domain ({record.domains[0]}): **{number(kl.value)}** ({_ends(str(kl))}nats per token)")
    for name in record.tasks[:2]:
        accuracy = measure(record.metrics, f"task/accuracy/{name}")
        assert accuracy is not None
        base = "" if accuracy.base is None else f"unpruned {share(accuracy.base)}"
        meaning = _ends(accuracy.as_share) + base
        facts.append(f"{name} accuracy: **{share(accuracy.value)}**" + (f" ({meaning})" if meaning else ""))
    loops = measure(record.metrics, "generation/loop_rate")
    if loops:
        base = "" if loops.base is None else f" (unpruned {percent(loops.base)})"
        facts.append(f"answers that loop: **{percent(loops.value)}**{base}")
    return facts


def _ends(interval: str) -> str:
    """`0.85 [0.71, 0.93]` -> `[0.71, 0.93], `."""
    _, bracket, ends = interval.partition("[")
    return f"[{ends}, " if bracket else ""


def request(record: RunRecord) -> list[str]:
    """What the config asked for, in words."""
    items = []
    model = record.section("model", "path")
    kind = record.plan.model_type if record.plan else ""
    if model:
        items.append(f"**Model** `{model}`" + (f", family {kind}" if kind else ""))
    domains = record.section("calibration", "domains") or []
    if domains:
        sources = [f"{d.get('name')} (`{d.get('path')}`{_limit(d)})" for d in domains]
        items.append(f"**Calibration** on {listed(sources)}")
    if record.plan:
        items.append(f"**Criterion** {method_name(record.plan.criterion, variant=True)}")
        items.append(f"**Budget** {_budget(record.plan.budget)}; **solver** {_options(record.plan.solver)}")
        mix = {name: weight for name, weight in record.plan.mix.items() if weight != 1}
        if mix:
            items.append("**Mix** " + ", ".join(f"{name} × {number(weight)}" for name, weight in mix.items()))
    dense = record.section("dense") or []
    if dense:
        items.append("**Dense weights** " + listed([_options(method) for method in dense]))
    judged = record.domains or [str(d.get("name")) for d in record.section("evaluation", "domains") or []]
    tasks = record.section("evaluation", "tasks") or []
    if judged or tasks:
        words = f"{'' if record.recorded else 'held-out '}{listed(judged)}" if judged else "no domain"
        words += f" (trajectories of {listed(list(record.recorded))} were recorded too)" if record.recorded else ""
        items.append(f"**Judged** on {words}" + (f", and on the task {listed(tasks)}" if tasks else ""))
    return items


def _limit(domain: Mapping[str, Any]) -> str:
    tokens = f", at most {domain['tokens']:,} tokens" if domain.get("tokens") else ""
    count = domain.get("count")
    return tokens + (f", counting {count} tokens only" if count and count != "all" else "")


def _budget(budget: Mapping[str, Any]) -> str:
    prune = budget.get("prune")
    target = f"remove {percent(prune)} of the experts" if isinstance(prune, float) else f"remove {prune} experts"
    scope = "over all layers together" if budget.get("scope") == "global" else "in every layer"
    extra = f", kept counts in multiples of {budget['multiple_of']}" if budget.get("multiple_of", 1) != 1 else ""
    return f"{target} {scope}{extra}" + (", some experts must stay" if budget.get("must_keep") else "")


def _options(options: Mapping[str, Any]) -> str:
    empty: tuple[Any, ...] = (None, {}, [])
    given = {k: v for k, v in options.items() if k != "name" and v not in empty and v is not False}
    rest = ", ".join(key if value is True else f"{key} {value}" for key, value in given.items())
    return f"{options.get('name', '')}" + (f" ({rest})" if rest else "")
