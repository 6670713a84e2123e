"""The top of a run's report: the verdict in one sentence, the first numbers, and what was asked."""

from collections.abc import Mapping
from typing import Any

from moeprune.artifacts.plan import PrunePlan
from moeprune.experiment.figure_style import method_name
from moeprune.experiment.numbers import amount, change, data_size, listed, number, percent, rough, share
from moeprune.experiment.report_parts import Bullets, Paragraph, Section, Tiles
from moeprune.experiment.run_record import RunRecord, measure, perplexity


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
        gone, experts = pairs.pop()
        where = f"each of the {count} MoE layers" if count > 1 else "the one MoE layer"
        return f"{gone} of {experts} experts in {where}"
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
    kl, moved = measure(record.metrics, f"fidelity/kl/{domain}"), perplexity(record.metrics, domain)
    known = []
    if moved and moved.base is not None:
        known.append(f"perplexity {number(moved.base)} to {number(moved.value)}")
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


def overview(record: RunRecord) -> Section:
    """The few numbers a reader looks for first."""
    tiles: list[tuple[str, str, str]] = []
    if record.plan:
        kept = sum(len(layer.kept) for layer in record.plan.layers)
        total = sum(layer.num_experts for layer in record.plan.layers)
        tiles.append(
            ("experts kept", percent(kept / total), f"{kept:,} of {total:,} in {len(record.plan.layers)} layers")
        )
    size, weight = measure(record.sizes, "size/parameters"), measure(record.sizes, "size/bytes")
    if size and size.base:
        meaning = f"{amount(size.base)} to {amount(size.value)}"
        if weight and weight.base:
            meaning += f"; {data_size(weight.base)} to {data_size(weight.value)}"
        tiles.append(("parameters", change(size.value, size.base), meaning))
    if record.domains:
        worst = record.domains[0]
        kl = measure(record.metrics, f"fidelity/kl/{worst}")
        if kl:
            tiles.append((f"KL, worst domain ({worst})", number(kl.value), f"{_ends(str(kl))}nats per token"))
    for name in record.tasks[:2]:
        accuracy = measure(record.metrics, f"task/accuracy/{name}")
        assert accuracy is not None
        base = "" if accuracy.base is None else f"unpruned {share(accuracy.base)}"
        tiles.append((f"{name} accuracy", share(accuracy.value), f"{_ends(accuracy.as_share)}{base}"))
    loops = measure(record.metrics, "generation/loop_rate")
    if loops:
        base = "" if loops.base is None else f"unpruned {percent(loops.base)}"
        tiles.append(("answers that loop", percent(loops.value), base))
    return Section("", [Tiles(tiles)] if tiles else [])


def _ends(interval: str) -> str:
    """`0.85 [0.71, 0.93]` -> `[0.71, 0.93], `."""
    _, bracket, ends = interval.partition("[")
    return f"[{ends}, " if bracket else ""


def asked(record: RunRecord) -> Section:
    """What the config asked for, in words."""
    items = []
    model = record.section("model", "path")
    kind = record.plan.model_type if record.plan else ""
    if model:
        items.append(f"**Model** `{model}`" + (f", family {kind}" if kind else ""))
    domains = record.section("calibration", "domains") or []
    if domains:
        read = [f"{d.get('name')} (`{d.get('path')}`{_limit(d)})" for d in domains]
        items.append(f"**Calibration** on {listed(read)}")
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
    return Section("What was asked", [Bullets(items) if items else Paragraph("The run has no readable config.")])


def _limit(domain: Mapping[str, Any]) -> str:
    tokens = f", at most {domain['tokens']:,} tokens" if domain.get("tokens") else ""
    count = domain.get("count")
    return tokens + (f", counting {count} tokens only" if count and count != "all" else "")


def _budget(budget: Mapping[str, Any]) -> str:
    prune = budget.get("prune")
    wanted = f"remove {percent(prune)} of the experts" if isinstance(prune, float) else f"remove {prune} experts"
    scope = "over all layers together" if budget.get("scope") == "global" else "in every layer"
    extra = f", kept counts in multiples of {budget['multiple_of']}" if budget.get("multiple_of", 1) != 1 else ""
    return f"{wanted} {scope}{extra}" + (", some experts must stay" if budget.get("must_keep") else "")


def _options(options: Mapping[str, Any]) -> str:
    empty: tuple[Any, ...] = (None, {}, [])
    said = {k: v for k, v in options.items() if k != "name" and v not in empty and v is not False}
    rest = ", ".join(key if value is True else f"{key} {value}" for key, value in said.items())
    return f"{options.get('name', '')}" + (f" ({rest})" if rest else "")
