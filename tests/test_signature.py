"""The wire form: lossless for every count, and strict about everything else."""

import base64
import json
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given

import eldr.signature
from eldr.geometry import Geometry
from eldr.signature import FORMS, Signature, SignatureError, cells_of, decode, encode

SMALL = Geometry(2, 5, 2)
LARGE = Geometry(48, 512, 8)


@pytest.fixture(params=["native", "numpy"], autouse=True, scope="module")
def backend(request):
    """Every test with the native loops and without them."""
    before = eldr.signature.native
    if request.param == "native" and before is None:
        pytest.skip("eldr._native is not built")
    eldr.signature.native = before if request.param == "native" else None
    yield
    eldr.signature.native = before


def signature(geometry: Geometry, tokens: int, seed: int = 0, coverage: float = 1.0) -> Signature:
    """`tokens` tokens that pick distinct experts at random, as a router does."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((geometry.layers, geometry.experts), np.uint32)
    for layer in range(geometry.layers):
        for _ in range(tokens):
            counts[layer, rng.choice(geometry.experts, geometry.top_k, replace=False)] += 1
    return Signature(counts, tokens, coverage)


@given(
    st.builds(
        Geometry, st.integers(1, 4), st.integers(3, 70), st.integers(1, 3)
    ).flatmap(lambda g: st.tuples(st.just(g), st.integers(1, 400), st.floats(0, 1)))
)  # fmt: skip
def test_survives_json_for_any_geometry(drawn):
    geometry, tokens, coverage = drawn
    sent = signature(geometry, min(tokens, 40), seed=tokens, coverage=coverage)
    got = decode(json.loads(json.dumps(encode(sent, geometry))), geometry)
    assert np.array_equal(got.counts, sent.counts)
    assert got.counts.dtype == np.uint32
    assert (got.tokens, got.coverage) == (sent.tokens, sent.coverage)


ALL = Geometry(2, 5, 5)  # whose tokens choose every expert


@pytest.mark.parametrize(
    ("peak", "version", "encoding"),
    [
        (255, 1, "u8"),
        (256, 1, "u16"),
        (65_535, 1, "u16"),
        (65_536, 1, "u32"),
        (2**31 - 1, 1, "u32"),
    ],
)
def test_the_smallest_width_that_holds_the_counts(peak, version, encoding):
    payload, got = through(Signature(np.full((2, 5), peak, np.uint32), peak), ALL)
    assert (payload["v"], payload["counts"]["encoding"]) == (version, encoding)
    assert (got.counts == peak).all()


@pytest.mark.parametrize("peak", [256, 65_535, 65_536, 2**31 - 1])
def test_few_large_counts_spill_over_their_bytes(peak):
    counts = np.zeros((2, 5), np.uint32)
    counts[1, 3], counts[0, 0] = peak, 254
    payload, got = through(Signature(counts, peak), SMALL)
    assert (payload["v"], payload["counts"]["encoding"]) == (2, "spill8")
    assert len(base64.b64decode(payload["counts"]["data"])) == SMALL.cells + 4
    assert np.array_equal(got.counts, counts)
    assert cells_of(payload) == SMALL.cells


@given(
    st.lists(st.sampled_from([0, 1, 254, 255, 256, 300, 65_535, 2**20, 2**31 - 1]), min_size=10,
             max_size=10)
)  # fmt: skip
def test_any_mix_of_counts_is_read_as_it_was(values):
    sent = Signature(np.array(values, np.uint32).reshape(2, 5), 2**31 - 1)
    payload, got = through(sent, ALL)
    assert np.array_equal(got.counts, sent.counts)
    assert cells_of(payload) == ALL.cells


def _with(**changes):
    return {**encode(signature(SMALL, 9), SMALL), **changes}


def _counts(encoding, raw):
    return {"encoding": encoding, "data": base64.b64encode(raw).decode()}


def _spilled(low, *over, **changes):
    """Ten counts of one byte, and the rest of some of them."""
    raw = bytes(low) + np.array(over, "<u4").tobytes()
    return {**_with(v=2, tokens=2**31 - 1, counts=_counts("spill8", raw)), **changes}


@pytest.mark.parametrize(
    "payload",
    [
        _spilled([255] + [0] * 9),  # the rest of it is missing
        _spilled([255] * 2 + [0] * 8, 1),
        _spilled([254] + [0] * 9, 1),  # nobody's rest
        _spilled([255] + [0] * 9, 1, 1),
        _spilled([255] + [0] * 9, 2**32 - 255),  # beyond 32 bits
        _spilled([255] + [0] * 9, 2**31 - 255),  # more than there are tokens
        _spilled([255] + [0] * 9, 1, tokens=255),
        _spilled([255] + [0] * 9, 1, v=1),
        _spilled([0] * 9),
        _spilled([0] * 9 + [255]),
        _spilled([], *range(400)),
    ],
)
def test_what_spills_over_must_fit(payload):
    with pytest.raises(SignatureError) as refused:
        decode(payload, SMALL)
    assert refused.value.reason == "malformed"


def test_a_rest_may_be_nothing():
    assert decode(_spilled([255] + [0] * 9, 0), SMALL).counts[0, 0] == 255


def test_large_counts_are_deflated_and_small_ones_are_not():
    payload = encode(signature(LARGE, 20), LARGE)
    assert payload["counts"]["encoding"] == "u8+deflate"
    assert len(payload["counts"]["data"]) < LARGE.cells
    assert encode(signature(SMALL, 20), SMALL)["counts"]["encoding"] == "u8"


def test_counts_of_another_shape_are_not_sent():
    with pytest.raises(ValueError, match=r"expected shape \[L, E\] .* got \(2, 4\)"):
        encode(Signature(np.zeros((2, 4), np.uint32), 1), SMALL)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (None, "malformed"),
        ([], "malformed"),
        ("eldr", "malformed"),
        ({}, "version"),
        (_with(v=3), "version"),
        (_with(v=True), "version"),
        (_with(v="1"), "version"),
        (_with(geometry=Geometry(2, 5, 1).digest), "geometry"),
        (_with(geometry=None), "geometry"),
        (_with(tokens=0), "malformed"),
        (_with(tokens=-3), "malformed"),
        (_with(tokens=1.5), "malformed"),
        (_with(tokens=True), "malformed"),
        (_with(tokens=2**31), "malformed"),
        (_with(tokens=1), "malformed"),  # 18 hits per layer, but one token makes 2
        (_with(coverage=float("nan")), "malformed"),
        (_with(coverage=float("inf")), "malformed"),
        (_with(coverage=-0.1), "malformed"),
        (_with(coverage=1.1), "malformed"),
        (_with(coverage=None), "malformed"),
        (_with(coverage=True), "malformed"),
        (_with(counts=None), "malformed"),
        (_with(counts=[1, 2]), "malformed"),
        (_with(counts={"encoding": "u8"}), "malformed"),
        (_with(counts={"encoding": 8, "data": ""}), "malformed"),
        (_with(counts=_counts("f32", bytes(40))), "malformed"),
        (_with(counts=_counts("+deflate", bytes(10))), "malformed"),
        (_with(counts=_counts("u8", bytes(9))), "malformed"),
        (_with(counts=_counts("u8", bytes(11))), "malformed"),
        (_with(counts=_counts("u8", bytes(10_000))), "malformed"),
        (_with(counts=_counts("u16", bytes(10))), "malformed"),
        (_with(counts={"encoding": "u8", "data": "!" * 16}), "malformed"),
        (_with(counts={"encoding": "u8", "data": "é" * 16}), "malformed"),
        (_with(counts=_counts("u8+deflate", bytes(10))), "malformed"),
        (_with(counts=_counts("u8+deflate", zlib.compress(bytes(10))[:-3])), "malformed"),
        (_with(counts=_counts("u8+deflate", zlib.compress(bytes(10)) + b"x")), "malformed"),
        (_with(counts=_counts("u8+deflate", zlib.compress(bytes(11)))), "malformed"),
        (_with(counts=_counts("u8+deflate", zlib.compress(bytes(50_000)))), "malformed"),
    ],
)
def test_anything_else_is_refused_with_its_reason(payload, reason):
    with pytest.raises(SignatureError) as refused:
        decode(payload, SMALL)
    assert refused.value.reason == reason
    assert str(refused.value).startswith("signature: ")


def test_partial_coverage_may_hold_fewer_hits():
    whole = signature(SMALL, 8)
    part = Signature(signature(SMALL, 2).counts, whole.tokens, 0.25)
    assert decode(encode(part, SMALL), SMALL).coverage == 0.25


@example(bytes(10), "==", 12, 2)  # three characters of padding and more
@given(
    st.binary(max_size=40),
    st.sampled_from(["", "=", "A", "==", "!", "\n", "-", "é", "\ud800"]),
    st.integers(0, 60),
    st.integers(0, 2),
)
def test_both_ways_to_undo_base64_accept_the_same(raw, put, at, drop):
    text = base64.b64encode(raw).decode()
    text = text[:at] + put + text[at + drop :]
    assert _undone(text) == _undone(text, native=None)
    if not put and not drop:
        assert _undone(text) == raw


def _undone(text, **native):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in native.items():
            patch.setattr(eldr.signature, name, value)
        try:
            return eldr.signature._unbase64(text)
        except ValueError:
            return None


def crowded(tokens, seed=0, geometry=LARGE):
    """Counts of a long prompt, each layer's hits spread unevenly over its experts."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(geometry.experts, 0.1), geometry.layers)
    hits = np.stack([rng.multinomial(tokens * geometry.top_k, p) for p in share])
    return Signature(np.minimum(hits, tokens).astype(np.uint32), tokens)


def through(sent, geometry, **options):
    payload = json.loads(json.dumps(encode(sent, geometry, **options)))
    return payload, decode(payload, geometry)


@given(
    st.integers(1, 5000), st.integers(0, 2**32), st.integers(1, 300), st.floats(0.01, 1.0),
    st.sampled_from([Geometry(2, 5, 2), Geometry(3, 70, 4)]),
)  # fmt: skip
def test_every_form_of_every_count_is_read_and_close(tokens, seed, sample, coverage, geometry):
    rng = np.random.default_rng(seed)
    covered = max(1, int(tokens * coverage))
    share = rng.dirichlet(np.full(geometry.experts, 0.3), geometry.layers)
    hits = np.stack([rng.multinomial(covered * geometry.top_k, p) for p in share])
    sent = Signature(np.minimum(hits, covered).astype(np.uint32), tokens, covered / tokens)
    _, got = through(sent, geometry, form="8bit")
    peak = int(sent.counts.max())
    step = 2 * np.sqrt(sent.counts * np.float64(peak)) / 255 + peak / 255**2 + 0.5
    assert (got.counts <= sent.counts).all()
    assert (sent.counts - got.counts.astype(np.int64) <= np.where(peak > 255, step, 0)).all()
    payload, got = through(sent, geometry, form="sampled", sample=sample)
    if covered <= sample:
        assert payload == encode(sent, geometry)
        assert got.sampled is None
        return
    assert (payload["v"], got.sampled, got.covered) == (2, sample, sample)
    total = sent.counts.sum(axis=1, dtype=np.int64)[:, None]
    taken = total * sample // covered
    assert (got.counts.sum(axis=1) == taken[:, 0]).all()
    assert (np.abs(got.counts - sent.counts * taken / total) < 1).all()


def test_smaller_forms_are_smaller():
    sent = crowded(6000)
    sizes = {f: len(through(sent, LARGE, form=f)[0]["counts"]["data"]) for f in FORMS}
    assert sizes["8bit"] < 0.8 * sizes["exact"]
    assert sizes["sampled"] < sizes["8bit"]


def test_a_form_that_saves_nothing_is_exact():
    sent = signature(SMALL, 100)
    assert {json.dumps(encode(sent, SMALL, form=f)) for f in FORMS} == {
        json.dumps(encode(sent, SMALL))
    }
    empty = Signature(np.zeros((2, 5), np.uint32), 500)
    assert through(empty, SMALL, form="sampled")[1].counts.sum() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"form": "4bit"}, "form '4bit'"), ({"form": "sampled", "sample": 0}, "sample 0")],
)
def test_unknown_forms_are_not_sent(options, message):
    with pytest.raises(ValueError, match=message):
        encode(signature(SMALL, 9), SMALL, **options)
    with pytest.raises(ValueError, match="counts are a sample"):
        encode(Signature(np.zeros((2, 5), np.uint32), 9, 1.0, 3), SMALL)


def _lossy(form, **changes):
    payload = encode(crowded(900, geometry=SMALL), SMALL, form=form, sample=64)
    assert payload["v"] == 2
    field = {**payload["counts"], **changes}
    return {**payload, "counts": {k: v for k, v in field.items() if v is not None}}


@pytest.mark.parametrize(
    "payload",
    [
        _lossy("8bit", peak=0),
        _lossy("8bit", peak=901),
        _lossy("8bit", peak=True),
        _lossy("8bit", peak=200.0),
        _lossy("8bit", peak=None),
        _lossy("8bit", encoding="u8"),
        _lossy("8bit", sample=64),
        _lossy("8bit", data="AAAA"),
        _lossy("8bit", encoding="root8+deflate"),
        _lossy("8bit", encoding="root16"),
        _lossy("8bit", data=base64.b64encode(bytes([255] * 10)).decode()),  # 10 times the peak
        _lossy("sampled", sample=0),
        _lossy("sampled", sample=901),
        _lossy("sampled", sample="64"),
        _lossy("sampled", sample=8),  # more hits than 8 tokens make
        _lossy("sampled", encoding="root8"),
        {**_lossy("8bit"), "counts": None},
        {**_lossy("8bit"), "v": 1},
        {**_lossy("8bit"), "tokens": 100},
    ],
)
def test_malformed_smaller_forms_are_refused(payload):
    with pytest.raises(SignatureError) as refused:
        decode(payload, SMALL)
    assert refused.value.reason == "malformed"


def test_both_ways_to_read_agree_on_smaller_forms(monkeypatch):
    for form in FORMS:
        payload, got = through(crowded(5000), LARGE, form=form)
        with monkeypatch.context() as patch:
            patch.setattr("eldr.signature.native", None)
            assert np.array_equal(decode(payload, LARGE).counts, got.counts)
