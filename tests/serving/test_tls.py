"""TLS towards clients, workers and operators: who is let in, and whom the router believes."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from eldr.demo.ports import free_ports
from eldr.serving.config import RouterConfig
from eldr.serving.errors import StartError
from eldr.serving.opening import open_router
from tests.serving.mocks.worker import MockWorker, workers
from tests.serving.rig import rig


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with certificates: an authority's, its for this address and another, nobody's."""
    where = tmp_path_factory.mktemp("tls")
    _openssl(where, "req", "-x509", "-subj", "/CN=ca", *_new("ca"))
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key")
    for name, address, by in (
        ("here", "IP:127.0.0.1", signed),
        ("elsewhere", "DNS:elsewhere", signed),
        ("x", "IP:127.0.0.1", ()),
    ):
        is_for = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={address}")
        _openssl(where, "req", "-x509", *is_for, *_new(name), *by)
    return where


def _new(name: str) -> tuple[str, ...]:
    made = ("-keyout", f"{name}.key", "-out", f"{name}.pem")
    return ("-newkey", "rsa:2048", "-nodes", "-days", "2", *made)


def _openssl(where: Path, *arguments: str) -> None:
    try:
        subprocess.run(["openssl", *arguments], cwd=where, capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("openssl is not there to make a certificate")


def _served(where: Path, name: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(where / f"{name}.pem", where / f"{name}.key")
    return context


def _client(where: Path, certificate: str = "") -> aiohttp.ClientSession:
    context = ssl.create_default_context(cafile=str(where / "ca.pem"))
    if certificate:
        context.load_cert_chain(where / f"{certificate}.pem", where / f"{certificate}.key")
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context))


async def test_client_certificates_are_demanded(authority: Path) -> None:
    options = {
        "tls_cert": str(authority / "here.pem"),
        "tls_key": str(authority / "here.key"),
        "tls_client_ca": str(authority / "ca.pem"),
    }
    async with rig(1, 1, **options) as r:
        url = r.url.replace("http:", "https:") + "/v1/completions"
        for certificate in ("", "x"):  # none, and one of nobody's
            async with _client(authority, certificate) as client:
                with pytest.raises(aiohttp.ClientError):
                    await client.post(url, json={"prompt": "x"})
        assert r.prefill[0].count == 0
        async with (
            _client(authority, "elsewhere") as client,
            client.post(url, json={"prompt": "x"}) as response,
        ):
            assert response.status == 200


async def test_operators_beyond_this_machine_come_by_tls_too(authority: Path) -> None:
    (port,) = free_ports(1)
    options = {
        "tls_cert": str(authority / "here.pem"),
        "tls_key": str(authority / "here.key"),
        "admin_host": "0.0.0.0",
        "admin_port": port,
        "admin_key": "k",
    }
    headers = {"Authorization": "Bearer k"}
    async with rig(1, 1, **options) as r, _client(authority) as client:
        async with client.get(f"https://127.0.0.1:{port}/workers", headers=headers) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientError):  # the key would be read on the way
            await r.client.get(f"http://127.0.0.1:{port}/workers", headers=headers)


@pytest.mark.parametrize(("certificate", "why"), [("x", "self-signed"), ("elsewhere", "mismatch")])
async def test_worker_that_is_not_who_it_should_be(
    authority: Path, certificate: str, why: str
) -> None:
    p = MockWorker("prefill", tls=_served(authority, "here"))
    d = MockWorker("decode", tls=_served(authority, certificate))
    async with workers(p, d):
        config = RouterConfig(
            prefill=(p.url,),
            decode=(d.url,),
            worker_ca=str(authority / "ca.pem"),
            worker_key="k",
            startup_timeout=0.2,
        )
        with pytest.raises(StartError, match=why):
            async with open_router(config):
                pass
    assert not d.gets  # nothing was said to it


@pytest.mark.parametrize(
    "options",
    [
        {"tls_cert": "missing.pem"},
        {"tls_key": "here.key"},
        {"tls_client_ca": "ca.pem"},
        {"tls_cert": "here.pem", "tls_key": "x.key"},
        {"worker_ca": "here.key"},
    ],
)
async def test_wrong_files_end_the_start(authority: Path, options: dict[str, str]) -> None:
    given = {name: str(authority / file) for name, file in options.items()}
    with pytest.raises(StartError):
        async with rig(1, 1, **given):
            pass
