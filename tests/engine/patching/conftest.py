import json

import pytest

from eldr.cli import main
from tests.engine.patching import toy as toys


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The toy repository and its series, made once and only read afterwards."""
    root = tmp_path_factory.mktemp("toy")
    repo = toys.repository(root / "repo")
    toys.source_branch(repo)
    patches = toys.export(repo, root / "patches")
    site = toys.wheel(root / "site")
    assert main(["patch", "pin", "--patches", str(patches), "--target", str(site)]) == 0
    return repo, patches


@pytest.fixture
def toy(built, tmp_path):
    repo, patches = built
    return toys.Toy(repo, patches, toys.wheel(tmp_path / "site"))


@pytest.fixture
def run(toy, capsys):
    """Runs `eldr patch ACTION --json` on the toy; returns the exit code, the object and stderr."""

    def run(action, *words, target=None, patches=None):
        command = ["patch", action, "--json", "--patches", str(patches or toy.patches), *words]
        if action != "list":
            command += ["--target", str(target or toy.site)]
        capsys.readouterr()
        code = main(command)
        captured = capsys.readouterr()
        data = json.loads(captured.out)
        assert data["exit"] == code
        return code, data, captured.err

    return run
