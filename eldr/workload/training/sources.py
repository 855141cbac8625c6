"""The sixteen labelled texts of the corpus: their packages and their licences."""

from __future__ import annotations

from dataclasses import dataclass

_HANDBOOK = {
    "en": "en-US",
    "de": "de-DE",
    "fr": "fr-FR",
    "es": "es-ES",
    "ru": "ru-RU",
    "ja": "ja-JP",
    "zh": "zh-CN",
}


@dataclass(frozen=True, slots=True)
class Package:
    """A package of a public registry, unpacked but never installed.

    Attributes:
        registry: `debian`, `npm` or `pypi`.
        name: as the registry spells it; also the folder it is unpacked to.
        version: the one the bundled model was trained on.
    """

    registry: str
    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Source:
    """One domain of the corpus.

    Attributes:
        text: what is read of it.
        licence: of the text.
        packages: what must be unpacked.
        permissive: whether excerpts may be shipped without copyleft duties.
    """

    text: str
    licence: str
    packages: tuple[Package, ...]
    permissive: bool


def _debian(name: str, version: str) -> Package:
    return Package("debian", name, version)


_PYTHON = (
    _debian("libpython3.11-minimal", "3.11.2-6+deb12u6"),
    _debian("libpython3.11-stdlib", "3.11.2-6+deb12u6"),
)

# The order is the order of domains in corpora and traces.
SOURCES: dict[str, Source] = {
    "code_py": Source("CPython 3.11 standard library, *.py", "PSF-2.0", _PYTHON, True),
    "code_cpp": Source(
        "Eigen headers",
        "MPL-2.0 (a few files LGPL-2.1+ or BSD)",
        (_debian("libeigen3-dev", "3.4.0-4"),),
        False,
    ),
    "legal": Source(
        "texts of the SPDX licence list",
        "list CC0-1.0; licence texts are published to be copied verbatim",
        (Package("npm", "spdx-license-list", "6.12.0"),),
        True,
    ),
    "math": Source(
        "Metamath iset.mm and set.mm, statements without proofs",
        "CC0-1.0",
        (_debian("metamath-databases", "0.0.0~20210101.git55fe226-2"),),
        True,
    ),
    "med": Source(
        "ICD-10-CM 2026 tabular list (US CDC/NCHS)",
        "work of the US government; package MIT",
        (Package("pypi", "simple-icd-10-cm", "1.5.0"),),
        True,
    ),
    "json": Source(
        "iso-codes ISO 639 and ISO 3166 as JSON",
        "LGPL-2.1+",
        (_debian("iso-codes", "4.15.0-1"),),
        False,
    ),
    "bible": Source(
        "King James Version",
        "public domain",
        (_debian("bible-kjv", "4.38"), _debian("bible-kjv-text", "4.38")),
        True,
    ),
    "dict": Source(
        "WordNet 3.0 glosses",
        "WordNet-3.0 (permissive)",
        (_debian("wordnet-base", "1:3.0-37"),),
        True,
    ),
    "sqlite": Source(
        "SQLite documentation",
        "public domain",
        (_debian("sqlite3-doc", "3.40.1-2+deb12u2"),),
        True,
    ),
    **{
        f"lang_{short}": Source(
            f"The Debian Administrator's Handbook, {locale}",
            "GPL-2.0+ or CC-BY-SA-3.0",
            (_debian("debian-handbook", "11.20220922"),),
            False,
        )
        for short, locale in _HANDBOOK.items()
    },
}


def handbook_locale(domain: str) -> str:
    """The handbook's folder of a `lang_*` domain, such as `de-DE`."""
    return _HANDBOOK[domain.removeprefix("lang_")]
