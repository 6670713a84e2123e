"""A pruned checkpoint behind vLLM's OpenAI API, asked by the openai package: completion, chat, a tool call.

    python experiments/serving/serve.py WORK [CHECKPOINT]      default: WORK/reference/pruned

Starts `vllm serve` with the flags that the checkpoint's card names, on this machine, and ends it. What was asked and
answered goes to logs/openai-api.txt. A call with tools must come back as a structured call whose arguments are JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from moeprune.data.options import Domain
from moeprune.data.trajectories import load_records
from moeprune.models.engine_limits import serve_flags

HERE = Path(__file__).parent
PORT = 18423
NAME = "pruned"
LIMITS = ("--max-model-len", "512", "--enforce-eager", "--max-num-seqs", "4", "--generation-config", "vllm")
QUESTIONS = 20
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "DO_NOT_TRACK": "1",
}


def start(python, checkpoint, log):
    """The server, once it answers, and the seconds that took."""
    config = json.loads((checkpoint / "config.json").read_text())
    template = checkpoint / "chat_template.jinja"
    flags = serve_flags(config, template.read_text() if template.is_file() else None)
    command = [str(python.parent / "vllm"), "serve", str(checkpoint), "--served-model-name", NAME, "--port", str(PORT)]
    begun = time.monotonic()
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", *LIMITS, *flags],
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **ENVIRONMENT},
    )
    while time.monotonic() - begun < 600:
        if process.poll() is not None:
            raise SystemExit(f"vllm serve ended with code {process.returncode}")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
        except OSError:
            time.sleep(1)
            continue
        return process, time.monotonic() - begun, flags
    process.kill()
    raise SystemExit("vllm serve did not answer within 600 s")


CLIENT = """
import json, sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none")
asked = json.load(open(sys.argv[2]))
print(json.dumps({"models": [model.id for model in client.models.list().data]}))
text = client.completions.create(model="pruned", prompt="The most important thing", max_tokens=12, temperature=0)
print(json.dumps({"completion": text.choices[0].text}))
for record in asked:
    reply = client.chat.completions.create(
        model="pruned", messages=record["messages"], tools=record["tools"], max_tokens=48, temperature=0)
    message = reply.choices[0].message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
    print(json.dumps({"question": record["messages"][-1]["content"], "content": message.content, "calls": calls,
                      "finish": reply.choices[0].finish_reason}))
"""


def questions():
    """The first turns of held-out agent trajectories whose right answer begins with a tool call."""
    records = load_records(Domain(name="agent", path="reference:agent"), part="heldout")
    chosen = [record for record in records if record["messages"][2].get("tool_calls")][:QUESTIONS]
    return [{"messages": record["messages"][:2], "tools": record["tools"]} for record in chosen], chosen


def main(work, checkpoint):
    python = work / "vllm" / "bin" / "python"
    asked, records = questions()
    with tempfile.TemporaryDirectory() as folder:
        log, file = Path(folder) / "server.txt", Path(folder) / "asked.json"
        file.write_text(json.dumps(asked))
        with log.open("w") as output:
            process, seconds, flags = start(python, checkpoint, output)
            try:
                address = f"http://127.0.0.1:{PORT}/v1"
                told = subprocess.run(
                    [str(python), "-c", CLIENT, address, str(file)], capture_output=True, text=True, check=True
                ).stdout.splitlines()
            finally:
                process.terminate()
                process.wait(60)
    replies = [json.loads(line) for line in told]
    calls = [reply["calls"] for reply in replies if "calls" in reply]
    right = [record["messages"][2]["tool_calls"][0]["function"] for record in records]
    structured = sum(bool(found) and isinstance(json.loads(found[0][1]), dict) for found in calls)
    equal = sum(
        bool(found) and found[0][0] == call["name"] and json.loads(found[0][1]) == call["arguments"]
        for found, call in zip(calls, right, strict=True)
    )
    lines = [
        f"vllm serve {' '.join(['CHECKPOINT', *LIMITS, *flags])}: answers after {seconds:.0f} s",
        *told,
        f"{structured} of {len(calls)} replies are structured tool calls with JSON arguments, "
        f"{equal} are the expected call",
    ]
    (HERE / "logs").mkdir(exist_ok=True)
    (HERE / "logs" / "openai-api.txt").write_text("\n".join(lines) + "\n")
    print(lines[-1])
    if not structured:
        raise SystemExit("no reply was a tool call")


if __name__ == "__main__":
    place = Path(sys.argv[1]).absolute()
    main(place, Path(sys.argv[2]).absolute() if len(sys.argv) > 2 else place / "reference" / "pruned")
