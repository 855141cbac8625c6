"""The geometry and its digest."""

import pytest

from eldr.geometry import Geometry, find


def test_the_digest_is_part_of_the_wire_format():
    # Two releases of ELDR must agree on it: a change here breaks running fleets.
    assert Geometry(4, 64, 4).digest == "a69450ec8c9eee06"


def test_every_dimension_is_in_the_digest():
    shapes = [(4, 64, 4), (5, 64, 4), (4, 65, 4), (4, 64, 5), (46, 4, 4)]
    assert len({Geometry(*shape).digest for shape in shapes}) == len(shapes)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((0, 64, 4), "layers must be a positive integer, got 0"),
        ((4, -1, 4), "experts must be a positive integer, got -1"),
        ((4, 64, 2.0), "top_k must be a positive integer, got 2.0"),
        ((True, 64, 4), "layers must be a positive integer, got True"),
        ((4, 8, 9), "top_k = 9 exceeds the number of experts 8"),
    ],
)
def test_impossible_shapes_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        Geometry(*shape)


@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 64, 4), (48, 128, 8), (58, 256, 8), (26, 64, 6)])
def test_a_digest_and_the_cells_name_the_geometry(shape):
    geometry = Geometry(*shape)
    assert find(geometry.digest, geometry.cells) == geometry
    assert find(geometry.digest, geometry.cells + 1) is None
    assert find("0" * 16, geometry.cells) is None
