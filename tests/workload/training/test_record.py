import numpy as np
import pytest

from eldr.workload import traces
from eldr.workload.tiny import DOMAINS, MODEL_DIR, load_prompts

pytest.importorskip("transformers")

from eldr.workload.training import capture, corpus, prompts, tokenizer
from eldr.workload.training.model import Shape, load_model, new_model

SMALL = Shape(vocabulary=300, hidden=32, layers=2, experts=8, top_k=2, expert_width=8, context=64)


def test_picks_are_those_of_one_forward_over_the_whole_text():
    """Decoding token by token with a cache routes as one pass over prompt and answer does."""
    model = load_model(MODEL_DIR)
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(MODEL_DIR)
    rows = [encode(p.prompt)["input_ids"][:48] for p in load_prompts("reference")[:2]]
    how = capture.Recording(prompt=48, decode=12)
    picks, tokens = capture.record(model, np.array(rows, np.uint16), how, seed=5)
    assert picks.shape == (2, 60, 4, 4)
    assert tokens.shape == (2, 60)
    assert np.array_equal(tokens[:, :48], np.array(rows))
    assert tokens[:, 48:].min() > 1  # neither end nor padding

    whole, same = capture.record(model, tokens, capture.Recording(prompt=60, decode=1), seed=0)
    assert np.array_equal(same[:, :60], tokens)
    agree = np.sort(whole[:, :60], axis=-1) == np.sort(picks, axis=-1)
    assert agree.mean() > 0.999  # ties of float32 sums taken in another order

    again = capture.record(model, np.array(rows, np.uint16), how, seed=5)
    assert np.array_equal(again[0], picks)
    other = capture.record(model, np.array(rows, np.uint16), how, seed=6)
    assert not np.array_equal(other[1], tokens)
    greedy = capture.Recording(prompt=48, decode=3, temperature=0.0)
    first = capture.record(model, np.array(rows, np.uint16), greedy, seed=1)
    assert np.array_equal(first[1], capture.record(model, np.array(rows, np.uint16), greedy, 2)[1])


@pytest.fixture
def small_run(packages, tmp_path):
    """An encoded miniature corpus and an untrained checkpoint for it."""
    folder = tmp_path / "corpus"
    corpus.build(packages, folder, list(DOMAINS), corpus.Cut(keep=4000, block=100))
    assert tokenizer.main([str(folder), str(tmp_path / "tokenizer"), "--vocabulary", "300"]) == 0
    new_model(SMALL, seed=9).save_pretrained(tmp_path / "model")
    return folder


def test_the_command_writes_a_trace_that_the_reader_accepts(small_run, tmp_path, capsys):
    argv = [str(tmp_path / "model"), str(small_run), str(tmp_path / "trace.npz")]
    sizes = ["--prompt=16", "--decode=6", "--per-domain=2"]
    recorded = {}
    for control in capture.CONTROLS:
        assert capture.main([*argv, *sizes, f"--control={control}"]) == 0
        recorded[control] = trace = traces.load(tmp_path / "trace.npz")
        assert trace.domains == DOMAINS
        assert len(trace) == 8
        assert str(trace.geometry) == "2 layers x 8 experts, top-2"
        assert (np.diff(trace.offsets) == 22).all()
        assert (trace.prompt_counts.sum((1, 2)) == 16 * 2 * 2).all()
    prompt = recorded["trained"].tokens[:16]
    for control in capture.CONTROLS[1:]:  # the same prompts through other routers
        assert np.array_equal(recorded[control].tokens[:16], prompt)
        assert not np.array_equal(recorded[control].topk[:16], recorded["trained"].topk[:16])
    capsys.readouterr()
    assert capture.main([*argv, *sizes, "--temperature=nan"]) == 2
    assert capture.main([*argv, "--prompt=5000"]) == 2
    assert "need 5001" in capsys.readouterr().err


def test_prompts_come_from_the_trace_with_their_source(small_run, packages, tmp_path, monkeypatch):
    argv = [str(tmp_path / "model"), str(small_run), str(tmp_path / "trace.npz")]
    assert capture.main([*argv, "--prompt=8", "--decode=1", "--per-domain=9"]) == 0
    monkeypatch.setattr(prompts, "SIZES", {"serving": 2, "reference": 1})
    argv = [str(tmp_path / "trace.npz"), str(tmp_path / "tokenizer"), str(packages)]
    out = tmp_path / "prompts"
    assert prompts.main([*argv, str(out)]) == 0
    lines = {s: (out / f"{s}.jsonl").read_text() for s in ("serving", "reference")}
    assert [text.count("\n") for text in lines.values()] == [8, 4]
    assert '"source": "Metamath iset.mm"' in lines["serving"]
    assert '"source": "licence text' in lines["serving"]
    assert prompts.main([*argv, str(tmp_path / "again")]) == 0
    assert (tmp_path / "again/serving.jsonl").read_text() == lines["serving"]

    monkeypatch.setattr(prompts, "SIZES", {"serving": 500})
    assert prompts.main([*argv, str(tmp_path / "more")]) == 2
    assert not (tmp_path / "more").exists()


def test_an_excerpt_of_nothing_is_not_attributed(packages):
    source_of = prompts.Attribution("legal", packages)
    assert source_of("mission is\nhereby granted. Per") == "licence text MIT"
    with pytest.raises(ValueError, match="no document"):
        source_of("It was a dark and stormy night")
