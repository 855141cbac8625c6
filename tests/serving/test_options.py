"""Options: where a value comes from, and what happens to wrong ones."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from eldr.cli import DONE, USAGE, main
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.options import add_options, resolve, show

WORKERS = ["--prefill", "http://p:1", "--decode", "http://d:1"]


def _resolve(argv: list[str], env: dict[str, str] | None = None):
    parser = argparse.ArgumentParser()
    add_options(parser)
    return resolve(parser.parse_args(argv), env or {})


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text('port = 1\ntau = 0.2\npolicy = "random"\nprefill = ["http://f:1"]\n')
    argv = [*WORKERS[2:], "--config", str(file), "--port", "3"]
    got = _resolve(argv, {"ELDR_SERVE_PORT": "2", "ELDR_SERVE_TAU": "0.3"})
    assert (got.config.port, got.origins["port"]) == (3, "flag")
    assert (got.config.tau, got.origins["tau"]) == (0.3, "environment")
    assert (got.config.policy, got.origins["policy"]) == ("random", f"file {file}")
    assert (got.config.seed, got.origins["seed"]) == (0, "default")
    assert got.config.prefill == ("http://f:1",)


def test_every_option_has_a_flag_and_a_twin_in_the_environment() -> None:
    shown = show(_resolve(WORKERS))
    for name in shown:
        if isinstance(shown[name]["value"], tuple | str | bool):
            continue
        value = str(shown[name]["value"])
        got = _resolve(WORKERS, {f"ELDR_SERVE_{name.upper()}": value})
        assert got.origins[name] == "environment"


def test_lists_in_the_environment_are_split_at_spaces_and_commas() -> None:
    env = {
        "ELDR_SERVE_PREFILL": "http://a:1,http://b:1",
        "ELDR_SERVE_DECODE": "http://c:1 http://d:1",
    }
    got = _resolve([], env).config
    assert got.prefill == ("http://a:1", "http://b:1")
    assert got.decode == ("http://c:1", "http://d:1")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot = 1", "did you mean 'port'"),
        ('port = "x"', "port"),
        ("port = 1.5", "port"),
        ("prefill = 3", "prefill"),
        ("policy = [1]", "policy"),
        ("=", "config file"),
        ("[section]\nport = 1", "section"),
    ],
)
def test_wrong_files_name_file_key_and_reason(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "router.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        _resolve([*WORKERS, "--config", str(file)])
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"attempts": 0}, "attempts"),
        ({"health_interval": 0.0}, "health_interval"),
        ({"request_timeout": float("nan")}, "request_timeout"),
        ({"port": -1}, "port"),
        ({"port": 70000}, "port"),
        ({"prefill": ()}, "no prefill worker"),
        ({"decode": ("http://d:1", "http://d:1")}, "twice"),
        ({"tau": -0.1}, "tau"),
        ({"retry_budget": float("inf")}, "retry_budget"),
        ({"retry_growth": float("nan")}, "retry_growth"),
        ({"ab": ("random", "round_robin"), "policy": "random"}, "leave policy random out"),
        ({"shadow": ("random", "random")}, "different policies"),
        ({"api_key": ("k", "")}, "an empty key is none"),
        ({"worker_key": "k\r\nX-Evil: 1"}, "worker_key: a key is"),
        ({"api_key": ("k",), "admin_key": "k"}, "choose another one"),
        ({"decode": ("http://u:s3cret@d:1",)}, r"http://\.\.\.@d:1: no user or password"),
    ],
)
def test_values_out_of_range(options: dict[str, object], says: str) -> None:
    given = {"prefill": ("http://p:1",), "decode": ("http://d:1",), **options}
    with pytest.raises(ConfigError, match=says) as caught:
        RouterConfig(**given)
    assert "s3cret" not in str(caught.value)


def test_show_config_prints_origins_and_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELDR_SERVE_ADMIN_KEY", "hush-hush")
    assert main(["serve", *WORKERS, "--api-key", "s3cret", "--show-config", "--json"]) == DONE
    text = capsys.readouterr().out
    assert "hush-hush" not in text
    assert "s3cret" not in text
    rows = json.loads(text)
    assert rows["admin_key"] == {"value": "set", "origin": "environment"}
    assert rows["prefill"] == {"value": ["http://p:1"], "origin": "flag"}
    collector = ["--otel-endpoint", "http://u:s3cret@otel:4318"]
    assert main(["serve", *WORKERS, *collector, "--show-config"]) == DONE
    assert "'http://...@otel:4318'  (flag)" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--prot", "--max-bod", "--admin-k"])
def test_flag_that_is_not_quite_one_is_an_error(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *WORKERS, flag, "5", "--show-config"])
    assert ended.value.code == USAGE
    assert flag in capsys.readouterr().err


def test_wrong_usage_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--decode", "http://d:1"]) == USAGE
    assert "--prefill" in capsys.readouterr().err


def test_secret_of_the_wrong_type_is_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "router.json"
    file.write_text('{"admin_key": ["s3cret"]}')
    with pytest.raises(ConfigError) as caught:
        _resolve([*WORKERS, "--config", str(file)])
    assert "s3cret" not in str(caught.value)
