"""Commands in Markdown pages: found as a reader finds them, and parsed by the real parsers.

A command stands in a code block (fenced without a language, or as sh; or indented), or between
backquotes in the text. `# ...` ends it, `\\` continues it, `$ ` marks it among its output, `...`
stands for arguments left out.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# What a line must begin with to be a command; other lines of blocks are text.
PROGRAMS = {
    *("eldr", "python", "make", "pip", "vllm", "git", "cd", "pytest", "nsys", "ncu", "rocprofv3"),
    *("curl", "kubectl", "helm", "docker", "serve", "ray", "source", "export", "cp", "profiling"),
}
INLINE = ("eldr ", "make ", "python -m ", "pip install", "pytest ")
_SHELL = {"", "sh", "bash", "console"}


@dataclass(frozen=True)
class Command:
    """One simple command of a page.

    Attributes:
        line: of the page, from 1.
        words: program and arguments, without redirections and variables before it.
        elided: arguments are left out: `...` stands for them, or it is a mention in the text.
        block: number of the code block that it is in, None in the text.
    """

    page: str
    line: int
    words: tuple[str, ...]
    elided: bool
    block: int | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: Path) -> list[Command]:
    """All commands of a page, in order."""
    return list(_commands(page.name, page.read_text(encoding="utf-8").splitlines()))


def blocks(lines: list[str]) -> Iterator[tuple[int, str, list[str]]]:
    """(first line from 1, language, lines) of the code blocks."""
    at = 0
    while at < len(lines):
        fence = re.match(r"(```+)(\w*)\s*$", lines[at])
        if fence:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(fence[1]))
            yield at + 2, fence[2], lines[at + 1 : end]
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield at + 1, "", [line[4:] for line in lines[at:end]]
            at = end
        else:
            at += 1


def _commands(page: str, lines: list[str]) -> Iterator[Command]:
    inside: set[int] = set()
    for number, (first, language, body) in enumerate(blocks(lines)):
        inside |= set(range(first - 1, first + len(body) + 1))
        if language not in _SHELL:
            continue
        marked = any(line.startswith("$ ") for line in body)
        for line, text in _joined(first, body):
            if marked and not text.startswith("$ "):
                continue  # output
            yield from _split(page, line, text.removeprefix("$ "), number)
    for line, text in enumerate(lines, 1):
        if line not in inside:
            for span in re.findall(r"`([^`]+)`", text):
                if span.startswith(INLINE):
                    yield from _split(page, line, span, None)


def _joined(first: int, body: list[str]) -> Iterator[tuple[int, str]]:
    """Lines, continued ones in one."""
    start, text = first, ""
    for number, line in enumerate(body, first):
        start = start if text else number
        text += line.removesuffix("\\").rstrip() + " "
        if not line.endswith("\\"):
            yield start, text.strip()
            text = ""


def _split(page: str, line: int, text: str, block: int | None) -> Iterator[Command]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:
        return  # prose with an apostrophe
    words: list[str] = []
    for token in [*tokens, ";"]:
        if token in {"&&", ";", "|", "||", "&"}:
            found = _command(page, line, words, block)
            if found is not None:
                yield found
            words = []
        else:
            words.append(token)


def _command(page: str, line: int, words: list[str], block: int | None) -> Command | None:
    for at, word in enumerate(words):
        if set(word) <= set("<>()") and word:
            words = words[:at]  # redirections, and what follows them
            break
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words or words[0].rpartition("/")[2].partition(".")[0] not in PROGRAMS:
        return None
    program = "python" if words[0] == "python3" else words[0]
    named = [w if "[" in w[1:] else w.removeprefix("[").removesuffix("]") for w in words[1:]]
    kept = tuple(word for word in named if word not in ("...", "…"))
    # A mention in the text names the command, whatever else it needs.
    return Command(page, line, (program, *kept), block is None or len(kept) < len(named), block)


# Runs modules up to the point where their arguments have been parsed, and says what was wrong.
_PARSE = """
import argparse, importlib.util, json, runpy, sys

class Stop(BaseException):
    pass

def parsed(parser, args=None, namespace=None, real=argparse.ArgumentParser.parse_known_args):
    found, rest = real(parser, args, namespace)
    raise Stop("unknown: " + " ".join(rest) if rest else "")

def wrong(parser, message):
    raise Stop(message)

argparse.ArgumentParser.parse_args = parsed
argparse.ArgumentParser.error = wrong
answers = []
for module, arguments in json.load(sys.stdin):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__")
        answers.append("it ran without parsing its arguments")
    except Stop as stop:
        answers.append(str(stop))
    except SystemExit:
        answers.append("")  # --help, --version
print("\\n" + json.dumps(answers))
"""


def parse_modules(found: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """What the modules' own parsers say against these arguments; "" if nothing.

    One process for all: modules are imported as `python -m` would, and stopped after parsing.
    """
    done = subprocess.run(
        [sys.executable, "-c", _PARSE],
        input=json.dumps([[module, list(arguments)] for module, arguments in found]),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[str] = json.loads(done.stdout.splitlines()[-1])
    return answers
