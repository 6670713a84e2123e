"""Ask llama.cpp: a server in a process of its own, over HTTP on this machine, ended when it has answered."""

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moeprune.artifacts.errors import InputError
from moeprune.serving.answers import Answer, Answers
from moeprune.serving.engines import HERE, PATIENCE, EngineError, last_words, patience
from moeprune.serving.questions import NEW_TOKENS, Chat, Questions

START = 600  # seconds until a server answers


def require_one_server(python: Path | None, binary: Path | None) -> None:
    """Raises InputError where two servers are given, or a binary that cannot be started."""
    if binary is not None and python is not None:
        raise InputError("--binary and --python: give one of them, a llama-server or a Python with xllamacpp")
    if binary is not None and not (binary.is_file() and os.access(binary, os.X_OK)):
        raise InputError(f"--binary {binary}: not an executable file; give the path of llama-server")


def ask_llama_cpp(
    gguf: Path, questions: Questions, *, python: Path | None, binary: Path | None, log: Path | None = None
) -> Answers:
    """What llama.cpp answers, greedily, with a float32 cache: from the package xllamacpp, or from a llama-server.

    Raises EngineError when it does not load the file or does not answer.
    """
    context = questions.longest + NEW_TOKENS + 8
    with tempfile.TemporaryDirectory() as folder:
        output_file = Path(folder) / "log.txt"
        try:
            opened = (
                _own_server(binary, gguf, context, output_file)
                if binary
                else _package_server(python, gguf, context, output_file)
            )
            with opened as (address, version):
                return Answers(
                    engine="llama.cpp",
                    version=version,
                    answers=tuple(_answer(address, ids) for ids in questions.prompts),
                    tokenized=tuple(_tokens(address, text, parse_special=False) for text in questions.texts),
                    rendered=tuple(_rendered(address, chat) for chat in questions.chats),
                )
        finally:
            if log is not None and output_file.is_file():
                log.parent.mkdir(parents=True, exist_ok=True)
                log.write_text(output_file.read_text(encoding="utf-8", errors="replace"), encoding="utf-8")


@contextmanager
def _package_server(python: Path | None, gguf: Path, context: int, output_file: Path) -> Iterator[tuple[str, str]]:
    """(address, version) of a server that runs inside while the block does."""
    assert python is not None
    command = [
        str(python),
        str(HERE / "scripts/llama_cpp_answers.py"),
        str(gguf.absolute()),
        str(context),
        "GGML_TYPE_F32",
    ]
    with _process(command, output_file) as process:
        assert process.stdout is not None
        with patience(process, START) as late:
            line = process.stdout.readline()
        if late.is_set():
            raise EngineError(f"llama.cpp did not answer within {START} s: {_complaint(output_file)}")
        if not line:
            process.wait(30)
            raise EngineError(f"llama.cpp does not load {gguf.name}: {_complaint(output_file)}")
        reply = json.loads(line)
        _wait(reply["address"], process, output_file)
        yield reply["address"], f"xllamacpp {reply['version']}"


@contextmanager
def _own_server(binary: Path, gguf: Path, context: int, output_file: Path) -> Iterator[tuple[str, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ["--host", "127.0.0.1", "--port", str(port), "-c", str(context), "-np", "1", "--jinja"]
    cache = ["-ctk", "f32", "-ctv", "f32", "--no-warmup"]
    with _process([str(binary), "-m", str(gguf.absolute()), *place, *cache], output_file, talks=False) as process:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, output_file)
        yield address, str(_call(address, "/props", None).get("build_info", "llama-server"))


@contextmanager
def _process(command: list[str], output_file: Path, *, talks: bool = True) -> Iterator[subprocess.Popen[str]]:
    """A process whose log is `said`; where it `talks` its standard output is a pipe, which somebody must read."""
    with (
        output_file.open("w", encoding="utf-8") as log,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if talks else log, stderr=log, text=True
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(address: str, process: subprocess.Popen[str], output_file: Path) -> None:
    """Until the server is ready. Raises EngineError when it ends or stays silent."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        if process.poll() is not None:
            raise EngineError(f"llama.cpp ended with code {process.returncode}: {_complaint(output_file)}")
        try:
            _call(address, "/health", None)
        except (EngineError, OSError):
            time.sleep(0.2)
            continue
        return
    raise EngineError(f"llama.cpp did not answer within {START} s: {_complaint(output_file)}")


def _complaint(output_file: Path) -> str:
    """The lines of its log that speak of an error."""
    text = output_file.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower() or "failed" in line.lower()]
    return lines[0][:500] if lines else last_words(text)


def _call(address: str, path: str, body: dict[str, Any] | None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["error"]["message"]
        raise EngineError(f"{path}: {text}") from error


def _answer(address: str, ids: tuple[int, ...]) -> Answer:
    """Token by token: the server tells no log-probability of a token that holds a part of a character.

    Its cache holds what was asked before, so every call but the first computes one position.
    """
    tokens: list[int] = []
    chosen: list[float | None] = []
    options = {"n_predict": 1, "temperature": 0, "n_probs": 1, "return_tokens": True, "cache_prompt": True}
    while len(tokens) < NEW_TOKENS:
        completion = _call(address, "/completion", {"prompt": [*ids, *tokens], **options})
        if not completion["tokens"]:
            break
        reply = completion.get("completion_probabilities") or []
        tokens.append(completion["tokens"][0])
        chosen.append(reply[0]["logprob"] if reply else None)
        if completion["stop_type"] == "eos":
            break
    return Answer(tuple(tokens), tuple(chosen))


def _tokens(address: str, text: str, *, parse_special: bool) -> tuple[int, ...]:
    body = {"content": text, "add_special": True, "parse_special": parse_special}
    return tuple(_call(address, "/tokenize", body)["tokens"])


def _rendered(address: str, chat: Chat) -> tuple[int, ...] | str:
    """Its tokens of a conversation, or the reason why it refuses the template: base and pruned model share that."""
    body = {key: value for key, value in chat.as_json().items() if value is not None}
    try:
        prompt = _call(address, "/apply-template", body)["prompt"]
    except EngineError as error:
        return str(error)
    return _tokens(address, prompt, parse_special=True)
