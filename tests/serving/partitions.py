"""Partitions for tests: centroids that sit on given experts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from eldr.geometry import Geometry
from eldr.routing.partition import Partition


def save_partition(geometry: Geometry, experts: list[list[int]]) -> str:
    """A partition file with one centroid per list, uniform over these experts of every layer."""
    centroids = np.zeros((len(experts), geometry.layers, geometry.experts), np.float32)
    for row, chosen in enumerate(experts):
        centroids[row][:, chosen] = 1.0
        centroids[row] /= np.linalg.norm(centroids[row])
    partition = Partition(
        geometry,
        tuple(str(i) for i in range(len(experts))),
        centroids,
        np.ones((geometry.layers, geometry.experts), np.float32),
        np.ones(geometry.layers, np.bool_),
    )
    path = Path(tempfile.mkdtemp()) / "partition.safetensors"
    partition.save(path)
    return str(path)
