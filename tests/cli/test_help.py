"""What every sub-command's help owes its reader, and that its examples are true."""

from __future__ import annotations

import argparse
import json
import re
import shlex

import pytest

from eldr import cli
from eldr.cli import COMMANDS, main


def parser_of(name: str) -> argparse.ArgumentParser:
    """The sub-command's own parser."""
    whole = cli._parser(name)
    action = next(a for a in whole._actions if isinstance(a, argparse._SubParsersAction))
    found: argparse.ArgumentParser = action.choices[name]
    return found


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parsers that have no sub-commands of their own."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        return [parser]
    return [leaf for action in inner for sub in action.choices.values() for leaf in leaves(sub)]


def examples(epilog: str) -> list[list[str]]:
    """The example command lines, continued lines joined, without the remark after two spaces."""
    part = epilog.partition("examples:\n")[2].partition("\n\n")[0].replace("\\\n", " ")
    lines = [re.split(r"\s{2,}(?=\S)", line.strip())[0] for line in _unwrapped(part)]
    lexed = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        stop = next((i for i, word in enumerate(words) if set(word) <= set("<>|()")), len(words))
        lexed.append(words[:stop])
    return [words for words in lexed if words and words[0] == "eldr"]


def _unwrapped(text: str) -> list[str]:
    # A continued line keeps its indentation, which is no gap before a remark.
    return [re.sub(r"(?<=\S) {6,}(?=--)", " ", line) for line in text.splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_and_exit_codes(name: str) -> None:
    epilog = parser_of(name).epilog or ""
    assert len(examples(epilog)) >= (1 if name in ("assess", "record") else 2)
    codes = re.search(r"exit codes: (.*)$", epilog, re.DOTALL)
    assert codes, "the help does not say its exit codes"
    assert {"0", "2"} <= set(re.findall(r"\b\d+\b", codes[1]))


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_commands(name: str) -> None:
    for words in examples(parser_of(name).epilog or ""):
        assert words[1] == name
        cli._parser(name).parse_args(words[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str) -> None:
    for leaf in leaves(parser_of(name)):
        options = {option for action in leaf._actions for option in action.option_strings}
        assert "--json" in options, leaf.prog


def test_the_main_help_has_examples_and_exit_codes() -> None:
    whole = cli._parser(None)
    assert re.search(r"exit codes: 0 done, 1 .*, 2 usage, 3 cannot tell", whole.epilog or "")
    for words in examples(whole.epilog or ""):
        cli._parser(words[1]).parse_args(words[1:])


def test_a_completion_script_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert main(["completion", "bash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"v": 1, "shell": "bash", "script": script}
