"""Every family in every engine: `moeprune verify` and `moeprune export` on tiny pruned checkpoints, row by row.

    python experiments/serving/models.py WORK
    moeprune verify --install vllm -o WORK/vllm && moeprune verify --install llama.cpp -o WORK/xllamacpp
    python experiments/serving/verify.py WORK ENGINE DTYPE [FAMILY ...]      ENGINE: vllm, transformers or llama.cpp

llama.cpp needs its converter in WORK/llama.cpp and an environment with that one's requirements in WORK/converter.
A row goes to results.csv, what was said to logs/.
"""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from models import FAMILIES as MADE

from moeprune.reference import MODEL_DIR

HERE = Path(__file__).parent
FIELDS = (
    "engine",
    "version",
    "family",
    "format",
    "result",
    "tokens",
    "equal",
    "mean",
    "most",
    "chats",
    "seconds",
    "said",
)
FAMILIES = ("reference", *MADE)
PRE_TOKENIZER = "smollm"  # digits apart, then GPT-2's rule: what the reference tokenizer does


def moeprune(*words):
    command = [sys.executable, "-m", "moeprune", *map(str, words), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(work, engine, dtype, family):
    """One row: the proof, or the refusal in the engine's words."""
    pruned = work / family / "pruned"
    base = MODEL_DIR if family == "reference" else work / family / "base"
    against = ("--against", base) if base.is_dir() else ()  # weights that were quantised are compared with themselves
    log = work / f"engine-{os.getpid()}.txt"
    log.unlink(missing_ok=True)
    started, told = time.monotonic(), []
    if engine == "llama.cpp":
        gguf = work / "gguf" / f"{family}-{dtype}.gguf"
        words = ("--llama-cpp", work / "llama.cpp", "--outtype", dtype, "--pre-tokenizer", PRE_TOKENIZER)
        words += ("--converter-python", work / "converter" / "bin" / "python")
        # Tokens are compared by the call below, with the base model pruned in memory.
        done = moeprune("export", pruned, *words, "-o", gguf, "--overwrite")
        told.append(done.stderr)
        if gguf.is_file():
            python = work / "xllamacpp" / "bin" / "python"
            done = moeprune(
                "verify",
                pruned,
                "--against",
                base,
                "--engine",
                engine,
                "--gguf",
                gguf,
                "--python",
                python,
                "--log",
                log,
            )
    else:
        python = sys.executable if engine == "transformers" else work / "vllm" / "bin" / "python"
        words = ("--engine", engine, "--python", python, "--dtype", dtype, "--log", log)
        done = moeprune("verify", pruned, *against, *words)
    told += [done.stderr, done.stdout]
    write_log(work, f"{engine}-{family}-{dtype}", done, told, log)
    return row(engine, family, dtype, done, time.monotonic() - started)


def row(engine, family, dtype, done, seconds):
    values = dict.fromkeys(FIELDS, "") | {
        "engine": engine,
        "family": family,
        "format": dtype,
        "seconds": round(seconds),
    }
    if not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1]
        return values | {"result": "refused", "said": re.sub(r"^(failed: EngineError|error): ", "", last)}
    proof = json.loads(done.stdout.splitlines()[-1])
    chats = proof["chats"].values()
    return values | {
        "version": proof["version"],
        "result": "works" if proof["passed"] else "differs",
        "tokens": proof["tokens"],
        "equal": proof["tokens_equal"],
        "mean": f"{proof['difference_mean']:.1e}",
        "most": f"{proof['difference_most']:.1e}",
        "chats": f"{sum(how == 'equal' for how in chats)}/{len(chats)}",
        "said": "; ".join([*proof["problems"], *(how for how in chats if how.startswith("refused"))][:1]),
    }


def write_log(work, name, done, told, engine_log):
    """What moeprune said, and the end of what the engine said, without the places of this run."""
    lines = engine_log.read_text(errors="replace").splitlines()[-60:] if engine_log.is_file() else []
    text = "\n".join([f"$ {name}: exit code {done.returncode}", *told, "--- the engine's last lines", *lines])
    text = text.replace(f"{HERE.parent.parent}/", "")
    text = re.sub(r"\S*/(site-packages|lib/python3\.\d+)/", r".../\1/", text.replace(str(work), "WORK"))
    text = "\n".join(line[:400] for line in text.splitlines())
    text = re.sub(r"/tmp/\S+", "TEMPORARY", re.sub(r"\bpid=\d+", "pid", text))
    folder = HERE / "logs"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.txt").write_text(text.rstrip() + "\n")


def save(found):
    """results.csv with this row in place of an earlier one about the same."""
    path = HERE / "results.csv"
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    key = ("engine", "family", "format")
    rows = [old for old in rows if [old[k] for k in key] != [found[k] for k in key]]
    rows = sorted([*rows, found], key=lambda r: (r["engine"], r["format"], FAMILIES.index(r["family"].split("+")[0])))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    place, engine_name, precision, *names = sys.argv[1:]
    for each in names or FAMILIES:
        result = run(Path(place).absolute(), engine_name, precision, each)
        save(result)
        print(result, flush=True)
