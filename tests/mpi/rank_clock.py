"""Clocks of ranks, set apart on purpose, are found to be so."""

from __future__ import annotations

import time

import pytest

from mpshard.comm.clock import clock_offset

RANKS = (1, 4)


def test_the_offset_is_found(comm):
    # Rank r's clock is r hours ahead. What is measured on top of that, on one machine, is at most half a round trip.
    offset, round_trip = clock_offset(comm, clock=lambda: time.perf_counter() + 3600.0 * comm.rank)
    assert offset == pytest.approx(-3600.0 * comm.rank, abs=round_trip / 2 + 1e-5)
