"""Records of every kind -> tokens, in batches."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moeprune.artifacts.errors import InputError
from moeprune.data import masks
from moeprune.data.chats import Chats, Encoded
from moeprune.data.options import Count, Intake
from moeprune.data.readers import RecordProblem
from moeprune.data.records import Record


class Encoder:
    """Records to tokens for one tokenizer and one `count`."""

    def __init__(self, tokenizer: Any, intake: Intake, *, count: Count = "all", vocab_size: int | None = None) -> None:
        self.tokenizer, self.count = tokenizer, count
        self.vocab_size = vocab_size or len(tokenizer)
        self.chats = Chats(tokenizer, plain=intake.template == "plain")

    def rendering(self, record: Record) -> str:
        """How this record's text and roles come about, for the manifest."""
        if record.kind != "messages":
            return "as it is"
        by = "generation markers" if self.chats.marked(record) else "prefix rendering"
        return f"{'plain lines' if self.chats.plain else 'chat template'}, roles by {by}"

    def encode(self, records: Sequence[Record]) -> list[Encoded | RecordProblem]:
        """The tokens of each record, or its problem. Raises InputError when no record could do better."""
        written = [record for record in records if record.kind in ("text", "completion")]
        texts = iter(self._texts([record.text for record in written]))
        return [self._one(record, texts) for record in records]

    def _one(self, record: Record, texts: Any) -> Encoded | RecordProblem:
        try:
            if record.kind == "messages":
                encoded = self.chats.encode(record, count=self.count)
            elif record.kind == "ids":
                encoded = self._ids(record)
            else:
                encoded = self._text(record, *next(texts))
        except RecordProblem as problem:
            return problem
        if len(encoded.ids):
            return encoded
        roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in record.messages))
        drops = f"; the chat template writes nothing for the roles {roles}" if record.kind == "messages" else ""
        return RecordProblem("no tokens", "", f"gives no token{drops}")

    def _texts(self, texts: list[str]) -> list[tuple[list[int], np.ndarray]]:
        """Ids and offsets (tokens, 2) of texts, with the special tokens that the tokenizer itself adds and no other."""
        if not texts:
            return []
        fast = self.tokenizer.is_fast
        out = self.tokenizer(texts, return_offsets_mapping=fast, return_attention_mask=False, verbose=False)
        offsets = out["offset_mapping"] if fast else [[(0, 0)] * len(ids) for ids in out["input_ids"]]
        return [
            (ids, np.asarray(pairs, dtype=np.int64).reshape(-1, 2)) for ids, pairs in zip(out["input_ids"], offsets)
        ]

    def _text(self, record: Record, ids: list[int], offsets: np.ndarray) -> Encoded:
        changes = {}
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:  # a text that a template rendered brings its own
            ids, offsets, changes = ids[1:], offsets[1:], {"second BOS removed": 1}
        roles = np.full(len(ids), "text", dtype=object)
        if record.kind == "completion":
            if not self.tokenizer.is_fast:
                raise InputError(
                    f"{record.place}: prompt and completion need a fast tokenizer; this one has no offsets"
                )
            roles[:] = "prompt"
            roles[masks.covered(offsets, record.prompt_length, len(record.text))] = "completion"
        return Encoded(np.asarray(ids, dtype=np.int32), roles, self._counted(roles), changes=changes)

    def _ids(self, record: Record) -> Encoded:
        outside = next((i for i, item in enumerate(record.ids) if item >= self.vocab_size), None)
        if outside is not None:
            what = f"is {record.ids[outside]}, outside the vocabulary of {self.vocab_size} tokens"
            raise RecordProblem("bad ids", f"input_ids[{outside}]", what)
        roles = np.full(len(record.ids), "ids", dtype=object)
        return Encoded(np.asarray(record.ids, dtype=np.int32), roles, self._counted(roles))

    def _counted(self, roles: np.ndarray) -> np.ndarray:
        """The tokens (tokens,) that count in a record without messages: only a completion is somebody's turn there.

        The model wrote the completion, so it is what `assistant` counts too.
        """
        if self.count == "all":
            return np.ones(len(roles), dtype=bool)
        wanted = "completion" if self.count == "assistant" else self.count
        counted: np.ndarray = roles == wanted
        return counted
