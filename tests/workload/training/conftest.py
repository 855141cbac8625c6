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
    put("libeigen3-dev/usr/include/eigen3/Core", "// This file is part of Eigen\n\n#define CORE\n")
    for part in ("639-3", "3166-2", "3166-1", "639-2"):
        put(f"iso-codes/usr/share/iso-codes/json/iso_{part}.json", f'{{"{part}": []}}')
    for part in ("noun", "verb", "adj", "adv"):
        put(
            f"wordnet-base/usr/share/wordnet/data.{part}",
            f"  1 licence | x\n1 0 n 01 {part}_word 0 000 | a gloss\n",
        )
    put("sqlite3-doc/usr/share/doc/sqlite3/lang.html", f"<p>{'SELECT ' * 900}</p>")
    put("sqlite3-doc/usr/share/doc/sqlite3/short.html", "<p>too short</p>")
    put("sqlite3-doc/usr/share/doc/sqlite3/releaselog/1.html", f"<p>{'fixed ' * 900}</p>")
    handbook = "debian-handbook/usr/share/doc/debian-handbook/html"
    same = "<p>A line that the translators left in English</p>"
    put(f"{handbook}/en-US/ch01.html", f"<p>Preface</p>{same}")
    put(f"{handbook}/de-DE/ch01.html", f"<p>Vorwort</p>{same}")
    put(f"{handbook}/de-DE/index.html", "<p>Inhalt</p>")
    bible = "bible-kjv/usr/bin/bible"
    put(bible, '#!/bin/sh\ntest "$4" = gen1:1-rev22:21 && echo "Gen1:1 In the beginning"\n')
    (root / bible).chmod(0o755)
    (root / "bible-kjv-text").mkdir()
    return root
