"""The time model of weights between pools."""

import pytest

from simulation.mux_sync import Links


def test_parts_cross_side_by_side_and_pools_of_one_node_broadcast_for_nothing() -> None:
    links = Links(stream=1e9, among_nodes=2e9, in_node=1e12)
    assert links.flat(8e9) == 8
    assert links.in_parts(8e9, 8, 8) == pytest.approx(1.008)
    assert links.in_parts(8e9, 4, 8) == pytest.approx(2.008)
    assert links.in_parts(8e9, 16, 16) == 0.5 + 4
    assert links.in_parts(8e9, 16, 16, overlaps=True) == 4  # the slower of the two
    assert links.in_parts(8e9, 1, 16, overlaps=True) == 8
