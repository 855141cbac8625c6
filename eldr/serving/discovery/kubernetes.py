"""Workers as Kubernetes pods, found by labels (extra `eldr[k8s]`).

A pod is a member while it is Running, Ready and not being deleted; the port and the number of
data-parallel ranks come from annotations `eldr.ai/port` and `eldr.ai/ranks`, or from the defaults.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from eldr.serving.config import ConfigError
from eldr.serving.discovery import Member
from eldr.serving.endpoints import Role, worker_url
from eldr.serving.errors import StartError

log = logging.getLogger(__name__)

PORT, RANKS = "eldr.ai/port", "eldr.ai/ranks"
# To connect to the API server, and to wait for its answer.
_SECONDS = (3.0, 5.0)
_LONGEST_LINE = 500


@dataclass(frozen=True, slots=True)
class PodSelectors:
    """Which pods are workers.

    Attributes:
        namespace: where to look.
        prefill: label selector of prefill pods, e.g. `app=model,role=prefill`.
        decode: label selector of decode pods.
        port: port of pods without the annotation.
    """

    namespace: str
    prefill: str
    decode: str
    port: int


class KubernetesSource:
    """Asks the API server for the pods at an interval; a failed question changes nothing.

    Failures are reported once, until it answers again.
    """

    def __init__(self, api: Any, selectors: PodSelectors, interval: float) -> None:
        self._api = api
        self._selectors = selectors
        self._interval = interval

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """The members, whenever they differ from before."""
        last: frozenset[Member] | None = None
        failing = False
        while True:
            try:
                now = await asyncio.to_thread(self.members)
            except Exception as error:  # the official client raises many kinds
                if not failing:
                    log.warning("kubernetes: %s; the workers stay as they are", _line(error))
                failing = True
            else:
                if failing:
                    log.info("kubernetes: the API server answers again")
                failing = False
                if now != last:
                    last = now
                    yield now
            await asyncio.sleep(self._interval)

    async def first(self, limit: float) -> frozenset[Member]:
        """The members, as soon as there is one of each role.

        Raises:
            StartError: there was none within `limit` seconds; the last reason.
        """
        loop = asyncio.get_running_loop()
        end, told = loop.time() + limit, ""
        while True:
            try:
                now = await asyncio.to_thread(self.members)
                missing = [r for r in ("prefill", "decode") if all(m.role != r for m in now)]
                if not missing:
                    return now
                why = f"no {' and no '.join(missing)} pod is ready"
            except Exception as error:  # the official client raises many kinds
                why = _line(error)
            if loop.time() >= end:
                raise StartError(
                    f"kubernetes: {why} after {limit:g} s. Check the selectors, and that the "
                    "service account may list pods, or raise --startup-timeout."
                )
            if why != told:
                told = why
                log.info("kubernetes: %s; waiting", why)
            await asyncio.sleep(min(self._interval, max(0.0, end - loop.time())))

    def members(self) -> frozenset[Member]:
        """The members that the API server knows now; blocks."""
        chosen = self._selectors
        found: set[Member] = set()
        roles: tuple[tuple[Role, str], ...] = (
            ("prefill", chosen.prefill),
            ("decode", chosen.decode),
        )
        for role, selector in roles:
            pods = self._api.list_namespaced_pod(
                chosen.namespace, label_selector=selector, _request_timeout=_SECONDS
            )
            for pod in pods.items:
                found.update(_members(role, pod, chosen.port))
        return frozenset(found)


def _members(role: Role, pod: Any, port: int) -> list[Member]:
    if not _ready(pod):
        return []
    notes = pod.metadata.annotations or {}
    try:
        port, ranks = int(notes.get(PORT, port)), int(notes.get(RANKS, 1))
    except ValueError:
        log.warning("pod %s: %s and %s must be numbers", pod.metadata.name, PORT, RANKS)
        return []
    host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
    try:
        url = str(worker_url(f"http://{host}:{port}"))
    except ConfigError as error:
        log.warning("pod %s: %s", pod.metadata.name, error)
        return []
    return [Member(role, url)] if ranks <= 1 else [Member(role, url, r) for r in range(ranks)]


def _line(error: Exception) -> str:
    """What the client says, in one line."""
    status, said = getattr(error, "status", None), f"{type(error).__name__}: {error}"
    if status is not None:  # its text has the answer's headers in it
        said = f"HTTP {status} {getattr(error, 'reason', '')}: {getattr(error, 'body', '')}"
    return " ".join(said.split())[:_LONGEST_LINE]


def _ready(pod: Any) -> bool:
    status = pod.status
    if pod.metadata.deletion_timestamp is not None or not status.pod_ip:
        return False
    ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or [])
    return bool(status.phase == "Running" and ready)


def connect() -> Any:
    """The API client of this pod, or of the user's kubeconfig.

    Raises:
        StartError: the client is not installed, or there is no cluster.
    """
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise StartError("Kubernetes discovery needs `pip install eldr[k8s]`") from error
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            config.load_kube_config()
        except config.ConfigException as error:
            raise StartError(f"no Kubernetes cluster: {error}") from error
    settings = client.Configuration.get_default_copy()
    settings.retries = False  # it is asked again anyway, and a stop must not wait for it
    return client.CoreV1Api(client.ApiClient(settings))
