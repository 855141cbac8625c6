import json
import shutil

import pytest
import torch

from eldr.workload.tiny import GEOMETRY, MODEL_DIR, load_prompts
from eldr.workload.widen import main, widen_experts

transformers = pytest.importorskip("transformers")


def run(folder):
    """Logits [prompts, tokens, vocabulary] and router logits of a few real prompts, in float32."""
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [p.prompt for p in load_prompts("reference")[:4]]
    ids = torch.tensor([tokenizer(t)["input_ids"][:128] for t in texts])
    with torch.no_grad():
        out = model(input_ids=ids, output_router_logits=True)
    return out.logits, torch.stack(out.router_logits)


def test_wider_experts_compute_the_same_function(tmp_path):
    report = widen_experts(MODEL_DIR, tmp_path / "wide", 96)
    assert (report.old_width, report.width) == (32, 96)
    assert report.expert_bytes == 3 * 96 * 128 * 2
    grown = GEOMETRY.cells * 3 * (96 - 32) * 128 * 2
    assert report.total_bytes == sum(t for t in _tensor_bytes(MODEL_DIR)) + grown

    logits, routing = run(MODEL_DIR)
    wide_logits, wide_routing = run(tmp_path / "wide")
    torch.testing.assert_close(wide_logits, logits, atol=2e-5, rtol=0)
    top = GEOMETRY.top_k
    assert torch.equal(wide_routing.topk(top).indices, routing.topk(top).indices)
    assert torch.equal(wide_logits.argmax(-1), logits.argmax(-1))


def _tensor_bytes(folder):
    from safetensors.torch import load_file

    return [t.nbytes for t in load_file(folder / "model.safetensors").values()]


def test_the_command_refuses_and_leaves_nothing(tmp_path, capsys):
    cases = {
        "below": [str(MODEL_DIR), str(tmp_path / "narrow"), "--width", "16"],
        "not found": [str(tmp_path / "absent"), str(tmp_path / "out"), "--width", "64"],
    }
    for message, argv in cases.items():
        assert main(argv) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main([str(MODEL_DIR), str(tmp_path / "there"), "--width", "64"]) == 2
    assert "exists" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_a_dense_model_is_refused(tmp_path):
    dense = tmp_path / "dense"
    shutil.copytree(MODEL_DIR, dense)
    config = json.loads((dense / "config.json").read_text())
    del config["moe_intermediate_size"]
    (dense / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="moe_intermediate_size"):
        widen_experts(dense, tmp_path / "out", 64)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_separate_experts_is_refused(tmp_path):
    from safetensors.torch import save_file

    fused = tmp_path / "fused"
    fused.mkdir()
    shutil.copy(MODEL_DIR / "config.json", fused)
    save_file({"model.layers.0.mlp.experts.w13": torch.ones(2, 2)}, fused / "model.safetensors")
    with pytest.raises(ValueError, match="no weights named"):
        widen_experts(fused, tmp_path / "out", 64)
    assert [p.name for p in tmp_path.iterdir()] == ["fused"]
