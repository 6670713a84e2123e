"""Ask a real engine, in its own environment: a script of this package under its Python, or llama.cpp over HTTP."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from moeprune.artifacts.errors import InputError, OutsideError
from moeprune.serving.answers import Answers
from moeprune.serving.questions import NEW_TOKENS, Questions

EngineName = Literal["transformers", "vllm", "llama.cpp"]
ENGINES: tuple[EngineName, ...] = ("transformers", "vllm", "llama.cpp")
HERE = Path(__file__).parent
MODULES = {"transformers": "transformers", "vllm": "vllm", "llama.cpp": "xllamacpp"}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # the checkpoint is a directory; nothing has to be fetched
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, whose error message is the engine's own
    "TOKENIZERS_PARALLELISM": "false",
}
PATIENCE = 1800  # seconds for a load and a few tokens


class EngineError(OutsideError):
    """The engine refused the checkpoint or broke on it; the message holds its own last words."""


def require_python(engine: EngineName, python: Path | None) -> Path:
    """The Python that has the engine. Raises InputError, before anything is loaded, when there is none."""
    module = MODULES[engine]
    if python is None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:  # a folder of that name beside us is no engine
            raise InputError(
                f"--engine {engine}: {module} is not installed here; give --python PATH of an environment that has it"
                f"{_or_make(engine)}"
            )
        return Path(sys.executable)
    python = Path(os.path.abspath(python))  # not resolved: an environment's Python is a link
    if not python.is_file() or not os.access(python, os.X_OK):
        raise InputError(f"--python {python}: not an executable file; give the bin/python of the engine's environment")
    code = f"import importlib.util as u, sys; spec = u.find_spec({module!r}); sys.exit(not (spec and spec.origin))"
    try:
        done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--python {python}: does not run ({error}); give the bin/python of an environment") from error
    if done.returncode:
        raise InputError(
            f"--python {python}: has no module {module}; give an environment that has it{_or_make(engine)}"
        )
    return python


def _or_make(engine: EngineName) -> str:
    """How to make the engine's environment, where `verify` can."""
    return "" if engine == "transformers" else f", or make one with `moeprune verify --install {engine} -o DIR`"


def ask_script(
    engine: Literal["transformers", "vllm"],
    checkpoint: Path,
    questions: Questions,
    *,
    python: Path,
    dtype: str,
    options: Mapping[str, Any] | None = None,
    log: Path | None = None,
) -> Answers:
    """What the engine answers, greedily. One process, ended when it has answered; its output goes to `log`.

    `options` are further arguments of vLLM's LLM class. Raises EngineError with the engine's last words.
    """
    request = {
        "model": str(checkpoint.absolute()),
        "dtype": dtype,
        "max_length": questions.longest + NEW_TOKENS + 8,
        "new_tokens": NEW_TOKENS,
        "prompts": questions.prompts,
        "texts": questions.texts,
        "chats": [chat.as_json() for chat in questions.chats],
        "options": dict(options or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        question_file, answer_file, output_file = (
            Path(folder) / name for name in ("request.json", "answers.json", "log.txt")
        )
        question_file.write_text(json.dumps(request), encoding="utf-8")
        command = [str(python), str(HERE / "scripts" / f"{engine}_answers.py"), str(question_file), str(answer_file)]
        with output_file.open("w", encoding="utf-8") as output:
            code: int | None
            try:
                code = subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=engine_environment(),
                    cwd=folder,  # a directory of the caller's may hold a module called vllm
                    timeout=PATIENCE,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        text = output_file.read_text(encoding="utf-8", errors="replace")
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(text, encoding="utf-8")
        if code is None:
            raise EngineError(f"{engine}: no answer within {PATIENCE} s")
        if not answer_file.is_file():
            raise EngineError(f"{engine} ended with code {code}: {last_words(text)}")
        return Answers.parse(json.loads(answer_file.read_text(encoding="utf-8")))


@contextmanager
def patience(process: subprocess.Popen[str], seconds: float = PATIENCE) -> Iterator[threading.Event]:
    """Ends a process that is still silent after so many seconds, and with it the read from its pipe; then it is set."""
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def last_words(text: str) -> str:
    """The line of a traceback that says what went wrong: the last one that names an exception, or the last of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _names_an_error(line)]
    # vLLM wraps the cause: what went wrong is the first error of the last traceback, the wrapper says little.
    telling = [line for line in named if "Engine core initialization failed" not in line]
    return (telling or named or lines or ["it said nothing"])[-1][:500]


def _names_an_error(line: str) -> bool:
    word = line.split(":")[0].split(" ")[-1]
    return word.endswith(("Error", "Exception", "Refused")) and ":" in line


def engine_environment() -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return ENVIRONMENT | ours
