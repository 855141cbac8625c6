"""What a CUDA API call can do to the host, by its name; version suffixes do not count."""

from __future__ import annotations

import re

# Calls during which the host waits for the device. Freeing memory waits for all of it.
_WAITS = {
    "cudaDeviceSynchronize",
    "cudaThreadSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cudaFree",
    "cudaFreeHost",
    "cuMemFree",
    "cuMemFreeHost",
}
_SUFFIX = re.compile(r"(_v\d+)?(_pt(sz|ds))?(_v\d+)?$")
_COPY = re.compile(r"(cudaMemcpy|cuMemcpy)")
_LAUNCH = re.compile(r"(cudaLaunch|cuLaunch|cudaGraphLaunch|cuGraphLaunch)")


def plain(name: str) -> str:
    """`cudaMemcpyAsync_v3020` and `cudaMemcpyAsync_ptsz` are both `cudaMemcpyAsync`."""
    return _SUFFIX.sub("", name)


def waits(name: str) -> bool:
    """Whether the host stops until the device has caught up.

    A copy that is not Async waits too, and so does one whose kind the call leaves open.
    """
    base = plain(name)
    return base in _WAITS or (_COPY.match(base) is not None and "Async" not in base)


def launches(name: str) -> bool:
    """Whether the call enqueues kernels, alone or as a graph."""
    return _LAUNCH.match(name) is not None


def launches_graph(name: str) -> bool:
    """Whether the call replays a CUDA graph."""
    return plain(name) in ("cudaGraphLaunch", "cuGraphLaunch")
