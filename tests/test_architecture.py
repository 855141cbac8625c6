"""The rules of docs/structure.md, checked: who imports whom, what loads what, file sizes, links."""

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from eldr.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eldr"

# Room -> rooms it may import. A new room needs a line here and in docs/structure.md.
BASE = {"eldr", "geometry", "tracing"}
MAY_IMPORT = {
    "eldr": set(),
    "geometry": set(),
    "tracing": set(),
    "signature": BASE,
    "kernels": BASE,
    "engine": BASE | {"signature", "kernels"},
    "routing": BASE | {"signature", "kernels"},
    "serving": BASE | {"signature", "routing"},
    "workload": BASE,
    "demo": BASE | {"signature", "workload"},
    "simulation": BASE | {"signature", "routing", "workload"},
}
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli"}

# Heavy package -> rooms whose source may name it at all, be it inside a function.
HEAVY = {
    "vllm": {"engine"},
    "torch": {"kernels", "engine", "routing", "workload", "tracing"},
    "triton": {"kernels", "engine"},
    "cupy": {"kernels"},
    "transformers": {"workload", "engine"},
    "aiohttp": {"serving", "demo", "cli"},
    "ray": {"serving"},
}

TRAINING = "eldr.workload.training"
# Derives from a class of Ray: the one module that cannot be imported without it.
SUBCLASS = "eldr.serving.ray.request_router"


def modules():
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
PARSED = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def room(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def imports(nodes):
    """Dotted names that these statements import, resolved to modules where they are ours."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def at_import_time(tree):
    """Statements that run when the module is imported: not in functions, not for type checkers."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("module", MODULES)
def test_rooms_import_only_what_they_may(module):
    own = room(module)
    assert own in MAY_IMPORT, f"{own} is a new room: say in docs/structure.md whom it may import"
    for name in set(imports(ast.walk(PARSED[module]))):
        top = name.split(".")[0]
        if top == "eldr":
            assert room(name) in MAY_IMPORT[own] | {own}, f"{module} imports {name}"
        assert own in HEAVY.get(top, {own}), f"{module} imports {name}; only {HEAVY[top]} may"
        # How the bundled model was made is no part of running ELDR.
        assert not name.startswith(TRAINING) or module.startswith(TRAINING), f"{module}: {name}"


def test_no_import_circle():
    graph = {
        module: {n for n in imports(at_import_time(tree)) if n in MODULES and n != module}
        for module, tree in PARSED.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


def test_structure_names_every_room():
    table = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    for own in {room(m) for m in MODULES} - {"eldr", "__main__"}:
        assert re.search(rf"^\| `eldr/{own}(/|\.py)`", table, re.M), f"{own} has no line"


def sources():
    for folder in ("eldr", "csrc", "tests", "benchmarks", "profiling", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cpp", ".cu", ".cuh", ".h", ".hpp"}:
                yield path


def test_files_are_small():
    counts = {p.relative_to(ROOT): len(p.read_bytes().splitlines()) for p in sources()}
    assert len(counts) > 50
    assert {str(p): n for p, n in counts.items() if n > 400} == {}


def loaded_after(code):
    """Which heavy modules a fresh interpreter has loaded after running `code`."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy():
    assert not {"torch", "vllm", "numpy", "aiohttp"} & loaded_after("import eldr, eldr.geometry")


def test_help_loads_nothing_heavy():
    code = "from eldr.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert not {"torch", "vllm", "numpy", "aiohttp"} & loaded_after(code)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_loads_torch_to_explain_itself(command):
    code = f"from eldr.cli import main\ntry: main([{command!r}, '--help'])\nexcept SystemExit: pass"
    assert not {"torch", "vllm", "transformers"} & loaded_after(code)


def test_help_is_fast():
    """0.3 s of processor time, the best of five; wall time would measure the machine's load."""
    spent = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-m", "eldr", "--help"], check=True, capture_output=True)
        after = os.times()
        user, system = "children_user", "children_system"
        spent.append(sum(getattr(after, k) - getattr(before, k) for k in (user, system)))
    assert min(spent) <= 0.3


def test_the_router_process_never_loads_torch():
    ours = [m for m in MODULES if room(m) == "serving" and m != SUBCLASS] + ["eldr.cli.serve"]
    loaded = loaded_after("\n".join(f"import {m}" for m in ours))
    assert "eldr.routing" in loaded
    assert not {"torch", "vllm", "triton", "transformers"} & loaded


def test_ray_is_loaded_only_by_those_who_use_it():
    assert "ray" not in loaded_after("import eldr.serving.server, eldr.serving.ray, eldr.cli.serve")


def pages():
    skip = {".venv", "build", "dist", "node_modules", "demo-out"}
    for path in sorted(ROOT.rglob("*.md")):
        parts = path.relative_to(ROOT).parts
        if not skip & set(parts) and not any(p.startswith(".") for p in parts):
            yield path


def headings(page):
    """The anchors that a page's headings get on GitHub."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    titles = [t.replace("`", "").strip().lower() for t in re.findall(r"(?m)^#+ (.*)$", text)]
    return {re.sub(r"[^\w\- ]", "", t).replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", list(pages()), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_pages_resolve(page):
    text = re.sub(r"(?ms)^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in headings(linked), f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", list(pages()), ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_that_pages_name_exist(page):
    rooms = "eldr|csrc|tests|docs|benchmarks|profiling|patches|requirements|results|examples|deploy"
    named = re.findall(rf"`((?:{rooms})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    missing = sorted({path for path in named if not (ROOT / path).exists()})
    assert missing == [], f"{page.name} names {missing}"
