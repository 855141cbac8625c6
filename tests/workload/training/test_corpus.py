import json

import pytest

from eldr.workload.training.corpus import Cut, build, main, read_blocks, read_domains, split
from eldr.workload.training.readers import Document, documents

DOMAINS = ["code_py", "legal", "math", "med"]
SMALL = Cut(keep=4000, block=100)


def test_every_byte_lands_in_exactly_one_part_in_order():
    body = "".join(chr(0x400 + i % 500) for i in range(5000))  # two bytes a character
    train, test = split([Document("a", body)], Cut(keep=6000, block=101, held_out=10))
    blocks = []
    rest = iter(train)
    for i in range(len(train) + len(test)):
        blocks.append(test[i // 10] if i % 10 == 9 else next(rest))
    raw = body.encode()[:6000]
    for i, block in enumerate(blocks):
        assert block == raw[i * 101 : (i + 1) * 101].decode("utf-8", "ignore")
    assert (len(test), len(blocks)) == (6, 60)


def test_readers_see_the_library_only_and_name_their_documents(packages):
    names = {d.name for d in documents("code_py", packages)}
    assert names == {"CPython 3.11 abc.py", "CPython 3.11 json/decoder.py"}
    licences = {d.name: d.text for d in documents("legal", packages)}
    assert set(licences) == {"licence text MIT", "licence text ISC"}
    assert "\r" not in "".join(licences.values())
    assert all("ABC" not in d.text for d in documents("math", packages))
    assert [d.text for d in documents("med", packages)][-1] == "A00 Cholera\nExcludes: fever;"


def test_the_other_readers_keep_what_is_prose(packages):
    def texts(domain):
        return [d.text for d in documents(domain, packages)]

    assert texts("code_cpp") == ["#define CORE\n"]
    assert texts("json") == [f'{{"{p}": []}}' for p in ("639-3", "3166-2", "3166-1", "639-2")]
    assert sorted("".join(texts("dict")).splitlines()) == [
        f"{part} word ({part}): a gloss" for part in ("adj", "adv", "noun", "verb")
    ]
    assert [t.split()[0] for t in texts("sqlite")] == ["SELECT"]
    assert texts("lang_en") == ["Preface\nA line that the translators left in English"]
    assert texts("lang_de") == ["Vorwort"]
    assert texts("bible") == ["Gen1:1 In the beginning\n"]


def test_a_broken_package_is_named(packages):
    (packages / "simple-icd-10-cm/simple_icd_10_cm/data/tabular.xml").unlink()
    with pytest.raises(FileNotFoundError, match="no tabular list"):
        list(documents("med", packages))
    (packages / "bible-kjv/usr/bin/bible").write_text("#!/bin/sh\necho no data >&2; exit 4\n")
    with pytest.raises(ValueError, match=r"failed \(4\): b'no data"):
        list(documents("bible", packages))


def test_a_corpus_is_built_twice_alike(packages, tmp_path):
    first = build(packages, tmp_path / "a", DOMAINS, SMALL)
    assert build(packages, tmp_path / "b", DOMAINS, SMALL) == first
    assert read_domains(tmp_path / "a") == DOMAINS
    for domain in DOMAINS:
        blocks = read_blocks(tmp_path / "a", domain, "train")
        assert blocks == read_blocks(tmp_path / "b", domain, "train")
        assert sum(len(b.encode()) for b in blocks) == first[domain]["train_bytes"]
        assert first[domain]["licence"]


def test_the_command_names_what_is_missing(packages, tmp_path, capsys):
    (packages / "wordnet-base").rename(packages / "gone")
    argv = [str(packages), str(tmp_path / "out"), "--keep", "4000", "--block", "100"]
    assert main([*argv, "--domain", "legal"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["legal"]
    assert main([*argv, "--domain", "lang_fr"]) == 2
    assert "lang_fr: 0 block(s)" in capsys.readouterr().err
    assert main([*argv, "--domain", "dict"]) == 2
    assert "wordnet-base: not found" in capsys.readouterr().err
    for file in (packages / "spdx-license-list/package/licenses").iterdir():
        file.unlink()
    assert main([*argv, "--domain", "legal"]) == 2
    assert "legal: 0 block(s) of text" in capsys.readouterr().err
    assert main([*argv, "--block", "0"]) == 2


def test_unknown_domains_are_refused(packages):
    with pytest.raises(ValueError, match="unknown domain 'poems'"):
        documents("poems", packages)
