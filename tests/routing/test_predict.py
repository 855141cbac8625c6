"""Shrinkage, layer mask and step cost: each recovers what made the data."""

import dataclasses

import numpy as np
import pytest

from eldr.geometry import Geometry
from eldr.routing import Recorded, Shrinkage, StepCost, StepSample
from eldr.routing.activation import ActivationModel
from eldr.routing.fixed import P_ONE
from eldr.routing.layers import layer_mask
from eldr.routing.shrinkage import fit_shrinkage, prediction_error
from eldr.routing.step_fit import StepFit, prior
from eldr.signature import Signature
from tests.routing.helpers import SMALL, recorded


def with_decode(count=300, tokens=40, decoded=60, geometry=SMALL, seed=0, noise_layers=()):
    """Requests whose prompt and decode draw from the same taste, except in `noise_layers`."""
    rng = np.random.default_rng(seed)
    shape = (count, geometry.layers, geometry.experts)
    mean = rng.dirichlet(np.ones(geometry.experts), geometry.layers)
    taste = np.empty(shape)
    for layer in range(geometry.layers):
        taste[:, layer] = rng.dirichlet(20 * mean[layer] + 0.01, count)
    prompt, decode = np.empty(shape, np.uint32), np.empty(shape, np.uint32)
    for i in range(count):
        for layer in range(geometry.layers):
            p = taste[i, layer] if layer not in noise_layers else taste[rng.integers(count), layer]
            prompt[i, layer] = np.minimum(rng.multinomial(tokens * 2, p), tokens)
            decode[i, layer] = rng.multinomial(decoded * 2, taste[i, layer])
    return Recorded(
        prompt, np.full(count, tokens, np.int32), np.ones(count, np.float32), geometry,
        decode=decode,
    )  # fmt: skip


def test_fitted_shrinkage_predicts_better_than_its_controls():
    data = with_decode(tokens=10)
    fitted = fit_shrinkage(data)
    errors = prediction_error(data, fitted)
    assert errors["shrunk"] < min(errors["own"], errors["popularity"])
    # 20 pseudo-tokens of concentration, K = 2 hits a token: k is about 10.
    assert 4 < fitted.k / max(fitted.limit, 0.5) < 25


def test_without_decode_counts_moments_find_the_same_scale():
    data = with_decode(tokens=30)
    moments = fit_shrinkage(dataclasses.replace(data, decode=None))
    assert 3 < moments.k < 40
    assert moments.limit == 1.0


def test_requests_that_are_all_alike_are_shrunk_to_the_mean():
    one = recorded(1)
    alike = dataclasses.replace(
        one,
        counts=np.repeat(one.counts, 20, axis=0),
        tokens=np.repeat(one.tokens, 20),
        coverage=np.repeat(one.coverage, 20),
        labels=None,
    )
    assert fit_shrinkage(alike).k > 1000


def test_too_little_data_is_refused():
    with pytest.raises(ValueError, match="two requests"):
        fit_shrinkage(recorded(1))
    with pytest.raises(ValueError, match="decode"):
        prediction_error(recorded(4), Shrinkage())
    with pytest.raises(ValueError, match="decode"):
        layer_mask(recorded(4), np.ones((3, 16), np.float32))


@pytest.mark.parametrize(("k", "limit"), [(-1, 1), (float("inf"), 1), (1, 0), (1, 1.1)])
def test_bad_shrinkage(k, limit):
    with pytest.raises(ValueError, match="shrinkage"):
        Shrinkage(k, limit)


def test_activation_follows_its_formula():
    model = ActivationModel(SMALL, Shrinkage(8.0, 0.9))
    counts = np.zeros((3, 16), np.uint32)
    counts[:, 5] = 12
    got = model.admit(Signature(counts, 24))[0].reshape(3, 16) / P_ONE
    weight = 0.9 * 24 / 32
    assert got[0, 5] == pytest.approx(weight * 0.5 + (1 - weight) * 2 / 16, abs=2e-4)
    assert got[0, 0] == pytest.approx((1 - weight) * 2 / 16, abs=2e-4)


def test_the_mean_follows_the_requests_seen():
    model = ActivationModel(SMALL)
    counts = np.zeros((3, 16), np.uint32)
    counts[:, 5] = 1000
    for _ in range(64):
        model.admit(Signature(counts, 1000))
    mean = model.mean.reshape(3, 16)
    assert (mean[:, 5] > 0.95).all()
    assert mean[:, 0].max() < 0.01


def test_the_layer_mask_drops_layers_that_say_nothing():
    geometry = Geometry(4, 16, 2)
    data = with_decode(geometry=geometry, noise_layers=(1, 3), count=200)
    ones = np.ones((4, 16), np.float32)
    mask, rho = layer_mask(data, ones, pairs=1500)
    assert mask.tolist() == [True, False, True, False]
    assert 0.1 < rho <= 1


def samples(cost, count, seed=0, noise=0.02, spikes=0.0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        n, steps = float(rng.integers(4, 64)), int(rng.integers(20, 200))
        distinct = 96 * (1 - np.exp(-n / 20)) * rng.uniform(0.8, 1.2)
        kv = n * rng.uniform(500, 1500)
        seconds = cost.seconds(distinct, kv, n) * rng.normal(1, noise)
        if rng.random() < spikes:
            seconds *= 5
        yield StepSample(steps, seconds * steps, n * steps, distinct * steps, kv * steps)


TRUE = StepCost(base=4e-3, expert=9e-5, kv=3e-8, request=2e-5)


@pytest.mark.parametrize("spikes", [0.0, 0.15])
def test_the_step_cost_is_recovered_despite_slow_intervals(spikes):
    fit = StepFit(prior(48))
    for sample in samples(TRUE, 250, spikes=spikes):
        assert fit.add(sample)
    for n, distinct in ((5, 20), (20, 60), (60, 92)):
        assert fit.cost.seconds(distinct, 1000 * n, n) == pytest.approx(
            TRUE.seconds(distinct, 1000 * n, n), rel=0.1
        )


def test_the_start_is_safe():
    fit = StepFit(prior(48))
    for sample in samples(TRUE, 15):
        fit.add(sample)
    assert fit.cost == prior(48)  # too few to learn from
    alike = StepFit(prior(48))
    for _ in range(100):
        alike.add(StepSample(10, 0.1, 100.0, 500.0, 0.0))
    ratio = alike.cost.expert / alike.cost.base
    start = prior(48)
    assert 0.2 < ratio / (start.expert / start.base) < 5


def test_unusable_samples_are_counted_and_ignored():
    fit = StepFit(prior(48))
    for bad in (
        StepSample(0, 0.0, 0.0, 0.0),
        StepSample(5, float("nan"), 1.0, 1.0),
        StepSample(5, 1.0, -1.0, 1.0),
        StepSample(5, 1.0, 1.0, float("inf")),
        StepSample(5, 0.0, 1.0, 1.0),
    ):
        assert not fit.add(bad)
    assert fit.refused == 5
    assert fit.cost == prior(48)


def test_a_sampled_signature_is_trusted_as_a_prompt_of_its_sample():
    counts = np.zeros((3, 16), np.uint32)
    counts[:, 2] = 32
    model, short = ActivationModel(SMALL), ActivationModel(SMALL)
    sampled = Signature(counts, 4000, 1.0, sampled=32)
    np.testing.assert_array_equal(
        model.admit(sampled)[0], short.admit(Signature(counts, 32, 1.0))[0]
    )
    for _ in range(64):
        model.admit(sampled)
    assert model.mean.reshape(3, 16)[0, 2] == pytest.approx(1.0, abs=0.2)
