"""What every dense method costs the reference model: attention and routed experts, KL on held-out agent and prose.

    OMP_NUM_THREADS=1 python measure.py -o results.csv        # about four minutes on one core; --small for a smoke run

Every compressed model is held in memory, in the dtype of the checkpoint, and compared with one pass of the whole model.
"""

import argparse
import copy
import csv
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from moeprune.artifacts.plan import PrunePlan
from moeprune.data.options import Domain, Intake
from moeprune.data.trajectories import TokenSet, load_tokens
from moeprune.dense.methods.method import DenseMethod
from moeprune.dense.methods.pruning import Magnitude, SparseGPT, Wanda, WandaUpdate
from moeprune.dense.methods.quantising import AWQ, FP8, GPTQ, NF4, RTN, Joint
from moeprune.dense.report import DenseReport
from moeprune.dense.walk import compress_model
from moeprune.evaluation.fidelity import compare, logits_of
from moeprune.models.loading import load_model
from moeprune.models.options import ModelOptions
from moeprune.models.pruned import pruned
from moeprune.recording.recorder import record
from moeprune.selection.options import SelectionOptions
from moeprune.selection.select import select

BOTH = {"targets": ("attention", "routed_expert")}
PRUNING: dict[str, type[Any]] = {
    "magnitude": Magnitude,
    "wanda": Wanda,
    "wanda_update": WandaUpdate,
    "sparsegpt": SparseGPT,
}
AMOUNTS: dict[str, dict[str, Any]] = {
    "50 %": {"sparsity": 0.5},
    "60 %": {"sparsity": 0.6},
    "2:4": {"pattern": "2:4"},
    "4:8": {"pattern": "4:8"},
}
QUANTISING: dict[str, DenseMethod] = {
    "fp8, a scale a row": FP8(**BOTH),
    "fp8, a scale a tensor": FP8(scale="tensor", **BOTH),
    "rtn int8, a scale a row": RTN(bits=8, group_size=None, **BOTH),
    "rtn int4 g32": RTN(group_size=32, **BOTH),
    "awq int4 g32": AWQ(group_size=32, **BOTH),
    "gptq int4 g32": GPTQ(group_size=32, **BOTH),
    "gptq int3 g32": GPTQ(bits=3, group_size=32, **BOTH),
    "nf4, blocks of 64": NF4(**BOTH),
}
CHAINS: dict[str, tuple[DenseMethod, ...]] = {
    "joint 2:4 int4 g32": (Joint(pattern="2:4", group_size=32, **BOTH),),
    "sparsegpt 2:4, then gptq int4 g32": (
        SparseGPT(pattern="2:4", **BOTH),
        GPTQ(group_size=32, **BOTH),
    ),
    "sparsegpt 2:4, then fp8": (SparseGPT(pattern="2:4", **BOTH), FP8(**BOTH)),
}
OTHER_DATA: dict[str, tuple[DenseMethod, ...]] = {
    "sparsegpt 50 %": (SparseGPT(sparsity=0.5, **BOTH),),
    "gptq int4 g32": (GPTQ(group_size=32, **BOTH),),
}
HALF: dict[str, tuple[DenseMethod, ...]] = {
    "nothing more": (),
    "fp8, a scale a row": (FP8(**BOTH),),
    "gptq int4 g32": (GPTQ(group_size=32, **BOTH),),
    "sparsegpt 50 %": (SparseGPT(sparsity=0.5, **BOTH),),
}


def on_whole() -> dict[str, tuple[DenseMethod, ...]]:
    """Label -> the methods that are tried on the model with all its experts."""
    table: dict[str, tuple[DenseMethod, ...]] = {
        f"{name} {amount}": (method(**options, **BOTH),)
        for name, method in PRUNING.items()
        for amount, options in AMOUNTS.items()
    }
    return table | {label: (method,) for label, method in QUANTISING.items()} | CHAINS


class Laboratory:
    """The reference model, its data, and every compressed copy of it."""

    def __init__(self, *, tokens: int, heldout: int, layers: int | None = None) -> None:
        loaded = load_model(ModelOptions(dtype="float32"), device="cpu")
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.model.model.layers = self.model.model.layers[:layers]
        capped = Domain(name="prose", path="reference:prose", tokens=heldout, trajectory_tokens=heldout // 6)
        domains = [Domain(name="agent", path="reference:agent", tokens=heldout), capped]
        self.heldout = load_tokens(domains, self.tokenizer, Intake(), part="heldout")
        self.data = {"agent": self._calibration(agent=tokens)}
        self.data["half agent, half prose"] = self._calibration(agent=tokens // 2, prose=tokens // 2)
        self.rows: list[dict[str, Any]] = []
        self.students: list[Any] = []

    def _calibration(self, **tokens: int) -> TokenSet:
        domains = [Domain(name=name, path=f"reference:{name}", tokens=count) for name, count in tokens.items()]
        return load_tokens(domains, self.tokenizer, Intake(), part="calibration")

    def hope(self) -> PrunePlan:
        """Half of the experts by HOPE on agent trajectories."""
        options = {"criterion": {"name": "hope", "normalise": "all_tokens"}, "budget": {"prune": 0.5}}
        return select(record(self.model, self.data["agent"]), SelectionOptions.model_validate(options))

    def add(
        self, label: str, methods: Sequence[DenseMethod], *, data: str = "agent", plan: PrunePlan | None = None
    ) -> None:
        """Compress a copy, which loses its experts first where there is a plan, and keep it for `measured`."""
        student = copy.deepcopy(self.model)
        whole = _bits(student, DenseReport())
        if plan is not None:
            ExitStack().enter_context(pruned(student, plan))  # for good: the copy is this one's
        started = time.perf_counter()
        report = DenseReport()
        if methods:
            report = compress_model(student, methods, self.data[data], dtype=torch.bfloat16).report
        last = {step.weight: step for step in report.steps}
        errors = [step.error for step in last.values() if step.error is not None]
        self.students.append(student)
        self.rows.append(
            {
                "experts": "all" if plan is None else "half",
                "method": label,
                "calibration": data if any(method.needs != "nothing" for method in methods) else "-",
                "bytes": round(_bits(student, report) / whole, 4),
                "error": f"{sum(errors) / len(errors):.5f}" if errors else "",
                "fallbacks": sum(step.fallback is not None for step in last.values()),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )

    def measured(self) -> list[dict[str, Any]]:
        """A row a model: KL on both domains with intervals, and the worst of them."""
        logits = {str(number): logits_of(student) for number, student in enumerate(self.students)}
        comparisons = compare(logits_of(self.model), logits, self.heldout)
        for row, comparison in zip(self.rows, comparisons.values(), strict=True):
            metrics = comparison.metrics()
            for domain in ("agent", "prose"):
                name = f"fidelity/kl/{domain}"
                row[f"kl {domain}"] = f"{metrics[name]:.5f}"
                row[f"kl {domain} interval"] = f"{metrics[f'{name}/ci_low']:.5f} {metrics[f'{name}/ci_high']:.5f}"
            row["top-1 agent"] = f"{metrics['fidelity/top1/agent']:.4f}"
        return self.rows


def _bits(model: Any, report: DenseReport) -> float:
    """Stored bits of attention and routed experts; zeros are stored as numbers, the rest is bf16."""
    from moeprune.dense.weights import look

    bits = {step.weight: step.bits for step in report.steps}
    weights = [weight for weight in look(model).weights if weight.role in BOTH["targets"]]
    return sum((bits.get(weight.name) or 16) * weight.shape[0] * weight.shape[1] for weight in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=Path("results.csv"))
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    size = {"tokens": 2048, "heldout": 1200, "layers": 1} if arguments.small else {"tokens": 32768, "heldout": 8196}
    laboratory = Laboratory(**size)
    for label, methods in on_whole().items():
        laboratory.add(label, methods)
    for label, methods in OTHER_DATA.items():
        laboratory.add(label, methods, data="half agent, half prose")
    plan = laboratory.hope()
    for label, methods in HALF.items():
        laboratory.add(label, methods, plan=plan)
    rows = laboratory.measured()
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
