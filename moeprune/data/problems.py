"""What is wrong with one record; intake turns it into an error or counts it."""

from typing import Any


class RecordProblem(ValueError):
    """`reason` is the short name it is counted under, `where` the field, `what` the finding."""

    def __init__(self, reason: str, where: str, what: str) -> None:
        self.reason, self.where, self.what = reason, where, what
        super().__init__(f"{where} {what}".strip())


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    names = {dict: "an object", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
