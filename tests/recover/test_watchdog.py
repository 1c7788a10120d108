"""What the watchdog says, from places on the board; the thread itself is tested with ranks in tests/cluster."""

from __future__ import annotations

import pytest

from mpshard.recover.watchdog import Place, describe, read, sentence, write
from mpshard.shard.schedule import Forward, Gather, Step


def place(rank: int, done: int, what: str, waits: bool = True, step: int = 12, host: str = "") -> Place:
    return Place(rank, host or f"h{rank // 4}", step, done, what, waits)


def test_whoever_is_behind_comes_first() -> None:
    places = [place(r, 40, "Reduce layers.5") for r in range(8) if r != 3] + [place(3, 31, "Forward layers.4", waits=False)]
    assert sentence(places, 8) == "rank 3 (h0) is at step 12, Forward layers.4; 7 others wait in Reduce layers.5"


@pytest.mark.parametrize(("places", "world", "words"), [
    ([place(0, 9, "Gather head"), place(1, 9, "Gather head", host="h9")], 2,
     "all ranks wait at step 12, Gather head; none is behind, so what lies between them does not work"),
    ([place(0, 9, "Gather head"), place(2, 9, "Gather head")], 3,
     "rank 1 did not answer (stopped, dead or cut off); 2 others wait at step 12, Gather head"),
    ([place(0, 9, "Gather head", step=13), place(1, 8, "the update", waits=False)], 2,
     "rank 1 (h0) is at step 12, the update; 1 other waits at step 13, Gather head"),
    ([place(1, 8, "Forward head", waits=False), place(4, 8, "Forward head", waits=False), place(0, 9, "Gather head")], 5,
     "ranks 2, 3 did not answer (stopped, dead or cut off); 2 others are at step 12, Forward head; 1 other waits in Gather head"),
    ([place(0, 1, "the start", waits=False, step=0)], 1, "rank 0 (h0) is at the start"),
])
def test_sentences(places: list[Place], world: int, words: str) -> None:
    assert sentence(places, world) == words


def test_instructions_in_words() -> None:
    assert describe(Gather("layers.4")) == "Gather layers.4"
    assert describe(Forward("layers.4", 1)) == "Forward layers.4, micro-batch 1"
    assert describe(Step()) == "Step"


def test_the_board_keeps_places(tmp_path) -> None:
    found = {r: Place(r, "h", 3, r, "Gather x", True, "File ...\n") for r in range(3)}
    for each in found.values():
        write(tmp_path, each)
    (tmp_path / "rank-00009.partial").write_text("{")
    assert read(tmp_path) == found
