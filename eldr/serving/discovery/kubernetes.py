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

from eldr.serving.discovery import Member
from eldr.serving.endpoints import Role
from eldr.serving.errors import StartError

log = logging.getLogger(__name__)

PORT, RANKS = "eldr.ai/port", "eldr.ai/ranks"


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
    """Asks the API server for the pods at an interval; a failed question changes nothing."""

    def __init__(self, api: Any, selectors: PodSelectors, interval: float) -> None:
        self._api = api
        self._selectors = selectors
        self._interval = interval

    async def watch(self) -> AsyncIterator[frozenset[Member]]:
        """The members, whenever they differ from before."""
        last: frozenset[Member] | None = None
        while True:
            try:
                now = await asyncio.to_thread(self.members)
                if now != last:
                    last = now
                    yield now
            except Exception as error:  # the official client raises many kinds
                log.warning("kubernetes: %s; the workers stay as they are", error)
            await asyncio.sleep(self._interval)

    def members(self) -> frozenset[Member]:
        """The members that the API server knows now; blocks."""
        chosen = self._selectors
        found: set[Member] = set()
        roles: tuple[tuple[Role, str], ...] = (
            ("prefill", chosen.prefill),
            ("decode", chosen.decode),
        )
        for role, selector in roles:
            pods = self._api.list_namespaced_pod(chosen.namespace, label_selector=selector)
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
    url = f"http://{host}:{port}"
    return [Member(role, url)] if ranks <= 1 else [Member(role, url, r) for r in range(ranks)]


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
    return client.CoreV1Api()
