import json

import numpy as np
import pytest
import torch

from eldr.workload.tiny import MODEL_DIR, load_prompts

pytest.importorskip("transformers")

from eldr.workload.training import corpus, export, tokenizer
from eldr.workload.training import train as training
from eldr.workload.training.model import Routing, Shape, load_model, new_model, watch_routers

SMALL = Shape(vocabulary=300, hidden=32, layers=2, experts=8, top_k=2, expert_width=8, context=64)


@pytest.fixture
def corpus_dir(packages, tmp_path):
    """A miniature corpus, encoded, with its tokenizer in `tokenizer`."""
    folder = tmp_path / "corpus"
    cut = corpus.Cut(keep=40_000, block=200)
    corpus.build(packages, folder, ["code_py", "math"], cut)
    assert tokenizer.main([str(folder), str(tmp_path / "tokenizer"), "--vocabulary", "300"]) == 0
    return folder


def test_the_experts_we_train_with_equal_the_loop_over_experts():
    """Same logits and gradients as transformers' plain loop, on the trained weights."""
    texts = [p.prompt for p in load_prompts("reference")[:2]]
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(MODEL_DIR)
    ids = torch.tensor([encode(t)["input_ids"][:96] for t in texts])
    results = []
    for experts in ("grouped_mm", "eager"):
        model = load_model(MODEL_DIR, experts=experts)
        logits = model(input_ids=ids).logits
        logits.square().mean().backward()
        results.append((logits, {n: p.grad for n, p in model.named_parameters()}))
    (fast, fast_grads), (plain, plain_grads) = results
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=0)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(fast_grads[name], grad, atol=1e-5, rtol=1e-3, msg=name)


def test_balanced_routing_costs_k_and_collapse_costs_more():
    picks = torch.tensor([[0, 1], [2, 3]])
    even = Routing(torch.zeros(2, 4), picks)
    assert training.balance_loss([even, even]).item() == pytest.approx(2.0)
    collapsed = Routing(torch.tensor([[9.0, 9.0, 0.0, 0.0]] * 2), torch.tensor([[0, 1], [0, 1]]))
    assert training.balance_loss([collapsed]).item() == pytest.approx(4.0, rel=1e-3)


def test_the_rate_rises_and_falls():
    how = training.Training(steps=100, warm_up=10, rate=1.0)
    rates = [how.rate_at(s) for s in range(100)]
    assert rates[0] == pytest.approx(0.1, rel=0.01)
    assert max(rates) == rates[9]
    assert 0.05 <= rates[-1] < 0.06


def test_training_lowers_the_loss_and_repeats_exactly(corpus_dir):
    texts = {d: tokenizer.read_ids(corpus_dir, d, "train") for d in ("code_py", "math")}
    how = training.Training(steps=12, batch=2, length=32, warm_up=2)
    runs = []
    for _ in range(2):
        model = new_model(SMALL, seed=3)
        runs.append(training.train(model, texts, how))
    assert runs[0] == runs[1]
    assert runs[0][0] == pytest.approx(np.log(300), rel=0.1)
    assert np.mean(runs[0][-3:]) < runs[0][0] - 0.3


def test_two_steps_from_the_command_line_give_a_servable_folder(corpus_dir, tmp_path, capsys):
    argv = [str(corpus_dir), str(tmp_path / "tokenizer"), str(tmp_path / "ckpt")]
    shape = ["--vocabulary=300", "--hidden=32", "--layers=2", "--experts=8", "--top-k=2"]
    small = [*shape, "--expert-width=8", "--context=64", "--batch=2", "--length=16"]
    capsys.readouterr()
    assert training.main([*argv, "--steps=2", "--warm-up=1", "--threads=1", *small]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["test_loss"]) == {"code_py", "math"}

    assert export.main([str(tmp_path / "ckpt"), str(tmp_path / "model")]) == 0
    bundled = json.loads((MODEL_DIR / "config.json").read_text())
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert set(bundled) <= set(config)  # engines find every key they find in the bundled model
    assert config["dtype"] == "bfloat16"
    served, trained = load_model(tmp_path / "model"), load_model(tmp_path / "ckpt")
    ids = torch.arange(16)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            served(input_ids=ids).logits, trained(input_ids=ids).logits, atol=0.05, rtol=0.05
        )

    again = [*argv[:2], str(tmp_path / "more"), "--init", str(tmp_path / "ckpt"), "--steps=1"]
    brief = ["--threads=1", "--batch=2", "--length=16"]
    assert training.main([*again, *brief]) == 0
    assert training.main([*again, *brief, "--hidden=64"]) == 2
    assert "hidden: the shape comes from --init" in capsys.readouterr().err
    assert export.main([str(tmp_path / "ckpt"), str(tmp_path / "model")]) == 2  # exists


def test_bad_input_is_named(corpus_dir, tmp_path, capsys):
    argv = [str(corpus_dir), str(tmp_path / "tokenizer"), str(tmp_path / "ckpt"), "--threads=1"]
    assert training.main([*argv, "--steps=0"]) == 2
    assert training.main([*argv, "--steps=1", "--length=999999"]) == 2
    assert "need 1000001" in capsys.readouterr().err
    assert tokenizer.main([str(corpus_dir), str(tmp_path / "t"), "--vocabulary", "100"]) == 2
    assert tokenizer.main([str(tmp_path / "none"), str(tmp_path / "t")]) == 2


def test_watching_stops_with_the_block():
    model = new_model(SMALL, seed=0)
    ids = torch.arange(8)[None]
    with watch_routers(model) as seen, torch.no_grad():
        model(input_ids=ids)
        assert [r.picks.shape for r in seen] == [(8, 2)] * 2
    with torch.no_grad():
        model(input_ids=ids)
    assert len(seen) == 2
