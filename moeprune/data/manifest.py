"""What happened to the records of a domain on their way to tokens, as counts, for the report and for warnings."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.data.chats import Encoded
from moeprune.data.options import Domain, Intake, Part
from moeprune.data.readers import RecordProblem
from moeprune.data.records import Record
from moeprune.data.sources import Source

FEW_TOKENS = 1000  # counted tokens under which statistics say little
EXAMPLES = 5  # places of skipped records that the manifest names
TOO_LONG = "longer than sequence_length"


class Tally:
    """The counts of one domain while it is read."""

    def __init__(self, domain: Domain, intake: Intake, part: Part) -> None:
        self.domain, self.intake, self.part = domain, intake, part
        self.records: Counter[str] = Counter()  # read, used, other_part
        self.skipped: Counter[str] = Counter()  # reason -> records
        self.examples: list[str] = []
        self.shapes: Counter[str] = Counter()
        self.renderings: Counter[str] = Counter()
        self.changes: Counter[str] = Counter()
        self.roles: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # tokens, counted, pieces and what overflow did
        self.lengths: Counter[int] = Counter()  # bits of the length -> trajectories
        self.seen: set[str] = set()

    def read(self) -> None:
        self.records["read"] += 1

    def problem(self, problem: RecordProblem, place: str) -> None:
        """Counts a bad record. Raises InputError when the config says that a bad record is an error."""
        message = f"{place}: {problem}"
        if self.intake.on_bad_record == "error":
            raise InputError(f"{message}; fix the record or set calibration.on_bad_record=skip")
        self.skip(problem.reason, message)

    def skip(self, reason: str, message: str) -> None:
        self.skipped[reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(message)

    def near_duplicate(self) -> None:
        self.counts["near_duplicates"] += 1

    def rendered(self, how: str) -> None:
        self.renderings[how] += 1

    def other_part(self) -> None:
        self.records["other_part"] += 1

    def used(self, record: Record, whole: Encoded, trajectory: str, pieces: Sequence[slice], allowed: int) -> int:
        """Counts a trajectory of which `pieces` are taken; without the domain's limit it would be `allowed` tokens.

        Returns the tokens taken.
        """
        taken = sum(piece.stop - piece.start for piece in pieces)
        self.counts["tokens_before_overflow"] += len(whole.ids)
        self.counts["tokens_lost"] += len(whole.ids) - allowed
        self._turns(whole, allowed)
        if not pieces:
            self.skip(
                TOO_LONG, f"{record.place}: {len(whole.ids)} tokens > sequence_length={self.intake.sequence_length}"
            )
            return 0
        self.records["used"] += 1
        self.shapes[record.kind] += 1
        self.changes.update(record.changes)
        self.changes.update(whole.changes)
        self.counts["tokens"] += taken
        self.counts["counted"] += int(whole.counted[:taken].sum())
        self.counts["pieces"] += len(pieces)
        self.counts["trajectories_split"] += len(pieces) > 1
        self.counts["trajectories_cut_by_limit"] += taken < allowed
        self.counts["tokens_without_their_past"] += taken - (pieces[0].stop - pieces[0].start)
        self.counts["calls_without_tools"] += not record.tools and any(m.get("tool_calls") for m in record.messages)
        self.roles.update(whole.roles[:taken].tolist())
        self.lengths[len(whole.ids).bit_length()] += 1
        self.counts["duplicates"] += trajectory in self.seen
        self.seen.add(trajectory)
        return taken

    def _turns(self, whole: Encoded, allowed: int) -> None:
        """Turns of the assistant and of tools that overflow takes away, cuts in two, or parts from their context."""
        length = self.intake.sequence_length
        for role, start, end in whole.turns:
            self.counts[f"{role}_turns"] += 1
            if start >= allowed:
                self.counts[f"{role}_turns_lost"] += 1
            elif end > allowed or start // length != (end - 1) // length:
                self.counts[f"{role}_turns_cut"] += 1
            elif start >= length:
                self.counts[f"{role}_turns_without_their_past"] += 1

    def nothing_usable(self) -> InputError:
        """The error for a domain without a usable record, with the reasons."""
        where = f"domain {self.domain.name}: {self.domain.path} has no usable record"
        if self.part != "all":
            where += f" for the {self.part} part"
        reasons = self._reasons() or f"{self.records['read']} were read"
        first = f"; first: {self.examples[0]}" if self.examples else ""
        return InputError(f"{where} ({reasons}{first}); correct the data, fields, holdout or overflow")

    def _reasons(self) -> str:
        reasons = [f"{count} {reason}" for reason, count in sorted(self.skipped.items())]
        if self.records["other_part"]:
            reasons.append(f"{self.records['other_part']} belong to the other part")
        return ", ".join(reasons)

    def finish(self, source: Source) -> dict[str, Any]:
        """The manifest of the domain. Raises InputError when it has too few counted tokens."""
        self._check_minimum()
        counts = self.counts
        return {
            "path": self.domain.path,
            "part": self.part,
            "files": list(source.files),
            "files_ignored": list(source.ignored),
            "count": self.domain.count,
            "limit": self.domain.tokens,
            "records_read": self.records["read"],
            "records_used": self.records["used"],
            "records_skipped": dict(sorted(self.skipped.items())),
            "records_of_other_part": self.records["other_part"],
            "records_beyond_limit": self._beyond(),
            "skipped_examples": list(self.examples),
            "shapes": dict(sorted(self.shapes.items())),
            "renderings": dict(sorted(self.renderings.items())),
            "changes": dict(sorted(self.changes.items())),
            "duplicates": counts["duplicates"],
            "near_duplicates_left_out": counts["near_duplicates"],
            "calls_without_tools": counts["calls_without_tools"],
            "tokens": counts["tokens"],
            "counted": counts["counted"],
            "tokens_by_role": dict(sorted(self.roles.items())),
            "pieces": counts["pieces"],
            "length_histogram": {_bucket(bits): self.lengths[bits] for bits in sorted(self.lengths)},
            "overflow": self._overflow(),
        }

    def _beyond(self) -> int:
        """Good records that the token limit left unread."""
        done = self.records["used"] + self.records["other_part"] + sum(self.skipped.values())
        done += self.counts["near_duplicates"]
        return self.records["read"] - done

    def _overflow(self) -> dict[str, Any]:
        counts = self.counts
        names = ("tokens_lost", "tokens_without_their_past", "trajectories_split", "trajectories_cut_by_limit")
        fates = ("turns_lost", "turns_cut", "turns_without_their_past")
        turns = [(f"{role}_{fate}", f"{role}_turns") for role in ("assistant", "tool") for fate in fates]
        return {
            "policy": self.intake.overflow,
            "sequence_length": self.intake.sequence_length,
            **{name: counts[name] for name in names},
            "share_tokens_lost": _share(counts["tokens_lost"], counts["tokens_before_overflow"]),
            "share_tokens_without_their_past": _share(counts["tokens_without_their_past"], counts["tokens"]),
            "assistant_turns": counts["assistant_turns"],
            "tool_turns": counts["tool_turns"],
            **{fate: counts[fate] for fate, _ in turns},
            **{f"share_{fate}": _share(counts[fate], counts[every]) for fate, every in turns},
        }

    def _check_minimum(self) -> None:
        counted, wanted = self.counts["counted"], self.intake.minimum_tokens
        if counted < wanted:
            raise InputError(
                f"domain {self.domain.name}: {counted} tokens count (count={self.domain.count}, "
                f"{self.counts['tokens']} read) and calibration.minimum_tokens is {wanted}; "
                "give more data, another count or a lower minimum_tokens"
            )

    def warnings(self) -> list[str]:
        """Sentences for the report about what makes this domain's numbers less reliable."""
        counts, notes = self.counts, []
        if counts["counted"] < FEW_TOKENS:
            notes.append(f"only {counts['counted']} tokens count; statistics of fewer than {FEW_TOKENS} say little")
        if self.domain.tokens and counts["tokens"] < self.domain.tokens:
            notes.append(f"the data has {counts['tokens']} tokens, fewer than the limit tokens={self.domain.tokens}")
        if self.skipped:
            notes.append(self._skips())
        if counts["tokens_lost"] and not self.domain.trajectory_tokens:  # a stated cap is no surprise
            notes.append(self._lost())
        if counts["calls_without_tools"]:
            notes.append(f"{counts['calls_without_tools']} trajectories call tools without a `tools` list")
        if self.changes["roles unknown"]:
            notes.append(f"in {self.changes['roles unknown']} trajectories the template hides who wrote some tokens")
        if dropped := self.changes["messages dropped by the template"]:
            notes.append(f"the chat template leaves out {dropped} messages (an unknown role?)")
        parted = counts["assistant_turns_without_their_past"] + counts["assistant_turns_cut"]
        if parted:
            notes.append(
                f"{_share(parted, counts['assistant_turns']):.0%} of {counts['assistant_turns']} assistant turns are "
                "cut or parted from their context "
                f"(sequence_length={self.intake.sequence_length}, overflow={self.intake.overflow})"
            )
        return [f"domain {self.domain.name}: {sentence}" for sentence in notes]

    def skip_warnings(self) -> list[str]:
        """The sentence about skipped records alone."""
        return [f"domain {self.domain.name}: {self._skips()}"] if self.skipped else []

    def _skips(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.skipped.items()))
        skipped, read = sum(self.skipped.values()), self.records["read"]
        return f"{skipped} of {read} records skipped ({reasons}; first: {self.examples[0]})"

    def _lost(self) -> str:
        tokens = _share(self.counts["tokens_lost"], self.counts["tokens_before_overflow"])
        sentence = f"{tokens:.1%} of the tokens are lost (overflow={self.intake.overflow}"
        for role in ("assistant", "tool"):
            if turns := self.counts[f"{role}_turns"]:
                sentence += f"; {_share(self.counts[f'{role}_turns_lost'], turns):.1%} of the {role} turns"
        return sentence + ")"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _bucket(bits: int) -> str:
    """The lengths with so many bits, such as "64-127"."""
    low = 1 << (bits - 1)
    return str(low) if bits == 1 else f"{low}-{2 * low - 1}"
