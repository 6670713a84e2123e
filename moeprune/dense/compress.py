"""A compressed checkpoint from a checkpoint: walked block by block, written, loaded again, and only then in place."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.safetensors_files import Entry
from moeprune.checkpoint.atomic_directory import AtomicDirectory
from moeprune.checkpoint.audit import AuditError
from moeprune.checkpoint.card import compressed_card, method_text
from moeprune.checkpoint.inventory import Inventory, inventory
from moeprune.checkpoint.options import Layout
from moeprune.checkpoint.record import compressed_record
from moeprune.checkpoint.rewrite import CARD, RECORD, Work, plan_work, write_work
from moeprune.console import progress, say
from moeprune.data.trajectories import TokenSet
from moeprune.dense.chain import name_of
from moeprune.dense.drivers import CompressJob, Streaming, Walked, walked
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.reload import Reloaded, ReloadError
from moeprune.dense.report import DenseReport
from moeprune.models.loading import without_bars
from moeprune.models.options import Dtype


@dataclass(frozen=True)
class CompressReport:
    """What was written."""

    dense: DenseReport
    reloaded: Reloaded  # what was compared after loading the checkpoint again, and found equal
    parameters: int
    bytes: int  # of the tensors
    bytes_base: int
    warnings: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        return {**fields, "dense": {"coverage": fields["dense"]["coverage"], "metrics": self.dense.metrics()}}


def need_data(methods: Sequence[DenseMethod]) -> list[str]:
    """The methods that look at calibration tokens, by name."""
    return [str(method.name) for method in methods if method.needs != "nothing"]  # type: ignore[attr-defined]


def require_plain(checkpoint: Inventory) -> None:
    """Raises InputError for weights that are packed already."""
    if checkpoint.packed is not None:
        raise InputError(
            f"{checkpoint.directory}: its weights are packed already ({checkpoint.packed}); compress the unquantised "
            "checkpoint, with all methods in one `dense:`"
        )


def compress_checkpoint(
    source: Path,
    target: Path,
    methods: Sequence[DenseMethod],
    tokens: TokenSet | None,
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    batch_tokens: int = 8192,
    layout: Layout = "auto",
    streaming: Streaming = "auto",
    overwrite: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> CompressReport:
    """The report of a checkpoint at `target` with the weights of `source` after all methods, in order.

    `target` appears whole, loaded once and compared, or not at all. Finished blocks are kept beside it until then, so
    that a killed call goes on where it was. `dtype` and `device` are those of the model in memory; with `streaming`
    on, or auto where the model does not fit, one block at a time is. `provenance` (`config`, `commit`) goes into
    moeprune.json.
    Raises InputError before the first block for methods, sources and targets that do not do.
    """
    started = time.monotonic()
    place = AtomicDirectory(target, source=source, overwrite=overwrite)
    checkpoint = inventory(source)
    require_plain(checkpoint)
    state = place.target.with_name(f".{place.target.name}.moeprune-dense")
    say(f"dense: {'; '.join(map(_in_a_line, methods))}")
    job = CompressJob(checkpoint, methods, tokens, state, dtype, device, batch_tokens, layout)
    done = walked(job, streaming=streaming)
    export, report = done.export, done.compressed.report
    describe_coverage(report)
    work = plan_work(checkpoint, export.edits(done.compressed), config_edits=export.config_edits, texts=export.texts)
    warnings = (*checkpoint.warnings, *report.warnings, *export.warnings, *work.warnings, *_left(checkpoint))
    finish = _Finish(checkpoint, done, methods, tokens, work, warnings, provenance or {})
    with progress("writing", unit="bytes") as written:
        write_work(work, place, finish=finish, on_progress=written)
    shutil.rmtree(state, ignore_errors=True)
    assert finish.reloaded is not None
    return CompressReport(
        report, finish.reloaded, **finish.sizes, warnings=warnings, seconds=time.monotonic() - started
    )


def _in_a_line(method: DenseMethod) -> str:
    """The method and what differs from its defaults."""
    return method_text({"name": name_of(method), **method.model_dump(mode="json", exclude_defaults=True)})


def describe_coverage(report: DenseReport) -> None:
    """The coverage table: every matrix of the model is in one of its rows."""
    rows = [("role", "what was done", "weights", "parameters", "for example")]
    rows += [(r.role, r.methods, f"{r.weights:,}", f"{r.parameters:,}", r.example) for r in report.coverage]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        left, right = row[:2], row[2:4]
        cells = [f"{text:{width}}" for text, width in zip(left, widths)]
        cells += [f"{text:>{width}}" for text, width in zip(right, widths[2:])]
        say(f"dense: {'  '.join(cells)}  {row[4]}")


def _left(checkpoint: Inventory) -> tuple[str, ...]:
    if not checkpoint.mtp:
        return ()
    return (f"{len(checkpoint.mtp)} tensors of multi-token-prediction layers are copied as they are",)


def _calibration(tokens: TokenSet | None) -> dict[str, Any]:
    """Domain -> where it came from and how much of it was read."""
    keys = ("path", "records_used", "tokens", "counted")
    manifest = tokens.manifest if tokens is not None else {}
    return {name: {key: entry[key] for key in keys if key in entry} for name, entry in manifest.items()}


class _Finish:
    """Loads what was written, compares it with what the walk made, and writes the card and the record."""

    def __init__(
        self,
        source: Inventory,
        done: Walked,
        methods: Sequence[DenseMethod],
        tokens: TokenSet | None,
        work: Work,
        warnings: Sequence[str],
        provenance: Mapping[str, Any],
    ) -> None:
        self.source, self.done, self.methods = source, done, methods
        self.tokens, self.work, self.warnings, self.provenance = tokens, work, warnings, provenance
        self.reloaded: Reloaded | None = None
        self.sizes = {
            "parameters": source.elements,
            "bytes": work.tensor_bytes,
            "bytes_base": source.tensor_bytes,
        }

    def __call__(self, directory: Path, entries: Mapping[str, Entry]) -> dict[str, str]:
        unused = {tensor.name for tensor in self.source.tensors if tensor.target is None}
        try:
            with without_bars():
                self.reloaded = self.done.reload(directory, unused)
        except ReloadError as error:
            raise AuditError(str(error)) from error
        report = self.done.compressed.report
        plain = report.plain()
        record = compressed_record(
            self.source,
            {
                "methods": [method.model_dump(mode="json") for method in self.methods],
                "calibration": _calibration(self.tokens),
                "coverage": plain["coverage"],
                "metrics": report.metrics(),
                "warnings": plain["warnings"],
            },
            sizes=self.sizes,
            hashes=self.work.hashes(directory),
            audit={"tensors": len(entries), "reload": "strict", **asdict(self.reloaded)},
            provenance=self.provenance,
        )
        packed = bool(self.done.export.schemes)
        card = compressed_card(record, self.source.directory, packed=packed, warnings=self.warnings)
        return {CARD: card, RECORD: json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n"}
