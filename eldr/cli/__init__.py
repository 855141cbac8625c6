"""The `eldr` command: parses, calls, prints; nothing heavy loads before a sub-command runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eldr import __version__

# Exit codes of every sub-command.
DONE, NO, USAGE, CANNOT_TELL = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: its module has `configure(parser)` and `run(args) -> int`."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "patch": Command("eldr.cli.patch", "check, apply, verify or revert the vLLM patch series"),
    "serve": Command("eldr.cli.serve", "run the prefill/decode router"),
    "record": Command("eldr.cli.record", "collect signatures from a running prefill worker"),
    "fit": Command("eldr.cli.fit", "fit a balanced partition to recorded signatures"),
    "assess": Command("eldr.cli.assess", "estimate whether locality routing pays on your traffic"),
    "capture": Command("eldr.cli.capture", "record an expert trace from a running vLLM"),
    "simulate": Command("eldr.cli.simulate", "simulate a fleet from recorded expert routing"),
    "explain": Command("eldr.cli.explain", "say why a request went to its worker"),
    "report": Command("eldr.cli.report", "write the operator page of a run as one HTML file"),
    "doctor": Command("eldr.cli.doctor", "check this machine and workers, with a fix per finding"),
    "completion": Command("eldr.cli.completion", "print a completion script for bash or zsh"),
    "demo": Command("eldr.cli.demo", "serve the bundled MoE through ELDR and compare policies"),
}

_EPILOG = """\
exit codes: 0 done, 1 the answer is no (conflict, failed check), 2 usage, 3 cannot tell

examples:
  eldr patch apply                      patch the installed vLLM and verify it
  eldr serve --prefill http://p:8100 --decode http://d0:8200 --decode http://d1:8200
  eldr fit signatures.npz --workers 2 -o partition.safetensors
"""


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eldr",
        description="Expert-locality decode routing for disaggregated MoE serving.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"eldr {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            description=command.help[0].upper() + command.help[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # a flag that is not quite one of ours is an error
        )
        if name == chosen:  # only the chosen command's module is imported
            importlib.import_module(command.module).configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    parser = _parser(chosen)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help(sys.stderr)
        return USAGE
    run = importlib.import_module(COMMANDS[args.command].module).run
    return int(run(args))
