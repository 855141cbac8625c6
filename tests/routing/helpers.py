"""Synthetic signatures with domains, for the routing tests."""

import numpy as np

from eldr.geometry import Geometry
from eldr.routing import Partition, Recorded, RouteRequest, fixed
from eldr.signature import Signature

SMALL = Geometry(3, 16, 2)


def signatures(count, geometry=SMALL, domains=4, seed=0, tokens=(20, 120)):
    """Signatures and their labels; each domain prefers its own experts in every layer."""
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(geometry.experts, 0.3), (domains, geometry.layers))
    made, labels = [], []
    for i in range(count):
        domain = i % domains
        length = int(rng.integers(*tokens))
        hits = np.stack([rng.multinomial(length * geometry.top_k, p) for p in taste[domain]])
        made.append(Signature(np.minimum(hits, length).astype(np.uint32), length))
        labels.append(f"domain-{domain}")
    return made, labels


def recorded(count, geometry=SMALL, **options):
    """The same as a recorded file's content."""
    made, labels = signatures(count, geometry, **options)
    return Recorded(
        np.stack([s.counts for s in made]).astype(np.uint16),
        np.array([s.tokens for s in made], np.int32),
        np.ones(count, np.float32),
        geometry,
        "test-model",
        np.array(labels),
    )


def axis_partition(names, geometry=SMALL):
    """Worker i's centroid is expert i of every layer, alone."""
    centroids = np.zeros((len(names), geometry.layers, geometry.experts), np.float32)
    for i in range(len(names)):
        centroids[i, :, i] = 1 / np.sqrt(geometry.layers)
    ones = np.ones((geometry.layers, geometry.experts), np.float32)
    return Partition(geometry, tuple(names), centroids, ones, np.ones(geometry.layers, np.bool_))


def only(expert, geometry=SMALL, tokens=50):
    """A signature whose hits all go to one expert (and its right neighbour, for top-2)."""
    counts = np.zeros((geometry.layers, geometry.experts), np.uint32)
    counts[:, expert] = tokens
    return Signature(counts, tokens)


def request(i, signature=None, **options):
    return RouteRequest(f"r{i}", signature, **options)


def admitted(counts, scale, mean, keep):
    """Whether a request holds a hit, its activation, its costs, and its counts added to zero."""
    x, step, total = (np.zeros(counts.size, t) for t in (np.int16, np.uint16, np.uint32))
    return fixed.admit(counts, scale, mean, keep, x, step, total), x, step, total
