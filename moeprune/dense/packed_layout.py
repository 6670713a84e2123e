"""How quantised weights are described to the engines: the compressed-tensors section of config.json, and its limits."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.dense.chain import Chain, name_of
from moeprune.dense.methods.quantising import AWQ, FP8, Integers, Joint
from moeprune.dense.weights import Seen

# Loaders treat these as one matrix, so they must share a scheme.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
EXPERTS = r"re:.*\.experts\.\d+\..*"
UNUSED_EXPERTS = r"re:.*\.experts\.none$"


@dataclass(frozen=True, order=True)
class Scheme:
    """One kind of quantised weight."""

    kind: str  # int or fp8
    bits: int
    group_size: int | None  # None: one scale a row
    per_tensor: bool = False

    @property
    def format(self) -> str:
        return "pack-quantized" if self.kind == "int" else "float-quantized"

    def section(self, targets: Sequence[str]) -> dict[str, Any]:
        """A config group in compressed-tensors' words. FP8 weights come with activations rounded token by token."""
        strategy = "tensor" if self.per_tensor else "channel" if self.group_size is None else "group"
        weights = _arguments(self.bits, "int" if self.kind == "int" else "float", strategy, self.group_size)
        activations = _arguments(8, "float", "token", None, dynamic=True) if self.kind == "fp8" else None
        group = {"targets": list(targets), "weights": weights, "input_activations": activations}
        return {**group, "output_activations": None, "format": self.format}


def _arguments(bits: int, kind: str, strategy: str, group_size: int | None, *, dynamic: bool = False) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "group_size": group_size,
        "strategy": strategy,
        "dynamic": dynamic,
        "actorder": None,
        "block_structure": None,
        "observer": None if dynamic else "minmax",
        "observer_kwargs": {},
    }


def scheme_of(chain: Chain) -> Scheme | None:
    """The scheme that the chain's result is packed in; None for weights that stay plain numbers.

    Raises InputError for a result that has no packed form.
    """
    quantising = [method for method in chain if method.kind != "prune"]
    if not quantising:
        return None
    last = quantising[-1]
    if chain[-1] is not last:
        raise InputError(
            f"dense: a forced {name_of(chain[-1])} after {name_of(last)} cannot be packed; export with layout plain"
        )
    if isinstance(last, AWQ):
        raise InputError(
            "dense: awq's input scales would have to be folded into the layer before, which is not done; use gptq for "
            "a packed checkpoint, or layout plain for the rounded numbers in the source's dtype"
        )
    if isinstance(last, FP8):
        return Scheme("fp8", 8, None, per_tensor=last.scale == "tensor")
    if isinstance(last, Integers | Joint):
        if not last.symmetric:
            raise InputError(
                f"dense: {name_of(last)} with symmetric: false cannot be packed: transformers wants the zero points of "
                "compressed-tensors in another shape and does not load it; set symmetric: true, or use layout plain"
            )
        return Scheme("int", last.bits, last.group_size)
    return None  # nf4: bitsandbytes quantises when it loads; see bitsandbytes_section


def schemes(seen: Seen, chains: Mapping[str, Chain]) -> dict[str, Scheme]:
    """Weight -> scheme of everything that gets packed. Raises InputError for combinations that load wrong."""
    by_weight = {name: scheme for name, chain in chains.items() if (scheme := scheme_of(chain)) is not None}
    _require_siblings_agree(seen, by_weight)
    _require_experts_agree(seen, by_weight)
    return by_weight


def _require_siblings_agree(seen: Seen, by_weight: Mapping[str, Scheme]) -> None:
    names = {weight.name for weight in seen.weights}
    for name in sorted(names):
        parent, _, leaf = name.rpartition(".")
        for together in TOGETHER:
            if leaf != together[0]:
                continue
            siblings = [f"{parent}.{other}" for other in together if f"{parent}.{other}" in names]
            if len({by_weight.get(sibling) for sibling in siblings}) > 1:
                kinds = ", ".join(f"{s.rpartition('.')[2]}: {_in_words(by_weight.get(s))}" for s in siblings)
                raise InputError(
                    f"{parent}: engines load {', '.join(together)} as one and need one scheme; this has {kinds}"
                )


def _require_experts_agree(seen: Seen, by_weight: Mapping[str, Scheme]) -> None:
    routed = [weight for weight in seen.weights if weight.role == "routed_expert"]
    kinds = {by_weight.get(weight.name) for weight in routed}
    if len(kinds) > 1:
        bare = next(weight.name for weight in routed if by_weight.get(weight.name) != by_weight.get(routed[0].name))
        raise InputError(
            f"{bare}: transformers loads all routed experts by one scheme; others would come back random. Target "
            "routed_expert as a whole with one method, or not at all"
        )


def _in_words(scheme: Scheme | None) -> str:
    return "plain" if scheme is None else f"{scheme.kind}{scheme.bits}, group {scheme.group_size}"


def quantization_config(model: Any, seen: Seen, by_weight: Mapping[str, Scheme], version: str) -> dict[str, Any]:
    """The `quantization_config` of config.json for packed weights."""
    from torch import nn

    routed = {weight.name for weight in seen.weights if weight.role == "routed_expert" and weight.expert is not None}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    groups: dict[str, dict[str, Any]] = {}
    for number, scheme in enumerate(sorted(set(by_weight.values()), key=repr)):
        names = [name for name, own in by_weight.items() if own == scheme]
        targets = patterns([name for name in names if name not in routed], linears)
        if any(name in routed for name in names):
            targets.append(EXPERTS)
        groups[f"group_{number}"] = scheme.section(targets)
    ignore = patterns([name for name in linears if name not in by_weight], linears)
    ignore += [
        left.name.removesuffix(".weight") for left in seen.left if left.reason == "router" and left.name not in linears
    ]
    if routed and not routed & set(by_weight):
        ignore.append(EXPERTS)
        if any(scheme.kind == "int" for scheme in by_weight.values()):
            # transformers takes the experts' scheme from the first group that fits; only float8 lets bf16 experts pass
            groups[f"group_{len(groups)}"] = Scheme("fp8", 8, None).section([UNUSED_EXPERTS])
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "version": version,
    }


def patterns(names: Iterable[str], universe: Iterable[str]) -> list[str]:
    """Names as regular expressions over layer numbers where these match nothing else; otherwise as they are."""
    universe = list(universe)
    by_template: dict[str, list[str]] = {}
    for name in names:
        by_template.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "#", name), []).append(name)
    expressions: list[str] = []
    for template, members in by_template.items():
        # transformers takes any pattern with the word "experts" for the routed ones; [t] keeps shared experts apart
        pattern = "^" + re.escape(template).replace(r"\#", r"\d+").replace("experts", "exper[t]s") + "$"
        same = sorted(name for name in universe if re.match(pattern, name)) == sorted(members)
        expressions += [f"re:{pattern}"] if same and "#" in template else sorted(members)
    return expressions


def bitsandbytes_section(model: Any, names: Iterable[str], dtype: str) -> dict[str, Any]:
    """Arguments of transformers' BitsAndBytesConfig that quantise exactly the named linear layers to NF4 on loading."""
    from torch import nn

    names = set(names)
    skipped = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in names]
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": dtype,
        "llm_int8_skip_modules": skipped,
    }


def names_of_kind(chains: Mapping[str, Chain], name: str) -> list[str]:
    """Weights whose last method has this name."""
    return [weight for weight, chain in chains.items() if name_of(chain[-1]) == name]
