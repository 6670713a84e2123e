"""The verbs. Parses and prints, decides nothing; everything heavy is imported by the verb that needs it."""

import json
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer

from moeprune.artifacts.errors import InputError, OutsideError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Prune experts from Mixture-of-Experts language models, and trust the result.",
)

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, e.g. selection.budget.prune=0.25")]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable summary instead.")]
ModelPath = Annotated[str, typer.Argument(help="A checkpoint directory, a hub name, or `reference`.")]


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 bad input."""
    try:
        app()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OutsideError as error:
        print(f"failed: {error}", file=sys.stderr)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == 130:  # what typer makes of Ctrl-C
            print("stopped; the same command goes on where this one was", file=sys.stderr)
        raise
    except Exception as error:  # noqa: BLE001 (the last stop: say it in one line under the trace, and exit 1)
        traceback.print_exc()
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


def _finish(summary: dict[str, Any], written: Path | None, *, as_json: bool) -> None:
    """The last line on standard output: the summary as JSON, or the path of what was written."""
    if as_json:
        print(json.dumps(summary, default=str))
    elif written is not None:
        print(written)


def _start(as_json: bool) -> None:
    from moeprune.console import speak

    speak(quiet=as_json)


@app.command()
def run(
    config: Path,
    overrides: Overrides = None,
    until: Annotated[
        str | None, typer.Option(help="Stop after this stage: record, select, prune, dense, evaluate.")
    ] = None,
    redo: Annotated[str | None, typer.Option(help="Run this stage and those after it again.")] = None,
    output: Annotated[Path, typer.Option(help="Directory of run directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """All stages of one run: record, select, prune, evaluate, report."""
    _start(as_json)
    from moeprune.run.pipeline import run_file

    outcome = run_file(config, overrides or [], output=output, until=until, redo=redo)
    summary = {
        "run": outcome.directory,
        "written": outcome.written,
        "metrics": outcome.metrics,
        "warnings": outcome.warnings,
    }
    _finish(summary, outcome.written, as_json=as_json)


@app.command()
def grid(
    config: Path,
    overrides: Overrides = None,
    only: Annotated[str | None, typer.Option(help="Runs whose name matches, e.g. 'hope-*'.")] = None,
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    ray: Annotated[str | None, typer.Option(help="A Ray cluster's HOST:PORT, or local; needs the extra `ray`.")] = None,
    output: Annotated[Path, typer.Option(help="Directory of grid directories.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Every run of a grid, resumed run by run, and their comparison."""
    _start(as_json)
    from moeprune.run.grid import run_grid

    outcome = run_grid(config, overrides or [], output=output, pattern=only, workers=workers, ray=ray)
    summary = {"grid": outcome.directory, "done": outcome.done, "failed": outcome.failed, "report": outcome.report}
    _finish(summary, outcome.report, as_json=as_json)
    if outcome.failed:
        raise typer.Exit(1)


@app.command()
def check(
    config: Path,
    overrides: Overrides = None,
    memory: Annotated[str | None, typer.Option(help="Which ratios and formats fit, e.g. 80GB.")] = None,
    as_json: Json = False,
) -> None:
    """Validate a config: data counts, families, budget and an estimate of the pass; loads no weights."""
    _start(as_json)
    from moeprune.commands.check import check_file

    summary = check_file(config, overrides or [], memory=memory)
    _finish(summary, None, as_json=as_json)


@app.command()
def record(
    model: ModelPath,
    domains: Annotated[list[str], typer.Argument(metavar="NAME=PATH...", help="Domains and their trajectories.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The statistics file to write (.safetensors).")],
    count: Annotated[str, typer.Option(help="Tokens that enter: all, assistant, completion, tool.")] = "all",
    tokens: Annotated[int | None, typer.Option(help="Tokens read of each domain.")] = None,
    sequence_length: Annotated[int, typer.Option()] = 512,
    overflow: Annotated[str, typer.Option(help="split, truncate or skip.")] = "split",
    batch_tokens: Annotated[int, typer.Option()] = 8192,
    statistics: Annotated[
        str, typer.Option(help="default, all (adds output_sum) or samples (adds a token sample too).")
    ] = "default",
    streaming: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    as_json: Json = False,
) -> None:
    """Routing statistics of a model on trajectories."""
    _start(as_json)
    from moeprune.commands.arguments import record_file

    calibration = {"sequence_length": sequence_length, "overflow": overflow, "statistics": statistics}
    each = {"count": count, "tokens": tokens}
    runtime = {"batch_tokens": batch_tokens, "streaming": streaming}
    summary = record_file(model, domains, output, each=each, calibration=calibration, runtime=runtime)
    _finish(summary, output, as_json=as_json)


@app.command()
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
    _start(as_json)
    from moeprune.commands.arguments import select_file

    hope = {"product": product, "normalise": normalise, "pairwise": False if no_pairwise else None}
    budget = {"prune": prune, "scope": scope, "multiple_of": multiple_of, "floor": floor, "ceiling": ceiling}
    budget |= {"must_keep": must_keep or [], "keep_at_least": keep_at_least or []}
    budget["protect_super_experts"] = protect_super_experts
    solving = {"name": solver, "certificate": certificate, "seed": seed}
    summary = select_file(
        statistics, output, criterion=criterion, hope=hope, budget=budget, solver=solving, mix=mix or []
    )
    _finish(summary, output, as_json=as_json)


@app.command()
def prune(
    model: ModelPath,
    plan: Path,
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory of the new checkpoint.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is not empty.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and count, write nothing.")] = False,
    mtp: Annotated[str, typer.Option(help="Multi-token-prediction layers: refuse or drop.")] = "refuse",
    as_json: Json = False,
) -> None:
    """A checkpoint with the kept experts only, as stock engines load it."""
    _start(as_json)
    from moeprune.commands.arguments import prune_directory

    summary = prune_directory(model, plan, output, overwrite=overwrite, dry_run=dry_run, mtp=mtp)
    _finish(summary, None if dry_run else output, as_json=as_json)


@app.command()
def evaluate(
    model: ModelPath,
    plan: Annotated[Path | None, typer.Option(help="Prune in memory by this plan; MODEL is the teacher.")] = None,
    against: Annotated[str | None, typer.Option(help="The unpruned teacher of a pruned checkpoint.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="NAME=PATH; may be given again.")] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Also measure prefill and decode speed.")] = False,
    engine: Annotated[str, typer.Option(help="Where --speed is measured: transformers or vllm.")] = "transformers",
    python: Annotated[Path | None, typer.Option(help="--engine vllm: the Python of its environment.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The metrics to write (.json).")] = Path(
        "metrics.json"
    ),
    as_json: Json = False,
) -> None:
    """Fidelity to the unpruned model on held-out data, worst domain first."""
    _start(as_json)
    from moeprune.commands.evaluate import evaluate_model

    summary = evaluate_model(
        model,
        output,
        plan=plan,
        against=against,
        data=data or [],
        speed=speed,
        engine=engine,
        python=python,
    )
    _finish(summary, output, as_json=as_json)


@app.command()
def compress(
    model: ModelPath,
    config: Annotated[Path, typer.Argument(help="YAML with `dense:` and, if a method needs data, `calibration:`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The directory of the new checkpoint.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a directory that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """A checkpoint with sparse or quantised weights, of a MoE or of a dense model."""
    _start(as_json)
    from moeprune.commands.compress import compress_file

    summary = compress_file(model, config, output, overwrite=overwrite)
    _finish(summary, output, as_json=as_json)


@app.command()
def generate(
    model: ModelPath,
    prompts: Annotated[str, typer.Argument(help="A file or folder of prompts, or reference:agent.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The traces to write (.jsonl).")],
    tools: Annotated[str, typer.Option(help="reference (calculator and lookup, executed) or none.")] = "none",
    temperature: Annotated[float, typer.Option(help="0: the most likely token.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(help="Of one turn.")] = 256,
    turns: Annotated[int, typer.Option(help="Of the model, for one question.")] = 5,
    as_json: Json = False,
) -> None:
    """Trajectories of the model's own making, to calibrate on; a stopped call goes on where it was."""
    _start(as_json)
    from moeprune.commands.generate import generate_file

    options = {
        "tools": tools,
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "turns": turns,
    }
    summary = generate_file(model, prompts, output, options=options)
    _finish(summary, output, as_json=as_json)


@app.command()
def verify(
    checkpoint: Annotated[str | None, typer.Argument(help="The directory of a pruned checkpoint.")] = None,
    against: Annotated[str | None, typer.Option(help="The base model; it is pruned in memory by the plan.")] = None,
    engine: Annotated[str, typer.Option(help="transformers, vllm or llama.cpp.")] = "transformers",
    python: Annotated[Path | None, typer.Option(help="The Python of the engine's environment.")] = None,
    binary: Annotated[Path | None, typer.Option(help="llama.cpp: a llama-server, in place of --python.")] = None,
    gguf: Annotated[Path | None, typer.Option(help="llama.cpp: the file that was exported.")] = None,
    dtype: Annotated[str, typer.Option(help="What the engine computes in: float32, bfloat16, float16.")] = "float32",
    log: Annotated[Path | None, typer.Option(help="Keep the engine's own output in this file.")] = None,
    install: Annotated[str | None, typer.Option(help="Make an environment instead: vllm or llama.cpp.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where --install makes it.")] = None,
    as_json: Json = False,
) -> None:
    """Proof in a serving engine: its greedy tokens and log-probabilities beside the pruned model in memory."""
    _start(as_json)
    from moeprune.commands.verify import install_engine, verify_checkpoint

    if install is not None:
        made = install_engine(install, output, checkpoint)
        _finish({"python": made}, made, as_json=as_json)
        return
    summary = verify_checkpoint(
        checkpoint,
        against=against,
        engine=engine,
        python=python,
        binary=binary,
        gguf=gguf,
        dtype=dtype,
        log=log,
    )
    _finish(summary, summary["checkpoint"], as_json=as_json)
    if not summary["passed"]:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="The directory of a pruned checkpoint.")],
    llama_cpp: Annotated[Path, typer.Option("--llama-cpp", help="A checkout of llama.cpp, with its converter.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write (.gguf).")],
    format: Annotated[str, typer.Option("--format", help="gguf.")] = "gguf",
    outtype: Annotated[str, typer.Option(help="auto, f32, f16, bf16 or q8_0; of the converter.")] = "auto",
    quantize: Annotated[str | None, typer.Option(help="What llama-quantize makes of it, e.g. Q4_K_M.")] = None,
    pre_tokenizer: Annotated[str | None, typer.Option(help="For a vocabulary the converter does not know.")] = None,
    converter_python: Annotated[Path | None, typer.Option(help="The converter's Python, if not this one.")] = None,
    python: Annotated[Path | None, typer.Option(help="A Python with xllamacpp, to compare tokens.")] = None,
    binary: Annotated[Path | None, typer.Option(help="A llama-server, to compare tokens.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: Json = False,
) -> None:
    """A GGUF file by your own llama.cpp, its routing checked against config.json and its tokens in llama.cpp."""
    _start(as_json)
    from moeprune.commands.export import export_file

    summary = export_file(
        checkpoint,
        output,
        format=format,
        llama_cpp=llama_cpp,
        output_type=outtype,
        quantize=quantize,
        pre_tokenizer=pre_tokenizer,
        converter_python=converter_python,
        python=python,
        binary=binary,
        overwrite=overwrite,
    )
    _finish(summary, output, as_json=as_json)
    if summary["proof"] is not None and not summary["proof"]["passed"]:
        raise typer.Exit(1)


@app.command()
def inspect(path: Path, as_json: Json = False) -> None:
    """What is in a statistics file, a plan, a metrics file, a run, a checkpoint or a model."""
    _start(as_json)
    from moeprune.commands.inspect import inspect_path

    lines, summary = inspect_path(path)
    _finish(summary, None, as_json=as_json) if as_json else print("\n".join(lines))


@app.command()
def families(as_json: Json = False) -> None:
    """The model families, with what is verified in the installed transformers release."""
    from moeprune.commands.inspect import families_table

    lines, summary = families_table()
    _finish(summary, None, as_json=as_json) if as_json else print("\n".join(lines))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...")],
    format: Annotated[str, typer.Option("--format", help="html, md or csv.")] = "html",
    together: Annotated[Path | None, typer.Option(help="Compare the runs in one report, in this directory.")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of runs and grids again from what is on disk, or one that compares runs."""
    _start(as_json)
    from moeprune.commands.arguments import report_runs

    written = report_runs(runs, format=format, together=together)
    for path in written[:-1]:
        print(path)
    _finish({"reports": written}, written[-1], as_json=as_json)
