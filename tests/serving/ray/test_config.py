"""The application's configuration: what is refused, with which words; engine options per role."""

import pytest

from eldr.engine.inprocess import command_line
from eldr.serving.config import ConfigError
from eldr.serving.ray import read_config
from eldr.serving.ray.app import engine_options

BASE = {"engine": {"model": "m"}}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**BASE, "decod": {}}, "decod: no such option; did you mean decode?"),
        ({**BASE, "decode": {"replica": 2}}, "did you mean decode.replicas?"),
        ({**BASE, "routing": {"policy": "best"}}, "no policy 'best'"),
        ({**BASE, "routing": {"policy": "locality_band"}}, "needs a partition"),
        ({**BASE, "routing": {"partition": "/nowhere"}}, "uses no partition"),
        ({**BASE, "routing": {"trust": 2.0}}, "trust: must be in"),
        (
            {**BASE, "routing": {"policy": "nearest", "partition": "/nowhere"}},
            "/nowhere: cannot read",
        ),
        ({**BASE, "requests": {"attempts": "many"}}, "attempts"),
        ({**BASE, "requests": {"attempts": 0}}, "attempts: must be positive"),
        ({**BASE, "decode": {"replicas": 0}}, "replicas: must be at least 1"),
        ({**BASE, "proxy": {"engine": {"a": 1}}}, "the proxy runs no engine"),
        ({}, "engine.model is missing"),
        ({**BASE, "decode": 3}, "decode: expected a table"),
    ],
)
def test_what_cannot_work_is_refused(values, text) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?").replace("[", r"\[")):
        read_config(values)


def test_roles_connector_and_signatures_are_filled_in() -> None:
    config = read_config(
        {
            "engine": {"model": "m", "kv_transfer_config": {"kv_buffer_device": "cpu"}},
            "decode": {"engine": {"max-num-seqs": 8}},
        }
    )
    prefill, decode = (engine_options(config, role) for role in ("prefill", "decode"))
    assert prefill["kv-transfer-config"] == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
    }
    assert decode["kv-transfer-config"]["kv_role"] == "kv_consumer"
    assert decode["max-num-seqs"] == 8
    assert "max-num-seqs" not in prefill
    assert prefill["additional-config"] == {"eldr": {"role": "prefill"}}
    assert decode["additional-config"] == {"eldr": {"role": "decode"}}


def test_options_become_vllms_command_line() -> None:
    options = {
        "model": "m", "enforce_eager": True, "enable-chunked-prefill": False, "revision": None,
        "additional-config": {"eldr": {"role": "both"}}, "served-model-name": ["a", "b"],
    }  # fmt: skip
    assert command_line(options) == [
        *("--model", "m", "--enforce-eager", "--no-enable-chunked-prefill"),
        *("--additional-config", '{"eldr": {"role": "both"}}', "--served-model-name", "a", "b"),
    ]
