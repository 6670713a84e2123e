"""Domains -> token sequences, with counts of what was read, used, skipped and cut; sequences -> padded batches.

A sequence is padded to a length that its own length decides, and shares a batch only with sequences of the same padded
length. So a kernel's result for it does not depend on its neighbours: on CPU, in float32, attention and matrix products
give the same bits whatever the batch size, and no near tie in a router falls to the other side.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.data.chats import Encoded
from moeprune.data.encoding import Encoder
from moeprune.data.manifest import Tally
from moeprune.data.options import Domain, Intake, Part
from moeprune.data.readers import RecordProblem
from moeprune.data.records import Record, normalise, without_near_duplicates
from moeprune.data.sources import Source, open_source

if TYPE_CHECKING:
    import torch

CHUNK = 64  # records that are tokenised together
PAD_ID = 0  # any id does: the attention mask says what is padding


@dataclass(frozen=True)
class Sequence:
    """One piece of a trajectory as the model reads it."""

    ids: np.ndarray  # (tokens,) int32
    counted: np.ndarray  # (tokens,) bool: enters the statistics
    domain: str
    trajectory: str  # sha256 of the WHOLE trajectory's ids as little-endian int64
    piece: int = 0  # pieces after the first start without their past

    @property
    def half(self) -> str:
        """ "even" or "odd": the half of the trajectories that this one belongs to."""
        return "even" if int(self.trajectory[-1], 16) % 2 == 0 else "odd"


@dataclass(frozen=True)
class TokenSet:
    """Sequences in an order that no file order can change, and what happened on the way, by domain."""

    sequences: tuple[Sequence, ...]
    manifest: Mapping[str, Mapping[str, Any]]
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(sequence.ids) for sequence in self.sequences)


def load_tokens(
    domains: Collection[Domain],
    tokenizer: Any,
    intake: Intake | None = None,
    *,
    part: Part = "all",
    holdout: float = 0.0,
    vocab_size: int | None = None,
) -> TokenSet:
    """The token sequences of all domains.

    `reference:NAME` has its held-out trajectories in a file of their own; of any other path "heldout" takes the
    trajectories whose hash falls into the share `holdout` and "calibration" the others. `vocab_size` limits
    pre-tokenised ids (default: the tokenizer's). Raises InputError for bad input, for a domain without a usable
    record and for one with fewer counted tokens than intake.minimum_tokens.
    """
    intake = intake or Intake()
    if part not in get_args(Part):
        raise InputError(f"part: {part!r} is none of {', '.join(get_args(Part))}")
    names = [domain.name for domain in domains]
    if not names:
        raise InputError("domains: none was given, so there is nothing to read; give at least one")
    if twice := {name for name in names if names.count(name) > 1}:
        raise InputError(f"domains: the name {min(twice)} stands twice; give every domain a name of its own")
    sequences: list[Sequence] = []
    manifest, warnings = {}, []
    for domain in domains:
        encoder = Encoder(tokenizer, intake, count=domain.count, vocab_size=vocab_size)
        tally = Tally(domain, intake, part)
        source = open_source(domain, part=part)
        share = _share(source, part, holdout)
        encoded = _encoded(_records(source, domain, intake, tally), encoder, tally)
        sequences += _take(encoded, tally, share=share)
        manifest[domain.name] = tally.finish(source)
        warnings += tally.warnings()
    return TokenSet(tuple(sequences), manifest, tuple(warnings))


def load_records(
    domain: Domain,
    *,
    part: Part = "all",
    intake: Intake | None = None,
    tokenizer: Any = None,
    holdout: float = 0.0,
) -> list[dict[str, Any]]:
    """The normalised records (messages and tools, or text, or input_ids) in the order of the files.

    Which part a trajectory of a path other than `reference:` belongs to depends on its token ids, so the tokenizer is
    needed.
    """
    intake = intake or Intake()
    tally = Tally(domain, intake, part)
    source = open_source(domain, part=part)
    records = [record for _, record in _normalised(source, domain, intake, tally)]
    if not records:
        raise tally.nothing_usable()
    share = _share(source, part, holdout)
    if share is None:
        return [record.plain() for record in records]
    assert tokenizer is not None, "a held-out share of a user's file needs the tokenizer"
    encoded = Encoder(tokenizer, intake).encode(records)
    kept = [r for r, e in zip(records, encoded) if isinstance(e, Encoded) and _in_part(e.trajectory, share)]
    return [record.plain() for record in kept]


def _share(source: Source, part: Part, holdout: float) -> tuple[float, float] | None:
    """The interval of hashes that this part takes, None for all of them."""
    if part == "all" or source.splits_itself:
        return None
    if part == "heldout" and not holdout > 0:
        raise InputError("evaluation.holdout is 0, so no trajectory is held out; raise it or name evaluation.domains")
    return (0.0, holdout) if part == "heldout" else (holdout, 1.0)


def _in_part(trajectory: str, share: tuple[float, float]) -> bool:
    return share[0] <= int(trajectory[:13], 16) / 16**13 < share[1]


def _normalised(source: Source, domain: Domain, intake: Intake, tally: Tally) -> Iterator[tuple[str, Record]]:
    """Every good record after a hash of its content and the seed."""
    for raw in source.records:
        tally.read()
        try:
            if raw.problem:
                raise raw.problem
            record = normalise(raw.value, raw.place, fields=domain.fields, tabular=raw.tabular)
            yield record.digest(intake.seed), record
        except RecordProblem as problem:
            tally.problem(problem, raw.place)


def _records(source: Source, domain: Domain, intake: Intake, tally: Tally) -> Iterator[Record]:
    """The records in the order of their hashes, so that a token limit takes the same whatever the file order."""
    keyed: Iterable[tuple[str, Record]] = _normalised(source, domain, intake, tally)
    if intake.shuffle and not domain.streaming:
        keyed = sorted(keyed, key=lambda pair: pair[0])
    records = (record for _, record in keyed)
    if intake.near_duplicates is None:
        return records
    return without_near_duplicates(records, intake.near_duplicates, on_drop=tally.near_duplicate)


def _encoded(records: Iterator[Record], encoder: Encoder, tally: Tally) -> Iterator[tuple[Record, Encoded]]:
    while chunk := list(islice(records, CHUNK)):
        for record, encoded in zip(chunk, encoder.encode(chunk)):
            if isinstance(encoded, RecordProblem):
                tally.problem(encoded, record.place)
            else:
                tally.rendered(encoder.rendering(record))
                yield record, encoded


def _take(
    encoded: Iterator[tuple[Record, Encoded]], tally: Tally, *, share: tuple[float, float] | None
) -> Iterator[Sequence]:
    """Pieces until the domain's limit; the last trajectory is cut so that the limit is met exactly."""
    domain, intake, left = tally.domain, tally.intake, tally.domain.tokens
    empty = True
    for record, whole in encoded:
        trajectory = whole.trajectory
        if share is not None and not _in_part(trajectory, share):
            tally.other_part()
            continue
        allowed = _allowed(len(whole.ids), domain, intake)
        pieces = _pieces(allowed if left is None else min(allowed, left), intake.sequence_length)
        taken = tally.used(record, whole, trajectory, pieces, allowed)
        for index, piece in enumerate(pieces):
            empty = False
            yield Sequence(whole.ids[piece], whole.counted[piece], domain.name, trajectory, index)
        left = None if left is None else left - taken
        if left == 0:
            break
    if empty:
        raise tally.nothing_usable()


def _allowed(length: int, domain: Domain, intake: Intake) -> int:
    """How many tokens of a trajectory may enter: the cap per trajectory, then the overflow policy."""
    length = min(length, domain.trajectory_tokens or length)
    if length <= intake.sequence_length or intake.overflow == "split":
        return length
    return intake.sequence_length if intake.overflow == "truncate" else 0


def _pieces(length: int, longest: int) -> list[slice]:
    return [slice(start, min(start + longest, length)) for start in range(0, length, longest)]


def padded_length(length: int) -> int:
    """The length a sequence of this length is padded to: eight steps an octave, a multiple of 8.

    So at most 1/8 is padding from 64 tokens on. A multiple of 8, because the last rows of a matrix product that are no
    full block of 4 take another path on CPU.
    """
    step = max(8, 2 ** (length.bit_length() - 4))
    return -(-length // step) * step


def plan_batches(sequences: Items[Sequence], batch_tokens: int) -> list[list[int]]:
    """Indices of every batch: sequences of one domain, one half and one padded length, at most `batch_tokens` padded.

    A sequence longer than `batch_tokens` is a batch of its own. The same sequences give the same batches in
    whatever order they come.
    """
    order = sorted(range(len(sequences)), key=lambda index: _rank(sequences[index]))
    batches: list[list[int]] = []
    for index in order:
        sequence = sequences[index]
        last = sequences[batches[-1][0]] if batches else None
        together = last is not None and _kind(last) == _kind(sequence)
        if together and (len(batches[-1]) + 1) * padded_length(len(sequence.ids)) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _kind(sequence: Sequence) -> tuple[str, str, int]:
    return sequence.domain, sequence.half, padded_length(len(sequence.ids))


def _rank(sequence: Sequence) -> tuple[str, str, int, str, int, bytes]:
    counted = sequence.counted.tobytes()  # two records with the same ids may count different tokens
    return (sequence.domain, sequence.half, len(sequence.ids), sequence.trajectory, sequence.piece, counted)


def collate(sequences: Items[Sequence]) -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Input ids int64, attention mask int64 and counted bool, each (sequences, padded length), padded on the right."""
    import torch

    shape = (len(sequences), padded_length(max(len(sequence.ids) for sequence in sequences)))
    input_ids = torch.full(shape, PAD_ID, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        length = len(sequence.ids)
        input_ids[row, :length] = torch.from_numpy(sequence.ids.astype("int64"))
        attention_mask[row, :length] = 1
        counted[row, :length] = torch.from_numpy(sequence.counted)
    return input_ids, attention_mask, counted
