"""The select stage of a run: its own plan, those of the baselines and, with `refine:`, the portfolio of several."""

from collections.abc import Sequence
from dataclasses import asdict

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import sha256
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.statistics import RoutingStatistics
from moeprune.config.schema import RunConfig
from moeprune.console import progress, say, warn
from moeprune.run.directory import Run, stage_key
from moeprune.run.refine import refine
from moeprune.run.run_data import Inputs
from moeprune.run.stages import OWN, Entry, stage
from moeprune.selection.criteria.criterion import mix_shares
from moeprune.selection.criteria.outside import Custom, PruneSetFile
from moeprune.selection.criteria.table import AnyCriterion
from moeprune.selection.options import RefineOptions, SelectionOptions
from moeprune.selection.select import select

REFINING = 2  # the version of what `refine:` does to the select stage


def select_stage(run: Run, inputs: Inputs, statistics: RoutingStatistics) -> dict[str, PrunePlan]:
    """The run's plan under OWN, and one plan for each baseline criterion, from the same statistics."""
    options, refining = run.config.selection, run.config.refine
    baselines = baseline_options(run.config)
    read = [refining, REFINING, inputs.model.identity, inputs.data.calibration_identity] if refining else []
    digests = criterion_digests(run.config.criteria)
    read += [digests] if any(digests) else []
    key = stage_key("select", options, list(baselines.items()), statistics.key, *read)

    def work() -> tuple[Entry, list[str]]:
        describe_mix(statistics, options)
        plan = select(statistics, options)
        entry: Entry = {}
        warnings: list[str] = []
        if refining:
            plan, entry, warnings = refined(inputs, refining, statistics, plan)
        plan.save(run.directory / "plan.json")
        for label, other in baselines.items():
            select(statistics, other).save(run.directory / "baselines" / label / "plan.json")
        describe_plan(plan)
        return {"plan": "plan.json", "baselines": list(baselines), **entry}, [*plan.warnings, *warnings]

    stage(run, "select", key, work)
    paths = {OWN: run.directory / "plan.json"}
    paths |= {label: run.directory / "baselines" / label / "plan.json" for label in baselines}
    return {label: PrunePlan.load(path) for label, path in paths.items()}


def refined(
    inputs: Inputs, options: RefineOptions, statistics: RoutingStatistics, plan: PrunePlan
) -> tuple[PrunePlan, Entry, list[str]]:
    """The portfolio of the run's plan and those of `options.criteria`; what it changed; what readers must know."""
    require_refinable(inputs)
    selection = inputs.config.selection
    tried = labelled((selection.criterion, *options.criteria))
    if len(tried) == 1:
        warn("refine: criteria names only the run's own criterion, so there is nothing to choose; add another")
    plans = {
        label: plan if number == 0 else select(statistics, selection.model_copy(update={"criterion": criterion}))
        for number, (label, criterion) in enumerate(tried.items())
    }
    tokens = inputs.data.validation(options.tokens, selection.mix)
    say(f"select: refining {', '.join(plans)} on {tokens.tokens:,} validation tokens")
    with progress("refining", unit="layers") as advance:
        portfolio = refine(
            inputs.model.loaded.model,
            plans,
            tokens,
            **options.model_dump(include={"goal", "margin", "rounds"}),
            batch_tokens=inputs.config.runtime.batch_tokens,
            on_progress=advance,
        )
    say(f"select: began with {portfolio.start}")
    for change in portfolio.changes:
        say(
            f"select: {change.layer} takes the set of {change.source}, KL {change.before:.4f} -> {change.after:.4f} "
            f"(standard error {change.error:.4f})"
        )
    criterion = {"name": "portfolio", "criteria": {k: c.model_dump(mode="json") for k, c in tried.items()}}
    criterion |= options.model_dump(exclude={"criteria"})
    criterion |= {"start": portfolio.start, "chosen": dict(portfolio.chosen)}
    return (
        portfolio.plan.model_copy(update={"criterion": criterion}),
        {"refined": [asdict(change) for change in portfolio.changes]},
        list(tokens.warnings),
    )


def require_refinable(inputs: Inputs) -> None:
    """Raises InputError where plans could not be measured, or could not lend one another their sets."""
    if inputs.config.selection.budget.scope == "global":
        raise InputError(
            "refine: plans of selection.budget.scope: global keep different numbers of experts in a layer, so one set "
            "cannot stand for the other; set scope: layer"
        )
    if not inputs.model.fits:
        raise InputError(
            "refine: plans are measured on the model in memory, and its weights do not fit; leave `refine` out, or run "
            "on a machine with more memory"
        )


def criterion_digests(criteria: Sequence[AnyCriterion]) -> list[list[str]]:
    """For each criterion digests of the files that decide what it does: a prune set, or a class of one's own."""
    paths = [[c.path] if isinstance(c, PruneSetFile) else c.sources if isinstance(c, Custom) else [] for c in criteria]
    return [[sha256(path) for path in files] for files in paths]


def baseline_options(config: RunConfig) -> dict[str, SelectionOptions]:
    """Label -> the run's selection with a baseline's criterion; the run's own criterion is no baseline of itself."""
    baselines = labelled([c for c in config.evaluation.baselines if c != config.selection.criterion])
    return {label: config.selection.model_copy(update={"criterion": c}) for label, c in baselines.items()}


def labelled(criteria: Sequence[AnyCriterion]) -> dict[str, AnyCriterion]:
    """Criteria by name, each once; a name that comes again with other options is numbered."""
    labels: dict[str, AnyCriterion] = {}
    for criterion in criteria:
        if criterion in labels.values():
            continue
        name = str(criterion.name)
        taken = sum(label == name or label.startswith(f"{name}-") for label in labels)
        labels[name if not taken else f"{name}-{taken + 1}"] = criterion
    return labels


def describe_mix(statistics: RoutingStatistics, options: SelectionOptions) -> None:
    """The share of the counted tokens that each domain has in the decision, where there is more than one."""
    shares = mix_shares(statistics, options.mix)
    if len(shares) > 1:
        say(f"select: mix of {', '.join(f'{domain} {share:.1%}' for domain, share in shares.items())} by tokens")


def describe_plan(plan: PrunePlan) -> None:
    """One line a layer: what was asked, what is kept, and how good the choice provably is."""
    for layer in plan.layers:
        proved = layer.gap is None or layer.status == "proved_optimal"
        gap = "" if proved else f", at most {100 * (layer.gap or 0):.2f} % above the best possible"
        say(
            f"select: {layer.name} keeps {len(layer.kept)} of {layer.num_experts}, removes {len(layer.pruned)} "
            f"({layer.status.replace('_', ' ')}{gap})"
        )
