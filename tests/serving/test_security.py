"""Keys, where the operator's routes are, and what strangers and request fields may not do."""

from __future__ import annotations

import json

import pytest

from eldr.demo.ports import free_ports
from eldr.serving.bodies import parse
from eldr.serving.config import ConfigError, RouterConfig
from eldr.serving.errors import ClientError
from eldr.serving.server import check_exposure
from tests.serving.rig import rig


def _free() -> int:
    return free_ports(1)[0]


async def test_client_key_is_needed_and_goes_no_further() -> None:
    async with rig(1, 1, api_key=("k1", "k2"), worker_key="w") as r:
        for header in (None, "Bearer k3", "Bearer", "Basic k1", "k1"):
            headers = {} if header is None else {"Authorization": header}
            for call in (r.client.post(r.url + "/v1/completions", headers=headers, json={}),):
                async with call as response:
                    assert response.status == 401
                    assert response.headers["WWW-Authenticate"] == "Bearer"
        body = {"model": "m", "prompt": "x"}
        for key in ("k1", "k2"):
            headers = {"Authorization": f"Bearer {key}"}
            async with r.client.post(r.url + "/v1/completions", headers=headers, json=body) as a:
                assert a.status == 200
        for worker in (*r.prefill, *r.decode):
            assert {seen.headers["authorization"] for seen in worker.seen} == {"Bearer w"}


async def test_admin_key_is_another_one() -> None:
    async with rig(1, 1, api_key=("client",), admin_key="admin") as r:
        for key, status in (("client", 401), ("admin", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with r.client.get(r.url + "/workers", headers=headers) as response:
                assert response.status == status
        async with r.client.get(r.url + "/health") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Host": "evil.example"}, "evil.example"),  # whose name points here
        ({"Host": "127.0.0.1.evil.example:80"}, "evil.example"),
        ({"Origin": "http://evil.example"}, "a page of"),
        ({"Origin": "null"}, "a page of"),
        ({"X-Forwarded-For": "203.0.113.9"}, "proxy (X-Forwarded-For)"),
        ({"Forwarded": "for=203.0.113.9"}, "proxy (Forwarded)"),
    ],
)
async def test_without_an_admin_key_operators_are_on_this_machine(
    headers: dict[str, str], why: str
) -> None:
    wanted = json.dumps({"role": "decode", "url": "http://h:1"}).encode()
    async with rig(1, 1) as r:
        for method, path in (
            ("POST", "/workers"),
            ("GET", "/workers"),
            ("GET", "/eldr/decisions"),
            ("POST", "/eldr/partition"),
            ("GET", "/eldr/data"),
            ("GET", "/eldr/events"),
        ):
            call = r.client.request(method, r.url + path, data=wanted, headers=headers)
            async with call as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == (403, "not_local"), path
                assert why in error["message"]
        for name in ("localhost", "127.0.0.1:9", "[::1]:8443"):
            local = {"Host": name, "Origin": f"https://{name}"}
            async with r.client.get(r.url + "/workers", headers=local) as response:
                assert response.status == 200
    async with rig(1, 1, admin_key="k") as r:
        headers = {**headers, "Authorization": "Bearer k"}
        async with r.client.get(r.url + "/workers", headers=headers) as response:
            assert response.status == 200


async def test_admin_port_takes_the_routes_off_the_main_one() -> None:
    async with rig(1, 1, admin_port=_free(), prometheus_port=_free()) as r:
        config = r.router.config
        admin = f"http://127.0.0.1:{config.admin_port}"
        metrics = f"http://127.0.0.1:{config.prometheus_port}"
        for base, path, status in (
            (r.url, "/workers", 404),
            (r.url, "/metrics", 404),
            (admin, "/workers", 200),
            (admin, "/v1/models", 404),
            (metrics, "/metrics", 200),
            (metrics, "/workers", 404),
        ):
            async with r.client.get(base + path) as response:
                assert response.status == status, (base, path)


def test_admin_beyond_this_machine_needs_a_key() -> None:
    given = {"prefill": ("http://p:1",), "decode": ("http://d:1",), "admin_port": 1}
    with pytest.raises(ConfigError, match="admin key"):
        check_exposure(RouterConfig(**given, admin_host="0.0.0.0"))
    check_exposure(RouterConfig(**given, admin_host="0.0.0.0", admin_key="k"))
    check_exposure(RouterConfig(**given))


@pytest.mark.parametrize(
    ("part", "status"),
    [
        ({"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}, 400),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 400),
        ({"type": "image_url", "image_url": "https://x/y"}, 400),
        ({"type": "video_url", "video_url": {"url": "ftp://x"}}, 400),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, 200),
        ({"type": "text", "text": "see image_url in the docs"}, 200),
    ],
)
async def test_media_urls_are_refused_unless_enabled(part: object, status: int) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    async with rig(1, 1) as r:
        async with r.client.post(r.url + "/v1/chat/completions", json=body) as response:
            assert response.status == status
        assert len(r.prefill[0].seen) == (status == 200)
    async with (
        rig(1, 1, allow_media_urls=True) as r,
        r.client.post(r.url + "/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200


async def test_media_url_behind_an_escape_is_refused_as_well() -> None:
    raw = (
        b'{"messages":[{"role":"user","content":[{"type":"image_url",'
        b'"image\\u005furl":{"url":"http://10.0.0.1/"}}]}]}'
    )
    async with (
        rig(1, 1) as r,
        r.client.post(r.url + "/v1/chat/completions", data=raw) as response,
    ):
        assert response.status == 400


@pytest.mark.parametrize("depth", [10, 600, 1000])
async def test_media_url_is_found_at_any_depth(depth: int) -> None:
    nested = b'[{"a":' * (depth // 2) + b'{"image_url":"http://x"}' + b"}]" * (depth // 2)
    lists = b"[" * depth + b'{"image_url":"http://x"}' + b"]" * depth
    async with rig(1, 1) as r:
        for messages in (nested, lists):
            raw = b'{"messages":%b}' % messages
            async with r.client.post(r.url + "/v1/chat/completions", data=raw) as response:
                assert response.status == 400
        assert not r.prefill[0].seen


async def test_no_field_names_another_workers_memory() -> None:
    handle = {"remote_host": "evil", "do_remote_prefill": True}
    async with rig(1, 1) as r:
        for whole in ({}, {"use_beam_search": True}):
            given = {"kv_transfer_params": handle, "ec_transfer_params": handle, **whole}
            extra = {"vllm_xargs": {"kept": "kv_transfer_params", "l": [1, 2.5]}}
            assert (await r.complete(**given, **extra))[0] == 200
            for hidden in ("kv_transfer_params", "ec_transfer_params", "kv\\u005ftransfer_params"):
                raw = b'{"prompt":"x","vllm_xargs":{"%b":"boom"}}' % hidden.encode()
                async with r.client.post(r.url + "/v1/completions", data=raw) as response:
                    assert response.status == 400
                    assert "vllm_xargs" in (await response.json())["error"]["message"]
        for seen in (*r.prefill[0].seen, *r.decode[0].seen):
            assert b"evil" not in seen.raw
            assert b"boom" not in seen.raw
            assert seen.body["vllm_xargs"] == extra["vllm_xargs"]


def test_whoever_parses_a_body_gets_it_without_handles() -> None:
    """The surfaces under Ray and llm-d read bodies by the same function."""
    raw = b'{"prompt":"x","kv_transfer_params":{"a":1},"ec_transfer_params":{"b":2},"n":1}'
    assert parse(raw, chat=False).fields.keys() == {"prompt", "n"}
    with pytest.raises(ClientError, match="vllm_xargs"):
        parse(b'{"prompt":"x","vllm_xargs":{"ec_transfer_params":"boom"}}', chat=False)
