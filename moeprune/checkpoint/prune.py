"""A pruned checkpoint from a plan, written from the source's bytes: streaming, checked, put in place as a whole.

report = prune_checkpoint(Path("Qwen3-30B-A3B"), plan, Path("Qwen3-30B-A3B-pruned"))
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from moeprune.artifacts.files import read_json
from moeprune.artifacts.plan import PrunePlan
from moeprune.artifacts.safetensors_files import Entry
from moeprune.checkpoint.atomic_directory import AtomicDirectory
from moeprune.checkpoint.audit import Audit, require_counts, require_plan_fits, require_reload, require_routers
from moeprune.checkpoint.card import pruned_card
from moeprune.checkpoint.config_json import QUANTIZATION_FILES, count_edits, quantization_edits, renamed_modules
from moeprune.checkpoint.config_json import mtp_edits as mtp_config_edits
from moeprune.checkpoint.edits import expert_edits, module_renamer, mtp_edits, replaced_share
from moeprune.checkpoint.inventory import Inventory, inventory
from moeprune.checkpoint.names import parsed_config
from moeprune.checkpoint.options import MtpPolicy
from moeprune.checkpoint.record import pruned_record
from moeprune.checkpoint.rewrite import CARD, CONFIG, RECORD, Progress, Work, plan_work, write_work
from moeprune.models.engine_limits import notes
from moeprune.reference import named

MTP_WARNING = (
    "multi-token-prediction layers were left out and their count set to 0; speculative decoding with them is gone"
)


@dataclass(frozen=True)
class PruneReport:
    """What was, or with dry_run would be, written."""

    source: Path
    target: Path
    layers: tuple[tuple[str, int, int], ...]  # name, experts before, experts kept
    parameters: int
    parameters_base: int
    bytes: int  # of the tensors
    bytes_base: int
    shards: tuple[str, ...]
    copied: tuple[str, ...]  # other files, byte for byte
    mtp: str  # "none", or "dropped"
    warnings: tuple[str, ...]
    advice: tuple[str, ...]  # what engines do with such a model that people do not expect; on the card too
    audit: Audit | None  # None with dry_run
    fingerprint: str | None  # of the pruned model; None with dry_run
    reused_shards: int  # left whole by a call that was killed
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "source": str(self.source), "target": str(self.target)}


def prune_checkpoint(
    source: Path,
    plan: PrunePlan,
    target: Path,
    *,
    overwrite: bool = False,
    mtp: MtpPolicy = "refuse",
    dry_run: bool = False,
    on_progress: Progress | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> PruneReport:
    """The report of a checkpoint at `target` that has only the experts the plan keeps, in the source's layout.

    Every byte that stays is the source's. `target` appears whole at the end or not at all; a call that was killed is
    resumed by the next one like it. `overwrite` replaces a directory as a whole. `provenance` (`config`, `commit`) goes
    into the card and the record.
    Raises InputError before anything is written for a plan, source or target that does not do; AuditError, with nothing
    in place, when the result is not what it should be.
    """
    started = time.monotonic()
    source = named(Path(source))
    destination = AtomicDirectory(Path(target), source=source, overwrite=overwrite)
    checkpoint = inventory(source)
    kept = require_plan_fits(checkpoint, plan, mtp)
    work, warnings = plan_pruning(checkpoint, plan.kept, kept)
    fingerprint, audit, reused = None, None, 0
    advice = notes(json.loads(work.texts[CONFIG]), [kept], top_k=plan.layers[0].top_k)
    warnings = (*warnings, *(str(note) for note in advice if note.effect == "refuses"))
    checks = _Checks(checkpoint, plan, work, warnings, provenance or {})
    checks.rehearse()
    if not dry_run:
        reused = write_work(work, destination, finish=checks.finish, on_progress=on_progress)
        fingerprint, audit = checks.fingerprint, checks.audit
    sizes = _sizes(checkpoint, work, kept)
    return PruneReport(
        source=source,
        target=Path(target),
        layers=tuple((layer.name, layer.num_experts, kept) for layer in checkpoint.layers),
        **sizes,
        shards=tuple(shard.name for shard in work.shards),
        copied=work.copied,
        mtp="dropped" if checkpoint.mtp else "none",
        warnings=warnings,
        advice=tuple(str(note) for note in advice if note.effect != "refuses"),
        audit=audit,
        fingerprint=fingerprint,
        reused_shards=reused,
        seconds=time.monotonic() - started,
    )


def plan_pruning(checkpoint: Inventory, orders: Mapping[str, Sequence[int]], kept: int) -> tuple[Work, tuple[str, ...]]:
    """(work, warnings): each layer keeps its experts `orders[layer]`; multi-token-prediction layers go."""
    edits = {**expert_edits(checkpoint, orders), **mtp_edits(checkpoint)}
    family, before = checkpoint.memory.family, checkpoint.memory.num_experts
    config_edits, warnings = count_edits(checkpoint.config, family, before, kept)
    renamed = module_renamer(checkpoint, orders)
    config_edits |= quantization_edits(checkpoint.config, renamed)
    warnings += _table_warnings(checkpoint, orders)
    if checkpoint.mtp:
        config_edits |= mtp_config_edits(checkpoint.config, family)
        warnings.append(MTP_WARNING)
    texts = {}
    for name in QUANTIZATION_FILES:
        path = checkpoint.directory / name
        if path.is_file():
            value = read_json(path)
            new = renamed_modules(value, renamed)
            if new != value:
                texts[name] = json.dumps(new, indent=2, ensure_ascii=False) + "\n"
    work = plan_work(checkpoint, edits, config_edits=config_edits, texts=texts)
    return work, (*checkpoint.warnings, *warnings, *work.warnings)


def _table_warnings(checkpoint: Inventory, orders: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for tensor in checkpoint.tensors:
        kept = orders.get(tensor.layer or "") if tensor.role == "table" else None
        if kept is not None:
            share = replaced_share(checkpoint.directory / tensor.shard, tensor.entry, kept)
            yield (
                f"{tensor.layer}: its experts are listed by token; {100 * share:.0f} % of the entries named an expert "
                "that is gone and now name a kept one, in turn"
            )


class _Checks:
    """What is checked before and after the files are written, and what the card and the record then say."""

    def __init__(
        self,
        source: Inventory,
        plan: PrunePlan,
        work: Work,
        warnings: tuple[str, ...],
        provenance: Mapping[str, Any],
    ) -> None:
        self.source, self.plan, self.work, self.warnings, self.provenance = source, plan, work, warnings, provenance
        self.kept = len(plan.layers[0].kept)
        self.unused: tuple[str, ...] = ()
        self.audit: Audit | None = None
        self.fingerprint: str | None = None

    def rehearse(self) -> None:
        """Load the model that will be written, from names and shapes alone, before a byte is copied."""
        config = parsed_config(self.work.texts[CONFIG])
        require_counts(config, self.source, self.kept)
        if self.source.quantization is None:
            self.unused = require_reload(config, self.work.entries, self.source)

    def finish(self, directory: Path, entries: Mapping[str, Entry]) -> dict[str, str]:
        """The card and the record of a directory whose files are as planned."""
        from moeprune.models.layers import fingerprint

        routers = require_routers(directory, entries, self.source, self.plan.kept)
        layers = [replace(layer, num_experts=self.kept) for layer in self.source.layers]
        self.fingerprint = fingerprint(self.source.memory.model_type, layers, routers)
        method = self.source.quantization
        self.audit = Audit(
            tensors=len(entries),
            dropped=len(self.source.tensors) - len(entries),
            files=len(self.work.shards) + len(self.work.copied) + len(self.work.texts) + 2,  # the card and the record
            routers=len(routers),
            reload="strict"
            if method is None
            else f"left out: {method} kernels are needed; names and shapes were checked",
            unused=self.unused,
        )
        record = pruned_record(
            self.source,
            self.plan,
            fingerprint=self.fingerprint,
            key=self.work.key,
            mtp="dropped" if self.source.mtp else "none",
            sizes=_sizes(self.source, self.work, self.kept),
            hashes=self.work.hashes(directory),
            audit=asdict(self.audit),
            provenance=self.provenance,
        )
        config = json.loads(self.work.texts[CONFIG])
        card = pruned_card(record, self.source.directory, config=config, warnings=self.warnings)
        return {CARD: card, RECORD: json.dumps(record, indent=2, ensure_ascii=False) + "\n"}


def _sizes(checkpoint: Inventory, work: Work, kept: int) -> dict[str, int]:
    """Parameters and bytes before and after; the model counts for quantised files, whose elements hold several each."""
    memory = checkpoint.memory
    parameters, parameters_base = work.elements, checkpoint.elements
    if checkpoint.quantization is not None:
        parameters_base = memory.elements
        per_expert = sum(
            math.prod(memory.shapes[name]) * axis.size // memory.shapes[name][axis.axis]
            for name, axis in memory.expert_axes.items()
        )
        parameters = parameters_base - per_expert * (memory.num_experts - kept)
    return {
        "parameters": parameters,
        "parameters_base": parameters_base,
        "bytes": work.tensor_bytes,
        "bytes_base": checkpoint.tensor_bytes,
    }
