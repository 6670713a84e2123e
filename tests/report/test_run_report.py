"""The report says what the files of the run directory say, worst first, and survives whatever is missing."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import read_json, write_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.report.results import jaccard
from moeprune.report.run_record import read_run
from moeprune.report.run_report import run_report, write_report
from tests.report.example_run import make_run


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A fresh copy of the finished run and its recording."""
    shutil.copytree(original.parent, tmp_path / "runs")
    return tmp_path / "runs" / original.name


def markdown(run: Path) -> str:
    """The report's words; the figures are not drawn."""
    return run_report(read_run(run)).markdown


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def change(path: Path, edit: Callable[[dict], None]) -> None:
    value = read_json(path)
    edit(value)
    write_json(path, value)


class Tags(HTMLParser):
    """Collects tags, checks that they close, and keeps what would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "srcset", "data", "poster")]
        self.fetched += [value or "" for name, value in attrs if name == "href" and not (value or "").startswith("#")]
        if tag not in ("meta", "img", "source", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_verdict_is_one_plain_sentence_with_the_worst_domain_first(run: Path) -> None:
    assert (
        "**HOPE removed 16 of 32 experts in each of the 4 MoE layers, 40 % of the parameters; prose, which calibration "
        "did not see, suffers most (perplexity 34.4 to 164, KL 1.4 nats per token) and agent least (perplexity 1.30 to "
        "1.33, KL 0.021 nats per token), and agent accuracy falls from 1.00 to 0.85.**" in markdown(run)
    )


def test_html_is_whole_and_asks_for_nothing(run: Path) -> None:
    page = write_report(run)
    assert page == run / "report.html"
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not tags.seen & {"script", "iframe", "object", "link"}
    assert len(tags.fetched) == 8  # four figures, light and dark
    assert all(value.startswith("data:image/png;base64,") for value in tags.fetched)
    assert "@import" not in text
    assert "url(" not in text
    order = re.findall(r"<h2>([^<]*)</h2>", text)
    assert order == [
        "What was asked",
        "Result against the unpruned model",
        "Methods side by side",
        "Figures",
        "Layer by layer",
        "Calibration data",
        "Warnings",
        "Provenance",
    ]


def test_results_stand_in_order_with_their_intervals(run: Path) -> None:
    result = section(markdown(run), "Result against the unpruned model")
    rows = [line.split(" | ") for line in result.splitlines() if line.startswith("| ")]
    assert [row[0].removeprefix("| ") for row in rows[2:5]] == ["prose", "python", "agent"]
    assert rows[2][2].replace("\\", "") == "1.42 [1.32, 1.52]"
    assert [row[1] for row in rows[2:5]] == ["*no*", "yes", "yes"]
    assert "| Parameters | 3,884,416 | 2,311,552 | −40 % |" in result
    assert "| Weights on disk | 7.78 MB | 4.63 MB | −40 % |" in result
    assert "| agent accuracy | 1.00 | 0.85 [0.77, 0.94] | −0.15 |" in result.replace("\\", "")


def test_methods_are_compared_honestly(run: Path) -> None:
    methods = section(markdown(run), "Methods side by side").replace("\\", "")
    assert "HOPE has the lowest KL, not clearly below REAP, on prose; HOPE has the lowest KL on python" in methods
    assert "≈ 1.55 [1.44, 1.66]" in methods

    def worse(metrics: dict) -> None:
        for end in ("", "/ci_low", "/ci_high"):
            metrics[f"baseline/reap/fidelity/kl/agent{end}"] = 0.004

    change(run / "metrics.json", worse)
    methods = section(markdown(run), "Methods side by side")
    assert "REAP has the lowest KL on agent" in methods
    assert "**0.00400" in methods


def test_jaccard_is_the_mean_over_layers(run: Path) -> None:
    own, other = (PrunePlan.load(run / part / "plan.json") for part in ("", "baselines/reap"))
    naive = []
    for layer, its in zip(own.layers, other.layers):
        both = sum(expert in its.kept for expert in layer.kept)
        naive.append(both / (len(layer.kept) + len(its.kept) - both))
    assert jaccard(own, other) == pytest.approx(sum(naive) / len(naive))
    assert jaccard(own, own) == 1.0
    assert f"{jaccard(own, other):.2f} |" in section(markdown(run), "Methods side by side")


def test_figures_lie_beside_the_markdown(run: Path) -> None:
    (run / "figures").mkdir()
    (run / "figures" / "stale.png").write_bytes(b"")
    write_report(run)
    named = re.findall(r"\]\((figures/[^)]*)\)", (run / "report.md").read_text())
    assert named == ["figures/kl.png", "figures/interaction.png", "figures/kept.png", "figures/frequency.png"]
    assert {path.name for path in (run / "figures").iterdir()} == {Path(name).name for name in named}


def test_the_same_run_gives_the_same_report(run: Path) -> None:
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_warnings_name_what_is_doubtful(run: Path) -> None:
    warnings = section(markdown(run), "Warnings")
    assert "**Not in calibration**: prose" in warnings
    assert "no token was routed to expert 5" in warnings.replace("\\", "")
    assert "**Unstable sets**" in warnings
    assert "`model.layers.3.mlp` (0.41)" in warnings
    assert "**Solver stopped by time limit** in `model.layers.3.mlp`" in warnings
    assert warnings.count("no token was routed") == 1  # in run.json and in the plan, said once


def test_dead_experts_are_named_even_if_no_stage_named_them(run: Path) -> None:
    change(run / "run.json", lambda record: record.update(warnings=[]))
    change(run / "plan.json", lambda plan: plan.update(warnings=[]))
    assert "**Dead experts**, which no calibration token was routed to: `model.layers.1.mlp`: 5" in markdown(run)


def test_data_and_provenance(run: Path) -> None:
    text = markdown(run).replace("\\", "")
    data = section(text, "Calibration data")
    assert "| 412 | 400 | 9 too long, 3 no assistant turn | 6,240 | 6,000 | 56 % | 3.1 % |" in data
    assert "| agent | 1,210 | 1,507 | 2,400 | 1,123 | 0 |" in data
    provenance = section(text, "Provenance")
    for fact in ("a81d5502c9ee", "torch 2.13.0+cpu", "6c9e8f4a1b2c", "moeprune run hope-p50.yaml"):
        assert fact in provenance
    assert (run / "config.yaml").read_text().rstrip() in provenance


UNFINISHED = {
    "record": ("this run holds no plan (stages done: record)", ["plan.json", "metrics.json"]),
    "select": ("what that costs has not been measured (the run stopped after `select`)", ["metrics.json"]),
    "prune": ("what that costs has not been measured (the run stopped after `prune`)", ["metrics.json"]),
}


@pytest.mark.parametrize("last", UNFINISHED)
def test_a_run_stopped_early_is_reported_as_far_as_it_went(run: Path, last: str) -> None:
    sentence, absent = UNFINISHED[last]
    stages = ["record", "select", "prune"]
    for name in absent:
        (run / name).unlink()
    if last == "record":
        shutil.rmtree(run / "baselines")
    kept = stages[: stages.index(last) + 1]
    change(run / "run.json", lambda record: record.update(stages={k: record["stages"][k] for k in kept}))
    text = markdown(run)
    assert sentence in text
    assert "**Unfinished**: the run has not done" in text
    assert "**Missing**" not in text  # what a later stage would have written is not missing yet
    if last == "prune":
        assert "−40 %" in text  # sizes are known from the prune stage


def drop(metrics: dict, *starts: str) -> None:
    for name in [name for name in metrics if name.startswith(starts)]:
        del metrics[name]


def test_no_checkpoint(run: Path) -> None:
    change(run / "run.json", lambda record: record["stages"]["prune"].update(checkpoint=None))
    assert "No checkpoint was written" in markdown(run)


def test_no_tasks_and_no_loops(run: Path) -> None:
    change(run / "metrics.json", lambda m: drop(m, "task/", "generation/", "baseline/reap/task/"))
    text = markdown(run)
    assert "No task was measured" in text
    assert "agent accuracy" not in text.split("\n## ")[0]


def test_no_baselines(run: Path) -> None:
    shutil.rmtree(run / "baselines")
    change(run / "metrics.json", lambda m: drop(m, "baseline/"))
    assert "No baseline was measured beside this method" in markdown(run)


def test_no_certificate_and_no_stability(run: Path) -> None:
    def blank(plan: dict) -> None:
        for layer in plan["layers"]:
            layer.update(bound=None, gap=None, status="local_optimum", stability=None)

    change(run / "plan.json", blank)
    layers = section(markdown(run), "Layer by layer")
    assert "No certificate was computed" in layers
    assert "no stability figures" in layers


def test_no_statistics_file(run: Path) -> None:
    shutil.rmtree(run.parent / "shared")
    text = markdown(run)
    assert "**Missing**: ../shared/record-a81d5502c9ee/statistics.safetensors is not there" in text.replace("\\", "")
    assert "cannot be shown" in section(text, "Figures")
    assert "figures/kept.png" in text


def test_damaged_files_are_named(run: Path) -> None:
    (run / "baselines" / "reap" / "plan.json").write_text('{"format": "moeprune.plan/1"')
    (run.parent / "shared" / "record-a81d5502c9ee" / "statistics.safetensors").write_bytes(b"\x00" * 64)
    (run / "metrics.json").write_text("")
    text = markdown(run).replace("\\", "")
    for name in ("baselines/reap/plan.json", "statistics.safetensors", "metrics.json"):
        assert re.search(rf"\*\*Missing\*\*: \S*{name} cannot be read", text)


def test_no_run_json(run: Path) -> None:
    (run / "run.json").unlink()
    text = markdown(run)
    assert text.startswith("# hope-p50\n")
    assert "run.json is not there" in text.replace("\\", "")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a run directory"):
        write_report(tmp_path)


def test_names_and_messages_cannot_break_the_page(run: Path) -> None:
    nasty = '<script>alert("1")</script> & a | b'

    def edit(record: dict) -> None:
        record["name"] = nasty
        record["warnings"] = [nasty, "![x](http://a.b/c.png) [y](javascript:z)"]

    change(run / "run.json", edit)
    text = write_report(run).read_text()
    tags = Tags()
    tags.feed(text)
    assert "script" not in tags.seen
    assert "&lt;script&gt;" in text
    assert all(link.startswith("data:image/png") for link in tags.fetched)  # no link and no picture from the data
    assert "\\<script\\>" in (run / "report.md").read_text()


def test_layers_that_keep_different_numbers(run: Path) -> None:
    def shrink(plan: dict) -> None:
        plan["layers"][0]["kept"] = plan["layers"][0]["kept"][:8]

    change(run / "plan.json", shrink)
    assert "HOPE removed 72 of 128 experts, 16 to 24 in each of the 4 MoE layers" in markdown(run)


def test_domains_without_kl_are_ordered_by_the_rise_of_nll(run: Path) -> None:
    change(run / "metrics.json", lambda m: drop(m, "fidelity/kl"))
    record = read_run(run)
    assert record.domains == ["prose", "python", "agent"]
    assert "prose, which calibration did not see, suffers most (perplexity 34.4 to 164)" in markdown(run)


def test_metrics_of_other_rulers_are_shown_too(run: Path) -> None:
    change(run / "metrics.json", lambda m: m.update({"harness/gsm8k/exact_match": 0.31, "speed/decode/base": 90.0}))
    speed = {"speed/decode": 120.0, "speed/decode/low": 110.0, "speed/decode/high": 130.0}
    change(run / "metrics.json", lambda m: m.update(speed | {"task/accuracy/agent.lookup": 0.5}))
    result = section(markdown(run), "Result against the unpruned model")
    assert "| `harness/gsm8k/exact_match` | – | 0.310 | – |" in result
    assert "| `speed/decode` | 90 | 120 [110, 130] | +33 % |" in result.replace("\\", "")
    assert "speed/decode/low" not in result
    assert "| agent, lookup questions: accuracy | – | 0.50 | – |" in result


def test_calibrated_domains_are_known_by_path_too(run: Path) -> None:
    config = (run / "config.yaml").read_text().replace("{name: python, path: 'reference:python'}", "")
    config = config.replace(
        "    - {name: prose, path: 'reference:prose'}", "    - {name: py, path: 'reference:python'}"
    )
    (run / "config.yaml").write_text(re.sub(r"\n    - *\n", "\n", config))
    assert {"agent", "py"} <= read_run(run).calibrated
    assert json.loads((run / "plan.json").read_text())["mix"] == {"agent": 1.0, "python": 1.0}


def test_csv_holds_every_measure_of_every_method_once(run: Path) -> None:
    assert write_report(run, formats=["csv"]) == run / "report.csv"
    record = read_run(run)
    with (run / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {run.name, *record.baselines}
    for row in rows:
        start = "" if row["method"] == run.name else f"baseline/{row['method']}/"
        assert float(row["value"]) == record.metrics[start + row["metric"]]
        for end in ("ci_low", "ci_high", "base"):
            known = record.metrics.get(f"{start}{row['metric']}/{end}")
            assert row[end] == ("" if known is None else str(known))
    ends = ("/ci_low", "/ci_high", "/base", "/low", "/high")
    own = [name for name in record.metrics if not name.startswith("baseline/") and not name.endswith(ends)]
    assert [row["metric"] for row in rows if row["method"] == run.name] == own
