from types import SimpleNamespace

import pytest

from eldr.engine import config


def vllm_config(**changes):
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
    }
    model = {
        "model": "m",
        "runner_type": "generate",
        "is_moe": True,
        "hf_config": SimpleNamespace(architectures=["A"], model_type="a"),
    }
    for values in (parallel, model):
        values.update({name: changes[name] for name in values if name in changes})
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=changes.get("mode", 0)),
        device_config=SimpleNamespace(device_type=changes.get("device", "cpu")),
        additional_config=changes.get("additional_config", {"eldr": {"role": "prefill"}}),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(**model),
    )


@pytest.mark.parametrize(
    ("role", "signatures", "decode"),
    [("prefill", True, False), ("decode", False, True), ("both", True, True)],
)
def test_roles(role, signatures, decode):
    settings = config.read({"eldr": {"role": role}})
    assert (settings.signatures, settings.decode) == (signatures, decode)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "role is missing"),
        ({"role": "router"}, "role must be one of prefill, decode, both, got 'router'"),
        ({"role": "prefill", "tau": 1}, "unknown key 'tau'"),
        ({"role": "prefill", "host_store_blocks": -1}, "must be an integer >= 0, got -1"),
        ({"role": "prefill", "host_store_blocks": True}, "must be an integer >= 0, got True"),
        ({"role": "decode", "window_steps": 0}, "must be an integer >= 1, got 0"),
        ({"role": "prefill", "admin": 1}, "admin must be true or false, got 1"),
        (
            {"role": "prefill", "signature_form": "4bit"},
            "signature_form must be one of exact, 8bit, sampled, got '4bit'",
        ),
        ({"role": "prefill", "signature_form": ["8bit"]}, "signature_form must be one of"),
        ("prefill", "expected an object"),
        (None, "expected an object"),
    ],
)
def test_bad_settings_name_the_value(settings, message):
    with pytest.raises(config.EngineConfigError, match=message):
        config.read({"eldr": settings})


@pytest.mark.parametrize("form", ["exact", "8bit", "sampled"])
def test_forms_of_signatures(form):
    assert config.read({"eldr": {"role": "prefill"}}).signature_form == "exact"
    settings = config.read({"eldr": {"role": "prefill", "signature_form": form}})
    assert settings.signature_form == form


@pytest.mark.parametrize("changes", [{}, {"mode": 3, "device": "cuda"}])
def test_a_supported_configuration_passes(changes):
    config.check(vllm_config(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 1"),
        ({"use_ubatching": True}, "--enable-dbo"),
        ({"mode": 2}, "--enforce-eager"),
        ({"is_moe": False}, "has no routed experts"),
        ({"runner_type": "pooling"}, "runs as 'pooling'"),
        ({"additional_config": {"eldr": {}}}, "role is missing"),
    ],
)
def test_unsupported_configurations_are_refused(changes, message):
    with pytest.raises(config.EngineConfigError, match=message):
        config.check(vllm_config(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"runner_type": "draft"},
        {"hf_config": SimpleNamespace(architectures=None, model_type="vision")},
    ],
)
def test_dense_draft_models_and_submodels_are_not_eldrs_business(changes):
    config.check(vllm_config(is_moe=False, **changes))
