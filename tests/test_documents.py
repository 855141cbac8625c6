"""Every command that README, CONTRIBUTING and docs/ name exists and takes these arguments.

`tests/test_readme.py` and `tests/test_tutorial.py` also run theirs.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from eldr import cli
from tests.documents import PAGES, ROOT, Command, blocks, commands, parse_modules

EVERY = [command for page in PAGES for command in commands(page)]
# Programs that are not ours and not installed everywhere: their command lines are not looked into,
# but for the Python module that they start.
FOREIGN = {"nsys", "ncu", "rocprofv3", "kubectl", "helm", "docker", "curl", "git", "cd", "source"}
FOREIGN |= {"export", "cp", "serve", "ray"}
# Modules that read sys.argv themselves.
WITHOUT_PARSER = {"profiling.nsys_ops", "tests.serving.page.picture"}


def of(*programs: str) -> list[Command]:
    return [command for command in EVERY if command.words[0] in programs]


def modules(found: list[Command]) -> list[tuple[Command, str, tuple[str, ...]]]:
    """Commands that start one of our modules, also below a profiler, and its arguments."""
    out = []
    for command in found:
        if "-m" in command.words:
            at = command.words.index("-m")
            out.append((command, command.words[at + 1], command.words[at + 2 :]))
    return [entry for entry in out if not entry[1].startswith("vllm")]


def left_out(command: Command, message: str) -> bool:
    """Whether a parser misses only what the page leaves to the reader."""
    gaps = r"are required|expected (one|at least one) argument|invalid \w+ value: '[A-Z]+'$"
    return command.elided and re.search(gaps, message.strip()) is not None


def test_commands_are_found() -> None:
    """The extraction itself: this many there are, of every form."""
    assert len(EVERY) > 80
    assert {"eldr", "python", "make", "pip", "vllm"} <= {command.words[0] for command in EVERY}
    assert any(command.block is None for command in EVERY)


def test_every_program_is_known() -> None:
    ours = {"eldr", "python", "make", "pip", "vllm", "pytest"}
    unknown = [c for c in EVERY if c.words[0] not in ours | FOREIGN and "/" not in c.words[0]]
    assert [str(c) for c in unknown] == []


@pytest.mark.parametrize("command", of("eldr"), ids=str)
def test_eldr_takes_it(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Parsed by the sub-command's own parser; options of `eldr serve` also fit together."""
    arguments = list(command.words[1:])
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    try:
        cli._parser(chosen).parse_args(arguments)
    except SystemExit:
        message = capsys.readouterr().err
        if message and not left_out(command, message):
            pytest.fail(f"{command}\n{message}")
        return
    if chosen == "serve" and not command.elided:
        from eldr.serving.options import resolve

        resolve(cli._parser(chosen).parse_args(arguments), {})


def test_modules_take_it() -> None:
    found = modules(EVERY)
    assert len(found) > 30
    real = [entry for entry in found if entry[1] != "benchmarks.NAME"]
    missing = [str(c) for c, module, _ in real if find_spec(module) is None]
    assert missing == []
    parsed = [entry for entry in real if entry[1] not in WITHOUT_PARSER]
    answers = parse_modules((module, arguments) for _, module, arguments in parsed)
    wrong = [
        f"{command}: {answer}"
        for (command, _, _), answer in zip(parsed, answers, strict=True)
        if answer and not left_out(command, answer)
    ]
    assert wrong == []


def test_functions_that_pages_name_exist() -> None:
    """`path.py::Class.method` in a page, looked up in the file's syntax tree."""
    named = {
        found
        for page in PAGES
        for found in re.findall(r"`([\w/]+\.py)::([\w.]+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    for path, name in sorted(named):
        body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
        for part in name.split("."):
            there = [node for node in body if getattr(node, "name", None) == part]
            assert there, f"{path} has no {name}"
            body = there[0].body


def test_make_targets_exist() -> None:
    for command in of("make"):
        done = subprocess.run(
            ["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_files_and_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for command in of("pip"):
        for word in command.words:
            named = re.fullmatch(r"(?:eldr|\.)\[([\w,]+)\]", word)
            if named:
                missing = set(named[1].split(",")) - project["optional-dependencies"].keys()
                assert not missing, f"{command}: no extra {missing}"
    for command in of("python", "pytest"):
        for word in command.words[1:]:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), f"{command}: no {word}"


def test_python_blocks_compile_and_the_printed_result_is_true(tmp_path: Path) -> None:
    """Blocks marked as Python are whole programs; what `It prints` quotes is what they print."""
    for page in PAGES:
        lines = page.read_text(encoding="utf-8").splitlines()
        for first, language, body in blocks(lines):
            if language != "python":
                continue
            program = "\n".join(body)
            compile(program, f"{page.name}:{first}", "exec")
            after = " ".join(lines[first + len(body) : first + len(body) + 4])
            quoted = re.search(r"It prints `([^`]+)`", after)
            if quoted:
                done = subprocess.run(
                    [sys.executable, "-c", program],
                    capture_output=True,
                    text=True,
                    cwd=tmp_path,
                    timeout=120,
                )
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip() == quoted[1], f"{page.name}:{first}"
