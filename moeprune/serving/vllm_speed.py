"""How fast two checkpoints are in vLLM: one process each, loaded once, timed in turns, with the spread."""

import json
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from moeprune.serving.engines import HERE, PATIENCE, EngineError, engine_environment, last_words, patience

CACHE_GIB = 1  # of the unpruned model; the pruned one may use what it saves on top


def vllm_speed(
    base: Path,
    pruned: Path,
    prompts: Sequence[Sequence[int]],
    *,
    python: Path,
    dtype: str,
    weight_bytes: tuple[int, int],
    new_tokens: int = 32,
    repeats: int = 5,
) -> dict[str, float]:
    """`speed/<measure>` of the pruned checkpoint and `/base` of the other, with `/low` and `/high` of the repeats.

    Same engine, flags, prompts and dtype; runs alternate, in reverse order every second time, after one that warms up.
    `weight_bytes` are those of (base, pruned) on disk. kv_capacity: tokens of cache, on a GPU those that the engine has
    beside the weights, on a CPU those that fit where the unpruned model has 1 GiB for them. peak_memory: the most that
    the process held.
    """
    with ExitStack() as stack:
        request = {"dtype": dtype, "prompts": [list(ids) for ids in prompts], "new_tokens": new_tokens}
        both = [
            stack.enter_context(_engine(python, {**request, "model": str(path.absolute())})) for path in (base, pruned)
        ]
        runs: tuple[list[dict[str, float]], ...] = ([], [])
        for repeat in range(-1, repeats):
            for index in (0, 1) if repeat % 2 else (1, 0):
                figures = both[index].time()
                if repeat >= 0:
                    runs[index].append(figures)
        peaks = [engine.close() for engine in both]
    metrics: dict[str, float] = {}
    for index, suffix in ((1, ""), (0, "/base")):
        one, cache = both[index], CACHE_GIB * 2**30
        sizes = {"weight_bytes": weight_bytes[index], "peak_memory": peaks[index], "load_seconds": one.load_seconds}
        if one.cache_tokens and one.device == "cpu":
            sizes["kv_capacity"] = one.cache_tokens * (cache + weight_bytes[0] - weight_bytes[index]) // cache
        elif one.cache_tokens:
            sizes["kv_capacity"] = one.cache_tokens  # both had the same share of the device for weights and cache
        metrics |= _metrics(runs[index], sizes, suffix)
    return metrics


def _metrics(runs: Sequence[Mapping[str, float]], sizes: Mapping[str, float], suffix: str) -> dict[str, float]:
    metrics = {f"speed/{name}{suffix}": float(value) for name, value in sizes.items()}
    for measure in runs[0]:
        values, name = [run[measure] for run in runs], f"speed/{measure}{suffix}"
        metrics |= {name: statistics.median(values), f"{name}/low": min(values), f"{name}/high": max(values)}
    return metrics


class _Engine:
    """A process that holds one model and waits between runs."""

    def __init__(self, process: subprocess.Popen[str], output_file: Path) -> None:
        self.process, self.output_file = process, output_file
        reply = self._next()
        self.load_seconds = float(reply["load_seconds"])
        self.device = str(reply["device"])
        self.cache_tokens: int | None = reply["cache_tokens"]

    def time(self) -> dict[str, float]:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `_next` quotes why
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self._next()

    def close(self) -> float:
        """Bytes of memory that the process held at most."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return float(self._next()["peak_memory"])

    def _next(self) -> Any:
        assert self.process.stdout is not None
        with patience(self.process) as late:
            for line in self.process.stdout:
                if line.startswith("@@"):
                    return json.loads(line[2:])
                with self.output_file.open("a", encoding="utf-8") as log:
                    log.write(line)
        if late.is_set():
            raise EngineError(f"vllm: no answer within {PATIENCE} s")
        text = self.output_file.read_text(encoding="utf-8", errors="replace") if self.output_file.is_file() else ""
        raise EngineError(f"vllm ended with code {self.process.wait()}: {last_words(text)}")


@contextmanager
def _engine(python: Path, request: Mapping[str, Any]) -> Iterator[_Engine]:
    with tempfile.TemporaryDirectory() as folder:
        question_file = Path(folder) / "request.json"
        question_file.write_text(json.dumps(request), encoding="utf-8")
        process = subprocess.Popen(
            [str(python), str(HERE / "scripts/vllm_timings.py"), str(question_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=engine_environment() | {"VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB)},
            cwd=folder,
        )
        try:
            yield _Engine(process, Path(folder) / "log.txt")
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            assert process.stdout is not None
            process.stdout.close()
