"""Calibration data for people: a table of counts, and an example that sets apart what counts."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from moeprune.data.trajectories import Sequence, TokenSet

COUNTED, OTHER, SIGN = "bold cyan", "dim", "magenta"  # styles of an example's text


def describe(token_set: "TokenSet", *, title: str | None = None) -> "Table":
    """One row a domain: records used and skipped, tokens, what counts, tokens by role, longest bucket of lengths."""
    from rich.table import Column, Table

    numbers = [Column(name, justify="right") for name in ("records", "skipped", "tokens", "counted", "pieces")]
    table = Table("domain", *numbers, "tokens by role", "trajectory lengths", title=title)
    for name, counts in token_set.manifest.items():
        skipped = ", ".join(f"{count} {reason}" for reason, count in counts["records_skipped"].items())
        total = sum(counts["tokens_by_role"].values()) or 1
        roles = sorted(counts["tokens_by_role"].items(), key=lambda item: (-item[1], item[0]))
        table.add_row(
            name,
            f"{counts['records_used']:,} of {counts['records_read']:,}",
            skipped or "0",
            f"{counts['tokens']:,}",
            f"{counts['counted']:,} ({counts['count']})",
            f"{counts['pieces']:,}",
            ", ".join(f"{role} {tokens / total:.0%}" for role, tokens in roles),
            ", ".join(f"{bucket}: {count}" for bucket, count in counts["length_histogram"].items()),
        )
    return table


def example(token_set: "TokenSet", tokenizer: Any, domain: str, *, tokens: int = 200) -> "Text":
    """The beginning of a trajectory of `domain`: what counts in colour and between ⟦ ⟧, the rest dim.

    The signs serve terminals without colour; a text that counts as a whole has none.
    """
    from rich.text import Text

    sequence = _mixed_sequence(token_set, domain, tokens)
    ids, counted = sequence.ids[:tokens], sequence.counted[:tokens]
    with_signs = not counted.all()
    text = Text()
    first = 0  # of a stretch of tokens that all count, or all do not
    for position in range(1, len(ids) + 1):
        if position < len(ids) and counted[position] == counted[first]:
            continue
        stretch = tokenizer.decode(ids[first:position].tolist(), clean_up_tokenization_spaces=False)
        if counted[first] and with_signs:
            text.append("⟦", SIGN).append(stretch, COUNTED).append("⟧", SIGN)
        else:
            text.append(stretch, COUNTED if counted[first] else OTHER)
        first = position
    if len(sequence.ids) > tokens:
        text.append(" …", SIGN)
    return text


def _mixed_sequence(token_set: "TokenSet", domain: str, tokens: int) -> "Sequence":
    """The first sequence with both tokens that count and others among its first `tokens`; else the first of all."""
    own = [sequence for sequence in token_set.sequences if sequence.domain == domain]
    assert own, f"no sequence of {domain}"
    return next((s for s in own if s.counted[:tokens].any() and not s.counted[:tokens].all()), own[0])
