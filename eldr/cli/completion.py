"""`eldr completion`: a completion script for bash or zsh, made from the parsers."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
from collections.abc import Iterator

from eldr.cli import COMMANDS, DONE

_EPILOG = """\
examples:
  eldr completion bash > ~/.local/share/bash-completion/completions/eldr
  eldr completion zsh > "${fpath[1]}/_eldr"
  source <(eldr completion bash)

exit codes: 0 done, 2 usage
"""

_BASH = """\
# bash completion of eldr; made by `eldr completion bash`.
_eldr() {
  local cur=${COMP_WORDS[COMP_CWORD]} path=eldr word i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${COMP_WORDS[i]}
    case "$path $word" in
@paths@
    esac
  done
  local words=
  case $path in
@words@
  esac
  COMPREPLY=()
  if [[ $cur == -* || $path == eldr || " $words" == *' '[a-z]* ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
  fi
}
complete -o default -o bashdefault -F _eldr eldr
"""

_ZSH = """\
#compdef eldr
# zsh completion of eldr; made by `eldr completion zsh`.
_eldr() {
  local path_=eldr word
  for word in ${words[2,CURRENT-1]}; do
    case "$path_ $word" in
@paths@
    esac
  done
  local -a found
  case $path_ in
@words@
  esac
  if [[ $PREFIX == -* || $path_ == eldr || -n ${found[(r)[a-z]*]} ]]; then
    compadd -a found
  fi
  _files
}
if [[ ${funcstack[1]} == _eldr ]]; then _eldr "$@"; else compdef _eldr eldr; fi
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the shells."""
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    made = script(args.shell)
    print(
        json.dumps({"v": 1, "shell": args.shell, "script": made})
        if args.json
        else made.rstrip("\n")
    )
    return DONE


def script(shell: str) -> str:
    """The completion script of a shell."""
    known = dict(_words())
    inner = [path for path in known if " " in path]
    if shell == "bash":
        template, variable = _BASH, "path"
        sets = [f"    '{path}') words={shlex.quote(' '.join(w))} ;;" for path, w in known.items()]
    else:
        template, variable = _ZSH, "path_"
        sets = [
            f"    '{path}') found=({' '.join(map(shlex.quote, w))}) ;;" for path, w in known.items()
        ]
    paths = [f"      '{path}') {variable}='{path}' ;;" for path in inner]
    return template.replace("@paths@", "\n".join(paths)).replace("@words@", "\n".join(sets))


def _words() -> Iterator[tuple[str, list[str]]]:
    """Command path -> its sub-commands and options."""
    yield "eldr", [*COMMANDS, "--help", "--version"]
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(prog=name)
        importlib.import_module(command.module).configure(parser)
        yield from _walk(f"eldr {name}", parser)


def _walk(path: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, list[str]]]:
    words: list[str] = []
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            inner += list(action.choices.items())
        elif action.choices is not None and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    yield path, [*(name for name, _ in inner), *words]
    for name, sub in inner:
        yield from _walk(f"{path} {name}", sub)
