"""Miniatures of the packages that the corpus is made of."""

import json

import pytest


@pytest.fixture
def packages(tmp_path):
    """A folder as `training.download` leaves it, with two tiny files a package."""
    root = tmp_path / "sources"

    def put(path, text):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    python = "usr/lib/python3.11"
    put(f"libpython3.11-minimal/{python}/abc.py", "import os\n" * 30)
    put(
        f"libpython3.11-stdlib/{python}/json/decoder.py",
        "def decode(text):\n    return text\n" * 300,
    )
    put(f"libpython3.11-stdlib/{python}/test/test_abc.py", "raise AssertionError\n")
    for name, body in (("MIT", "Permission is hereby granted. "), ("ISC", "Permission to use. ")):
        put(
            f"spdx-license-list/package/licenses/{name}.json",
            json.dumps({"licenseText": body * 60 + "\r\n"}),
        )
    base = "metamath-databases/usr/share/metamath/databases"
    for name in ("iset.mm", "set.mm"):
        put(
            f"{base}/{name}", "ax-1 $a |- ( ph  -> ps ) $.\n id $p |- ph $= ( abc ) ABC $.\n" * 5000
        )
    put(
        "simple-icd-10-cm/simple_icd_10_cm/data/tabular.xml",
        "<section><diag><name>A00</name> <desc>Cholera</desc>"
        "<excludes1><note>fever</note></excludes1></diag></section>\n" * 60,
    )
    return root
