"""From a package's file to plain text: one pure function per kind of file."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable

_HIDDEN = re.compile(r"(?is)<(script|style|head)\b.*?</\1>")
_BREAK = re.compile(r"(?i)<(br|p|div|li|tr|h\d|pre|dt|dd)\b[^>]*>")
_TAG = re.compile(r"(?s)<[^>]*>")
_PROOF = re.compile(r"(?s)\$=.*?\$\.")
_EIGEN_HEADER = re.compile(r"(?s)\A// This file is part of Eigen.*?\n\n")

# ICD-10-CM elements that open a line of their own, and how that line begins.
_ICD_LABELS = {
    "excludes1": "Excludes",
    "excludes2": "Not included here",
    "inclusionTerm": "Includes",
    "useAdditionalCode": "Use additional code",
    "codeFirst": "Code first",
}


def strip_markup(markup: str) -> str:
    """HTML or XML as text: a line per block element, entities resolved, blanks squeezed."""
    text = _BREAK.sub("\n", _HIDDEN.sub(" ", markup))
    text = html.unescape(_TAG.sub("", text))
    text = re.sub(r"[ \t\xa0]+", " ", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def metamath_statements(database: str) -> str:
    """A Metamath database with every (compressed) proof replaced by `?`."""
    return _PROOF.sub("$= ? $.", database)


def squeeze_blanks(text: str) -> str:
    """Runs of blanks become one; line ends stay."""
    return re.sub(r" +", " ", text)


def icd_sections(tabular: str) -> list[str]:
    """The sections of the ICD-10-CM tabular list (XML), as marked-up text for `strip_markup`."""
    text = re.sub(r"(?s)<(visualImpairment|sevenChrDef)>.*?</\1>", "", tabular)
    text = re.sub(r"<name>(.*?)</name>\s*<desc>(.*?)</desc>", r"<p>\1 \2", text)
    for element, label in _ICD_LABELS.items():
        text = text.replace(f"<{element}>", f"<p>{label}: ")
    text = text.replace("<note>", " ").replace("</note>", ";")
    return re.split(r"(?=<section\b)", text)


def icd_text(section: str) -> str:
    """One section of `icd_sections` as plain text, a line per code or note."""
    return strip_markup(re.sub(r"\s*\n\s*", " ", section))


def wordnet_entries(data: str, part: str) -> list[str]:
    """`words (part): gloss` lines of a WordNet data file; `part` is noun, verb, adj or adv."""
    entries = []
    for line in data.splitlines():
        if line.startswith("  ") or "|" not in line:  # the licence at the top, or no gloss
            continue
        fields = line.split()
        words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
        gloss = line.split("|", 1)[1].strip()
        entries.append(f"{', '.join(words)} ({part}): {gloss}\n")
    return entries


def licence_text(entry: str) -> str:
    """The text of one licence of the SPDX list (JSON); empty where the entry has none."""
    text = json.loads(entry).get("licenseText") or ""
    return str(text).replace("\r", "")


def without_eigen_header(source: str) -> str:
    """An Eigen header without the licence comment that every file starts with."""
    return _EIGEN_HEADER.sub("", source)


def without_lines(text: str, known: Iterable[str]) -> str:
    """`text` less the lines in `known`: what translators left in the original language."""
    drop = frozenset(known)
    return "\n".join(line for line in text.split("\n") if line not in drop)
