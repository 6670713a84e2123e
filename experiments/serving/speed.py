"""Half of the experts in vLLM, beside all of them: the reference model, and one whose experts are nearly all of it.

    python experiments/serving/speed.py WORK        writes speed.csv

The second model has random weights: 4 layers of 64 experts, top-4, hidden 512, 208 million parameters, 97 % of them in
experts. Both checkpoints of a pair are loaded once and timed in turns.
"""

import csv
import shutil
import sys
from pathlib import Path

from models import TOKENIZER, prune_half

import moeprune as mp
from moeprune.checkpoint.inventory import inventory
from moeprune.evaluation.speed import prompts_of
from moeprune.models.loading import load_config
from moeprune.reference import MODEL_DIR
from moeprune.serving.vllm_speed import vllm_speed
from tests.tiny import save_tiny

BIG = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.04,
    "bos_token_id": None,
    "eos_token_id": 3,
    "pad_token_id": 1,
    "max_position_embeddings": 1024,
}


def big(work):
    base = work / "big" / "base"
    if not (work / "big" / "pruned").is_dir():
        save_tiny("qwen3_moe", base, dtype="bfloat16", **BIG)
        for name in TOKENIZER:
            shutil.copyfile(MODEL_DIR / name, base / name)
        prune_half(base, work / "big" / "pruned")
    return base


def main(work):
    rows = []
    for name, base in (("reference", MODEL_DIR), ("big", big(work))):
        pruned = work / name / "pruned"
        agent = mp.Domain(name="agent", path="reference:agent", tokens=4096)
        tokens = mp.load_tokens([agent], mp.load_model(mp.ModelOptions()).tokenizer, mp.Intake(), part="heldout")
        prompts = prompts_of(load_config(base), tokens, prompt_tokens=256).tolist()
        sizes = [sum(tensor.entry.size for tensor in inventory(path).tensors) for path in (base, pruned)]
        found = vllm_speed(
            base,
            pruned,
            prompts,
            python=work / "vllm" / "bin" / "python",
            dtype="bfloat16",
            weight_bytes=(sizes[0], sizes[1]),
        )
        for measure in sorted({key.removeprefix("speed/").split("/")[0] for key in found}):
            for side, suffix in (("all experts", "/base"), ("half", "")):
                key = f"speed/{measure}{suffix}"
                low, high = (found.get(f"{key}/{end}", "") for end in ("low", "high"))
                rows.append([name, measure, side, *(f"{v:.4g}" if v != "" else "" for v in (found[key], low, high))])
                print(*rows[-1], flush=True)
    with (Path(__file__).parent / "speed.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "measure", "experts", "median", "low", "high"])
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
