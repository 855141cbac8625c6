"""The documents of one domain, read from unpacked packages in a fixed, seeded order."""

from __future__ import annotations

import random
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eldr.workload.training import text
from eldr.workload.training.sources import SOURCES, handbook_locale

_SEED = 7
_NOT_LIBRARY = re.compile(r"/(test|tests|idle_test|encodings|pydoc_data|lib2to3)/")
_NOT_PROSE = re.compile(r"/(doc_|keyword_|releaselog|req|changes|mingw|sqlanalyze|matrix|syntax/)")
_NOT_CHAPTER = re.compile(r"/(index|ix01|appendix-|lot)")
# Shorter lines of the English handbook are names and numbers, which translations share.
_LONG_LINE = 25
_DICT_ENTRIES = 40_000


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a domain; `name` says which part of the source it is."""

    name: str
    text: str


def documents(domain: str, root: Path) -> Iterator[Document]:
    """The documents of `domain`, from packages unpacked to `root`/<package>.

    Raises:
        ValueError: unknown domain.
        FileNotFoundError: a package of the domain is not there; the message names it.
    """
    if domain not in SOURCES:
        raise ValueError(f"unknown domain {domain!r}; choose from {', '.join(SOURCES)}")
    for package in SOURCES[domain].packages:
        if not (root / package.name).is_dir():
            raise FileNotFoundError(
                f"{root / package.name}: not found; fetch it with "
                "`python -m eldr.workload.training.download`"
            )
    read = _handbook if domain.startswith("lang_") else _READERS[domain]
    return read(domain, root)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def _shuffled(paths: dict[str, Path]) -> list[tuple[str, Path]]:
    """(name, path) sorted by name, then shuffled with the corpus' seed."""
    items = sorted(paths.items())
    random.Random(_SEED).shuffle(items)
    return items


def _files(base: Path, pattern: str) -> dict[str, Path]:
    return {p.relative_to(base).as_posix(): p for p in base.glob(pattern) if p.is_file()}


def _python(domain: str, root: Path) -> Iterator[Document]:
    found: dict[str, Path] = {}
    for package in SOURCES[domain].packages:
        found |= _files(root / package.name / "usr/lib/python3.11", "**/*.py")
    library = {n: p for n, p in found.items() if not _NOT_LIBRARY.search(f"/{n}")}
    return (Document(f"CPython 3.11 {n}", _read(p)) for n, p in _shuffled(library))


def _eigen(domain: str, root: Path) -> Iterator[Document]:
    files = _files(root / "libeigen3-dev/usr/include/eigen3", "**/*")
    return (
        Document(f"Eigen {n}", text.without_eigen_header(_read(p))) for n, p in _shuffled(files)
    )


def _licences(domain: str, root: Path) -> Iterator[Document]:
    seen: set[str] = set()
    for name, path in _shuffled(_files(root / "spdx-license-list/package/licenses", "*.json")):
        body = text.licence_text(_read(path))
        start = re.sub(r"\W+", "", body.lower())[:300]  # versions of one licence start alike
        if start in seen or len(body) < 400:
            continue
        seen.add(start)
        yield Document(f"licence text {name.removesuffix('.json')}", body)


def _metamath(domain: str, root: Path) -> Iterator[Document]:
    base = root / "metamath-databases/usr/share/metamath/databases"
    for name, start, length in (("iset.mm", 200_000, 1_300_000), ("set.mm", None, 3_000_000)):
        statements = text.metamath_statements(_read(base / name))
        begin = len(statements) // 2 if start is None else start
        part = statements[begin : begin + length]
        yield Document(f"Metamath {name}", text.squeeze_blanks(part))


def _icd(domain: str, root: Path) -> Iterator[Document]:
    paths = sorted(root.glob("simple-icd-10-cm/simple_icd_10_cm/data/*.xml"))
    if not paths:
        raise FileNotFoundError(f"{root / 'simple-icd-10-cm'}: no tabular list (*.xml) in it")
    sections = text.icd_sections(_read(paths[0]))
    random.Random(_SEED).shuffle(sections)
    return (Document("ICD-10-CM 2026 tabular list", text.icd_text(s)) for s in sections)


def _iso_codes(domain: str, root: Path) -> Iterator[Document]:
    base = root / "iso-codes/usr/share/iso-codes/json"
    names = [f"iso_{x}.json" for x in ("639-3", "3166-2", "3166-1", "639-2")]
    return (Document(f"iso-codes {n}", _read(base / n)) for n in names)


def _bible(domain: str, root: Path) -> Iterator[Document]:
    """Printed by the package's own program, which is run from where it was unpacked."""
    command = [
        str(root / "bible-kjv/usr/bin/bible"),
        *("-p", str(root / "bible-kjv-text/usr/lib"), "-f", "gen1:1-rev22:21"),
    ]
    printed = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if printed.returncode:
        raise ValueError(f"{command[0]} failed ({printed.returncode}): {printed.stderr[-200:]!r}")
    yield Document("King James Version", printed.stdout.decode("utf-8", "ignore"))


def _wordnet(domain: str, root: Path) -> Iterator[Document]:
    base = root / "wordnet-base/usr/share/wordnet"
    entries = [
        entry
        for part in ("noun", "verb", "adj", "adv")
        for entry in text.wordnet_entries(_read(base / f"data.{part}"), part)
    ]
    random.Random(_SEED).shuffle(entries)
    yield Document("WordNet 3.0 glosses", "".join(entries[:_DICT_ENTRIES]))


def _sqlite(domain: str, root: Path) -> Iterator[Document]:
    base = root / "sqlite3-doc/usr/share/doc/sqlite3"
    files = _files(base, "**/*.html")
    prose = {
        n: p for n, p in files.items() if not _NOT_PROSE.search(f"/{n}") and p.stat().st_size > 4000
    }
    return (Document(f"SQLite {n}", text.strip_markup(_read(p))) for n, p in _shuffled(prose))


def _handbook(domain: str, root: Path) -> Iterator[Document]:
    base = root / "debian-handbook/usr/share/doc/debian-handbook/html"
    locale = handbook_locale(domain)
    english: set[str] = set()
    if locale != "en-US":
        for path in base.glob("en-US/*.html"):
            lines = text.strip_markup(_read(path)).split("\n")
            english.update(line for line in lines if len(line) > _LONG_LINE)
    chapters = {
        n: p for n, p in _files(base / locale, "*.html").items() if not _NOT_CHAPTER.search(f"/{n}")
    }
    for name, path in _shuffled(chapters):
        body = text.without_lines(text.strip_markup(_read(path)), english)
        yield Document(f"Debian handbook {locale}/{name}", body)


_READERS: dict[str, Callable[[str, Path], Iterator[Document]]] = {
    "code_py": _python,
    "code_cpp": _eigen,
    "legal": _licences,
    "math": _metamath,
    "med": _icd,
    "json": _iso_codes,
    "bible": _bible,
    "dict": _wordnet,
    "sqlite": _sqlite,
}
