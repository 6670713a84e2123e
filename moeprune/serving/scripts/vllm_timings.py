"""vLLM's speed on one checkpoint, run by run. Runs in vLLM's own environment: standard library and vllm only.

python vllm_timings.py REQUEST.json    every line on standard input is one timed run; answers begin with @@
"""

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(request_path: str) -> None:
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    from vllm import LLM

    prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
    length = len(request["prompts"][0]) + request["new_tokens"] + 8
    started = time.monotonic()
    engine = LLM(
        model=request["model"],
        dtype=request["dtype"],
        max_model_len=length,
        max_num_seqs=len(prompts),
        enforce_eager=True,
        enable_prefix_caching=False,
        generation_config="vllm",
        seed=0,
        gpu_memory_utilization=0.45,  # two engines share the device; CPU builds go by VLLM_CPU_KVCACHE_SPACE
    )
    cache = engine.llm_engine.vllm_config.cache_config
    facts = {
        "load_seconds": time.monotonic() - started,
        "cache_tokens": _cache_tokens(engine, cache),
        "device": engine.llm_engine.vllm_config.device_config.device_type,
        "version": _version(),
    }
    say(facts)
    for _ in sys.stdin:
        say(_timed(engine, prompts, request["new_tokens"]))
    say({"peak_memory": _peak_memory()})


def _peak_memory() -> int:
    """Bytes that this program held at most; getrusage would count the program that started it, too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def say(value: dict[str, Any]) -> None:
    print("@@" + json.dumps(value), flush=True)


def _cache_tokens(engine: Any, cache: Any) -> int | None:
    """Tokens that the engine's cache has room for."""
    blocks = getattr(cache, "num_gpu_blocks", None)
    return None if blocks is None else int(blocks) * int(cache.block_size)


def _timed(engine: Any, prompts: list[Any], new_tokens: int) -> dict[str, float]:
    first, _ = _generate(engine, prompts[:1], 1)
    filled, _ = _generate(engine, prompts, 1)
    whole, generated = _generate(engine, prompts, 1 + new_tokens)
    if whole <= filled:
        raise RuntimeError(f"{new_tokens} tokens took no longer than the first: the machine is too busy to time this")
    tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    return {
        "prefill_tokens_per_second": tokens / filled,
        "decode_tokens_per_second": (generated - len(prompts)) / (whole - filled),
        "time_to_first_token": first,
    }


def _generate(engine: Any, prompts: list[Any], new_tokens: int) -> tuple[float, int]:
    """(seconds, tokens made)."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    started = time.perf_counter()
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - started, sum(len(output.outputs[0].token_ids) for output in outputs)


def _version() -> str:
    import vllm

    return str(vllm.__version__)


if __name__ == "__main__":
    main(sys.argv[1])
