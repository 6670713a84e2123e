"""The data of a run: tokens to record, tokens and questions to evaluate on, and the run's inputs as one."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import sha256
from moeprune.config.schema import RunConfig
from moeprune.data.options import Domain, Part
from moeprune.data.sources import open_source
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet, load_records, load_tokens
from moeprune.evaluation.agent import Question, agent_questions
from moeprune.recording.distributed import Team, join
from moeprune.run.opened import Opened


class Data:
    """What `calibration:` and `evaluation:` name. Everything is read on first use, and once."""

    def __init__(self, config: RunConfig, model: Opened) -> None:
        self._calibration, self._evaluation, self._model = config.calibration, config.evaluation, model

    @property
    def holdout(self) -> float:
        """The share of calibration trajectories kept out: none where evaluation has data of its own."""
        return self._evaluation.holdout if self._evaluation.domains is None else 0.0

    @property
    def calibration_part(self) -> Part:
        return "calibration" if self.holdout else "all"

    @property
    def evaluation_part(self) -> Part:
        """A path that evaluation names is read whole; of a calibration path the held-out share is taken."""
        return "heldout" if self._evaluation.domains is None else "all"

    @property
    def evaluation_domains(self) -> Sequence[Domain]:
        return self._evaluation.domains or self._calibration.domains

    @cached_property
    def calibration(self) -> TokenSet:
        return self._read(self._calibration.domains, self.calibration_part)

    def validation(self, tokens: int, mix: Mapping[str, float]) -> TokenSet:
        """Tokens to choose plans by: the calibration trajectories that come after the recorded ones, by domain.

        Where a domain has none left the first of its recorded ones are taken again, with a warning. tokens: of each
        domain; domains of weight 0 in the mix are left out.
        """
        mixed = [domain for domain in self._calibration.domains if mix.get(domain.name, 1.0)]
        longer = [d.model_copy(update={"tokens": None if d.tokens is None else d.tokens + tokens}) for d in mixed]
        read = self._read(longer, self.calibration_part)
        recorded = {sequence.trajectory for sequence in self.calibration.sequences}
        fresh = tuple(sequence for sequence in read.sequences if sequence.trajectory not in recorded)
        left_out = [d.name for d in mixed if not any(sequence.domain == d.name for sequence in fresh)]
        used = [[s for s in self.calibration.sequences if s.domain == name] for name in left_out]
        again = tuple(sequence for sequences in used for sequence in _first(sequences, tokens))
        warnings = [
            f"refine: every calibration trajectory of {name} was recorded, so plans are chosen on the tokens they were "
            f"made from; give calibration domain {name} a limit (tokens), or more trajectories"
            for name in left_out
        ]
        return TokenSet(fresh + again, read.manifest, tuple(warnings))

    @cached_property
    def evaluation(self) -> TokenSet:
        # A reference: path keeps its held-out text in files of its own.
        reference = [d for d in self.evaluation_domains if d.path.startswith("reference:")]
        others = [d for d in self.evaluation_domains if not d.path.startswith("reference:")]
        groups: list[tuple[list[Domain], Part]] = [(reference, "heldout"), (others, self.evaluation_part)]
        sets = [self._read(domains, part) for domains, part in groups if domains]
        sequences = tuple(sequence for tokens in sets for sequence in tokens.sequences)
        manifest = {name: counts for tokens in sets for name, counts in tokens.manifest.items()}
        warnings = [warning for tokens in sets for warning in tokens.warnings]
        warnings += [
            f"evaluation domain {name}: {count:,} of {len(_trajectories(sequences, name)):,} trajectories were "
            "recorded, so it is not held out; name other files, or leave evaluation.domains out, and a share of the "
            "calibration trajectories is kept back"
            for name, count in self._recorded(sequences).items()
        ]
        return TokenSet(sequences, manifest, tuple(warnings))

    @cached_property
    def recorded(self) -> dict[str, int]:
        """Evaluated domain -> its trajectories that were recorded too; domains that are held out are not named."""
        return self._recorded(self.evaluation.sequences)

    def _recorded(self, evaluated: Sequence[TokenSequence]) -> dict[str, int]:
        named = (self._calibration.domains, self._evaluation.domains or ())
        if not all(any(not domain.path.startswith("reference:") for domain in domains) for domains in named):
            return {}  # kept apart by the split, or by files of their own
        calibration = _trajectories(self.calibration.sequences)
        domains = dict.fromkeys(sequence.domain for sequence in evaluated)
        counts = {name: len(_trajectories(evaluated, name) & calibration) for name in domains}
        return {name: count for name, count in counts.items() if count}

    @cached_property
    def questions(self) -> dict[str, tuple[list[Question], list[str]]]:
        """Task -> its questions and warnings, from the evaluation domain of its name, else the reference's own."""
        return {task: self._questions(task) for task in self._evaluation.tasks}

    def _questions(self, task: str) -> tuple[list[Question], list[str]]:
        own = next((domain for domain in self.evaluation_domains if domain.name == task), None)
        domain = Domain(name=task, path=f"reference:{task}") if own is None else own
        part: Part = "heldout" if domain.path.startswith("reference:") else self.evaluation_part
        tokenizer = self._model.tokenizer
        records = load_records(domain, part=part, intake=self._calibration, tokenizer=tokenizer, holdout=self.holdout)
        return agent_questions(records, count=self._evaluation.task_questions)

    def _read(self, domains: Sequence[Domain], part: Part) -> TokenSet:
        return load_tokens(domains, self._model.tokenizer, self._calibration, part=part, holdout=self.holdout)

    @cached_property
    def calibration_identity(self) -> list[Any]:
        """What decides the calibration tokens; part of the keys of stages."""
        domains = self._calibration.domains
        return [self._calibration, self.holdout, [_content(domain, "all") for domain in domains]]

    @cached_property
    def evaluation_identity(self) -> list[Any]:
        """What decides what is measured, and on which data; part of the key of the evaluate stage."""
        code = self._evaluation.code
        options = self._evaluation.model_dump(mode="json", exclude={"code"} if code is None else set())
        identity = [options, [_content(domain, "heldout") for domain in self.evaluation_domains]]
        if code is not None:
            from moeprune.evaluation.code import problems_file

            identity.append(sha256(problems_file(code)))
        return identity


class Inputs:
    """A run's config, its model and its data.

    like: inputs of another run with the same model, calibration, evaluation and runtime; its model and data are used.
    """

    def __init__(self, config: RunConfig, like: "Inputs | None" = None) -> None:
        if config.dense and not config.checkpoint.save:
            raise InputError(
                "dense: a compressed model is measured as it is written and loaded again, and checkpoint.save is "
                "false; set checkpoint.save=true, or dense=[]"
            )
        self.config = config
        self.model: Opened = Opened(config.model, config.runtime) if like is None else like.model
        self.data: Data = Data(config, self.model) if like is None else like.data

    @cached_property
    def team(self) -> Team | None:
        """The processes that torchrun started together with this one; None when it is alone."""
        return join()


def shared_inputs(config: RunConfig, known: dict[str, Inputs]) -> Inputs:
    """Inputs of this config, with the model and data of an earlier config that names the same ones."""
    inputs = Inputs(config, like=known.get(common(config)))
    known.setdefault(common(config), inputs)
    return inputs


def common(config: RunConfig) -> str:
    """What two runs share if they read the same model, calibration and evaluation."""
    return config.model_dump_json(include={"model", "calibration", "evaluation", "runtime"})


def _trajectories(sequences: Sequence[TokenSequence], domain: str | None = None) -> set[str]:
    return {sequence.trajectory for sequence in sequences if domain in (None, sequence.domain)}


def _first(sequences: list[TokenSequence], tokens: int) -> list[TokenSequence]:
    """As many of the first sequences as hold no more tokens together; one at least."""
    ends = accumulate(len(sequence.ids) for sequence in sequences)
    return [sequence for sequence, end in zip(sequences, ends) if end <= tokens] or sequences[:1]


def _content(domain: Domain, part: Part) -> str:
    """A digest of the files behind a domain, so that changed data is recorded again."""
    from moeprune.reference import DATA_DIR

    digest = hashlib.sha256(domain.model_dump_json().encode())
    for name in open_source(domain, part=part).files:
        path = DATA_DIR / name if domain.path.startswith("reference:") else Path(name)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            if file.is_file():
                with file.open("rb") as stream:
                    digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
