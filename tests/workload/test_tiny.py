import json

import pytest

from eldr.workload.tiny import DOMAINS, GEOMETRY, MODEL_DIR, PROMPT_DIR, SPLITS, load_prompts


def test_the_bundled_model_has_the_geometry_we_claim():
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["num_hidden_layers"] == GEOMETRY.layers
    assert config["num_experts"] == GEOMETRY.experts
    assert config["num_experts_per_tok"] == GEOMETRY.top_k
    assert config["mlp_only_layers"] == []


def test_splits_are_disjoint_and_even():
    per_domain = {"calibration": 36, "serving": 60, "reference": 8}
    seen: set[str] = set()
    texts: set[str] = set()
    for split in SPLITS:
        prompts = load_prompts(split)
        for domain in DOMAINS:
            assert sum(p.domain == domain for p in prompts) == per_domain[split]
            assert load_prompts(split, [domain]) == [p for p in prompts if p.domain == domain]
        assert not seen & {p.id for p in prompts}
        assert not texts & {p.prompt for p in prompts}
        seen |= {p.id for p in prompts}
        texts |= {p.prompt for p in prompts}
    assert len(texts) == len(seen) == 4 * 104


def test_every_prompt_encodes_to_its_length_and_fits_the_model():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR)
    for split in SPLITS:
        for prompt in load_prompts(split):
            assert "\N{REPLACEMENT CHARACTER}" not in prompt.prompt
            assert abs(len(tokenizer(prompt.prompt)["input_ids"]) - 192) <= 2


# Files of the Python standard library that carry a copyright or licence notice of their own.
OWN_NOTICE = {
    *("_pydecimal.py", "cProfile.py", "doctest.py", "multiprocessing/managers.py"),
    *("re/_parser.py", "turtle.py", "xml/etree/ElementPath.py"),
}


def test_the_notice_covers_every_source():
    notice = (PROMPT_DIR / "NOTICE").read_text(encoding="utf-8")
    kinds = {"licence text": "SPDX", "CPython 3.11": "PSF", "Metamath": "CC0", "ICD-10-CM": "NCHS"}
    for source in {p.source for split in SPLITS for p in load_prompts(split)}:
        kind = next(k for k in kinds if source.startswith(k))
        assert kind in notice
        assert kinds[kind] in notice
        file = source.removeprefix("CPython 3.11 ")
        assert file not in OWN_NOTICE or file in notice
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in (PROMPT_DIR / "LICENSE-PYTHON.txt").read_text()


def test_unknown_splits_and_domains_are_refused():
    with pytest.raises(ValueError, match="unknown prompt split 'train'"):
        load_prompts("train")
    with pytest.raises(ValueError, match="unknown domain"):
        load_prompts("serving", ["legal", "poems"])
