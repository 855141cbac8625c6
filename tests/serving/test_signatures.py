"""Reading a signature never costs a request."""

import logging

import orjson

from eldr.geometry import Geometry
from eldr.routing import Reason
from eldr.serving import signatures
from eldr.serving.signatures import read_signature

GEOMETRY = Geometry(2, 8, 2)


def test_a_fault_of_ours_is_a_reason_not_an_error(monkeypatch, caplog):
    def broken(*_):
        raise TypeError("a bug")

    monkeypatch.setattr(signatures, "decode", broken)
    with caplog.at_level(logging.ERROR):
        found = read_signature(orjson.dumps({"v": 1}), GEOMETRY)
    assert found == (None, Reason.POLICY_ERROR)
    assert "a bug" in caplog.text


def test_what_nobody_sent_or_reads_has_no_reason():
    assert read_signature(None, GEOMETRY) == (None, None)
    assert read_signature(b"{", None) == (None, None)
    assert read_signature(b"{", GEOMETRY) == (None, Reason.MALFORMED)
