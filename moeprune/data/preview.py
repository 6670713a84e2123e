"""Calibration data as a person looks at it: a table of counts, and an example with what counts set apart."""

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from moeprune.data.trajectories import Sequence, TokenSet

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

COUNTED, OTHER, SIGN = "bold cyan", "dim", "magenta"


def describe(token_set: TokenSet) -> "Table":
    """One row a domain: records used and skipped, tokens, what counts, tokens by role, longest bucket of lengths."""
    from rich.table import Table

    table = Table(title="Calibration data")
    for name in ("domain", "records", "skipped", "tokens", "counted", "pieces"):
        table.add_column(name, justify="left" if name == "domain" else "right")
    table.add_column("tokens by role")
    table.add_column("trajectory lengths")
    for name, told in token_set.manifest.items():
        skipped = ", ".join(f"{count} {reason}" for reason, count in told["records_skipped"].items())
        table.add_row(
            name,
            f"{told['records_used']:,} of {told['records_read']:,}",
            skipped or "0",
            f"{told['tokens']:,}",
            f"{told['counted']:,} ({told['count']})",
            f"{told['pieces']:,}",
            ", ".join(f"{role} {share:.0%}" for role, share in _shares(told["tokens_by_role"])),
            ", ".join(f"{bucket}: {count}" for bucket, count in told["length_histogram"].items()),
        )
    return table


def _shares(tokens: dict[str, int]) -> list[tuple[str, float]]:
    total = sum(tokens.values()) or 1
    return [(role, count / total) for role, count in sorted(tokens.items(), key=lambda item: (-item[1], item[0]))]


def example(token_set: TokenSet, tokenizer: Any, domain: str, *, tokens: int = 200) -> "Text":
    """The beginning of a trajectory of `domain`: what counts in colour and between ⟦ ⟧, the rest dim.

    The signs are there for terminals without colour; where everything counts there are none.
    """
    from rich.text import Text

    sequence = _telling(token_set, domain, tokens)
    ids, counted = sequence.ids[:tokens], sequence.counted[:tokens]
    some = not counted.all()
    text = Text()
    start = 0
    for position in range(1, len(ids) + 1):
        if position < len(ids) and counted[position] == counted[start]:
            continue
        run = tokenizer.decode(ids[start:position].tolist(), clean_up_tokenization_spaces=False)
        if counted[start] and some:
            text.append("⟦", SIGN).append(run, COUNTED).append("⟧", SIGN)
        else:
            text.append(run, COUNTED if counted[start] else OTHER)
        start = position
    if len(sequence.ids) > tokens:
        text.append(" …", SIGN)
    return text


def _telling(token_set: TokenSet, domain: str, tokens: int) -> Sequence:
    """The first sequence that shows both what counts and what does not within `tokens`, or else the first one."""
    own: Items[Sequence] = [sequence for sequence in token_set.sequences if sequence.domain == domain]
    assert own, f"no sequence of {domain}"
    return next((s for s in own if s.counted[:tokens].any() and not s.counted[:tokens].all()), own[0])
