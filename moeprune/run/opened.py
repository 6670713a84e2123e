"""What the stages of a run share: the inspected model, the tokens, and the identities that enter their keys."""

import hashlib
import math
import os
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.artifacts.files import sha256
from moeprune.artifacts.statistics import Layer
from moeprune.checkpoint.inventory import Inventory, checkpoint_fingerprint, inventory
from moeprune.config.schema import RunConfig
from moeprune.data.options import Domain, Part
from moeprune.data.sources import open_source
from moeprune.data.trajectories import Sequence as TokenSequence
from moeprune.data.trajectories import TokenSet, load_records, load_tokens
from moeprune.evaluation.agent import Question, agent_questions
from moeprune.models.families import family_of
from moeprune.models.layers import family_for
from moeprune.models.loading import (
    LoadedModel,
    device_of,
    load_config,
    load_model,
    load_tokenizer,
    local_directory,
    number_bytes,
)
from moeprune.models.memory import free_bytes, loading_bytes
from moeprune.models.streaming.model import StreamedModel, open_streamed
from moeprune.recording.distributed import Team, join
from moeprune.selection.budget import check_budget
from moeprune.selection.criteria.outside import Custom, PruneSetFile
from moeprune.selection.given_plan import plan_from_file


class Inputs:
    """Everything is made on first use: a resumed run whose stages are done loads neither model nor data."""

    def __init__(self, config: RunConfig) -> None:
        if config.dense and not config.checkpoint.save:
            raise InputError(
                "dense: a compressed model is measured as it is written and loaded again, and checkpoint.save is "
                "false; set checkpoint.save=true, or dense=[]"
            )
        self.config = config

    def borrow(self, other: "Inputs") -> None:
        """Use what another run of the same model, calibration and evaluation has already made."""
        for name in self._SHARED & set(other.__dict__):
            self.__dict__[name] = other.__dict__[name]

    _SHARED = frozenset(
        [
            *("directory", "checkpoint", "fingerprint", "loaded", "streamed", "tokenizer", "device_type"),
            *("calibration", "evaluation", "recorded", "questions"),
            *("model_identity", "calibration_identity", "evaluation_identity"),
        ]
    )

    @cached_property
    def directory(self) -> Path:
        """The checkpoint's directory; its config is a supported MoE family."""
        directory = local_directory(self.config.model)
        family_of(family_for(load_config(directory)).model_type)
        return directory

    @cached_property
    def checkpoint(self) -> Inventory:
        """Every tensor of the checkpoint, from its headers alone."""
        return inventory(self.directory)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.checkpoint.layers

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.checkpoint)

    @cached_property
    def loaded(self) -> LoadedModel:
        runtime = self.config.runtime
        return load_model(
            self.config.model,
            device=runtime.device,
            device_map=runtime.device_map,
            offload_folder=runtime.offload_folder,
        )

    @cached_property
    def streamed(self) -> StreamedModel:
        """The model with its weights on disk, for a pass that reads them layer by layer."""
        return open_streamed(self.config.model, device=self.config.runtime.device, rounded=True)

    @cached_property
    def team(self) -> Team | None:
        """The processes that torchrun started together with this one; None when it is alone."""
        return join()

    @cached_property
    def streaming(self) -> bool:
        """Whether recording and fidelity read the weights layer by layer: when told to, or when they do not fit."""
        wanted = self.config.runtime.streaming
        return not self.fits if wanted == "auto" else wanted == "on"

    @property
    def fits(self) -> bool:
        """Whether the weights are in memory or there is room for them; a device_map makes room for itself."""
        if self.config.runtime.device_map is not None:
            return True
        free = free_bytes(device_of(self.config.runtime.device))
        if self.device_type == "cpu":
            free //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes share the machine
        return "loaded" in self.__dict__ or self.loading_bytes <= free

    @property
    def loading_bytes(self) -> int:
        """The most that loading the weights may hold."""
        return loading_bytes(self.weight_bytes, self.device_type)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return number_bytes(self.config.model.dtype, self.device_type) * self.checkpoint.memory.elements

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.directory)

    @cached_property
    def device_type(self) -> str:
        return device_of(self.config.runtime.device).partition(":")[0]

    @cached_property
    def calibration(self) -> TokenSet:
        part: Part = "calibration" if self.holdout else "all"
        options = self.config.calibration
        return load_tokens(options.domains, self.tokenizer, options, part=part, holdout=self.holdout)

    @cached_property
    def validation(self) -> TokenSet:
        """Tokens to choose plans by: the calibration trajectories that come after the recorded ones, by domain.

        Where a domain has none left the first of its recorded ones are taken again, with a warning.
        """
        assert self.config.refine is not None
        options, wanted = self.config.calibration, self.config.refine.tokens
        mixed = [domain for domain in options.domains if self.config.selection.mix.get(domain.name, 1.0)]
        more = [d.model_copy(update={"tokens": None if d.tokens is None else d.tokens + wanted}) for d in mixed]
        part: Part = "calibration" if self.holdout else "all"
        read = load_tokens(more, self.tokenizer, options, part=part, holdout=self.holdout)
        recorded = {sequence.trajectory for sequence in self.calibration.sequences}
        fresh = tuple(sequence for sequence in read.sequences if sequence.trajectory not in recorded)
        left_out = [d.name for d in mixed if not any(sequence.domain == d.name for sequence in fresh)]
        used = [[s for s in self.calibration.sequences if s.domain == name] for name in left_out]
        again = tuple(sequence for sequences in used for sequence in _first(sequences, wanted))
        warnings = [
            f"refine: every calibration trajectory of {name} was recorded, so plans are chosen on the tokens they were "
            f"made from; give calibration domain {name} a limit (tokens), or more trajectories"
            for name in left_out
        ]
        return TokenSet(fresh + again, read.manifest, tuple(warnings))

    @property
    def evaluation_part(self) -> Part:
        """A path that evaluation names is read whole; of a calibration path the held-out share is taken."""
        return "heldout" if self.config.evaluation.domains is None else "all"

    @cached_property
    def evaluation(self) -> TokenSet:
        # A reference: path keeps its held-out text in files of its own.
        reference = [d for d in self.evaluation_domains if d.path.startswith("reference:")]
        others = [d for d in self.evaluation_domains if not d.path.startswith("reference:")]
        groups: list[tuple[list[Domain], Part]] = [(reference, "heldout"), (others, self.evaluation_part)]
        sets = [
            load_tokens(domains, self.tokenizer, self.config.calibration, part=part, holdout=self.holdout)
            for domains, part in groups
            if domains
        ]
        sequences = tuple(sequence for tokens in sets for sequence in tokens.sequences)
        manifest = {name: told for tokens in sets for name, told in tokens.manifest.items()}
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
        named = (self.config.calibration.domains, self.config.evaluation.domains or ())
        if not all(any(not domain.path.startswith("reference:") for domain in domains) for domains in named):
            return {}  # kept apart by the split, or by files of their own
        calibration = _trajectories(self.calibration.sequences)
        domains = dict.fromkeys(sequence.domain for sequence in evaluated)
        found = {name: len(_trajectories(evaluated, name) & calibration) for name in domains}
        return {name: count for name, count in found.items() if count}

    @cached_property
    def questions(self) -> dict[str, tuple[list[Question], list[str]]]:
        """Task -> its questions and warnings, from the evaluation domain of its name, else the reference's own."""
        return {task: self._questions(task) for task in self.config.evaluation.tasks}

    def _questions(self, task: str) -> tuple[list[Question], list[str]]:
        own = next((domain for domain in self.evaluation_domains if domain.name == task), None)
        domain = Domain(name=task, path=f"reference:{task}") if own is None else own
        part: Part = "heldout" if domain.path.startswith("reference:") else self.evaluation_part
        intake = self.config.calibration
        records = load_records(domain, part=part, intake=intake, tokenizer=self.tokenizer, holdout=self.holdout)
        return agent_questions(records, count=self.config.evaluation.task_questions)

    @property
    def evaluation_domains(self) -> Sequence[Domain]:
        return self.config.evaluation.domains or self.config.calibration.domains

    @property
    def holdout(self) -> float:
        """The share of calibration trajectories kept out: none where evaluation has data of its own."""
        return self.config.evaluation.holdout if self.config.evaluation.domains is None else 0.0

    def inspect_model(self) -> None:
        """Refuse a model that cannot be pruned, before data is read or weights are loaded."""
        assert self.layers
        self._check_device_map()

    def inspect(self) -> None:
        """Refuse a model, a budget or a ruler that cannot work, before data is read or weights are loaded."""
        check_budget(self.layers, self.config.selection.budget)
        for criterion in self.config.criteria:
            if isinstance(criterion, PruneSetFile):
                plan_from_file(criterion, self.layers, self.config.selection)
            elif isinstance(criterion, Custom):
                criterion.build()
        self._check_mix()
        self._check_device_map()
        if self.config.evaluation.harness:
            from moeprune.evaluation.harness import require_tasks

            require_tasks(self.config.evaluation.harness)
        if self.config.evaluation.code is not None:
            from moeprune.evaluation.code import require_code

            require_code(self.config.evaluation.code)

    def _check_device_map(self) -> None:
        device_map, folder = self.config.runtime.device_map, self.config.runtime.offload_folder
        if device_map is None:
            return
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError(
                "runtime.device_map: torchrun's processes would each spread the model over all devices; start one "
                "process, or leave device_map out"
            )
        if self.config.dense:
            raise InputError(
                "runtime.device_map: dense methods change weights in place, and a spread model has some elsewhere; "
                "leave device_map out: runtime.streaming=on reads what does not fit layer by layer"
            )
        if self.config.evaluation.harness or self.config.evaluation.speed:
            raise InputError(
                "runtime.device_map: evaluation.harness and evaluation.speed are for a model on one device; set them "
                "to [] and false, or leave device_map out"
            )
        from moeprune.models.device_map import require_device_map, resolved
        from moeprune.models.layers import require_movable

        require_device_map(device_map, folder)
        if not isinstance(device_map, str):
            require_movable(self.checkpoint.memory.model, resolved(self.checkpoint.memory.model, device_map))

    def _check_mix(self) -> None:
        mix, domains = self.config.selection.mix, [domain.name for domain in self.config.calibration.domains]
        for name, weight in mix.items():
            if name not in domains:
                raise InputError(
                    f"selection.mix: unknown domain {name!r}; calibration.domains has {', '.join(domains)}"
                )
            if not math.isfinite(weight) or weight < 0:
                raise InputError(f"selection.mix.{name}: {weight} is not a weight; give a finite number >= 0")
        if not any(mix.get(name, 1.0) for name in domains):
            raise InputError("selection.mix: every domain has weight 0; give at least one a weight above 0")

    @cached_property
    def model_identity(self) -> list[Any]:
        contents = sorted((file.name, _sampled(file)) for file in self.directory.iterdir() if file.is_file())
        unpacked = [UNPACKING] if self.checkpoint.packed is not None else []
        return [self.config.model, self.fingerprint, contents, self.device_type, *unpacked]

    @cached_property
    def calibration_identity(self) -> list[Any]:
        return [
            self.config.calibration,
            self.holdout,
            [_content(domain, "all") for domain in self.config.calibration.domains],
        ]

    @cached_property
    def evaluation_identity(self) -> list[Any]:
        code = self.config.evaluation.code
        asked = self.config.evaluation.model_dump(mode="json", exclude={"code"} if code is None else set())
        identity = [asked, [_content(domain, "heldout") for domain in self.evaluation_domains]]
        if code is not None:
            from moeprune.evaluation.code import problems_file

            identity.append(sha256(problems_file(code)))
        return identity


def shared_inputs(config: RunConfig, loaded: dict[str, Inputs]) -> Inputs:
    """Inputs of this config that use what one of an earlier config with the same model and data has read."""
    inputs = Inputs(config)
    inputs.borrow(loaded.setdefault(common(config), inputs))
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


UNPACKING = "unpacked 2"  # how packed weights become numbers; raised when those change
SAMPLES, SAMPLE_BYTES = 256, 65_536


def _sampled(file: Path) -> str:
    """A digest of the file's size and of evenly spaced pieces of it; of all of it up to 16 MB.

    Weights that were trained on and saved to the same place change nearly every byte, so pieces tell.
    """
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(max(number * SAMPLE_BYTES if size <= SAMPLES * SAMPLE_BYTES else number * size // SAMPLES, 0))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


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
