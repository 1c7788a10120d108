"""Packing: rows are full and hold whole documents, the same whatever the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpshard import config as cfg
from mpshard.config import ConfigError
from mpshard.data.packing import PackedBatches, pack
from mpshard.data.records import Document


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_document_once_and_no_row_too_full(lengths):
    rows = pack(lengths, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= 20 for row in rows)
    assert sum(sum(lengths[i] for i in row) <= 10 for row in rows) <= 1  # two of these would have shared a row


def documents(lengths, learn_from=1):
    """Document d has ids 100 d, 100 d + 1, ..."""
    return [Document(np.arange(100 * d, 100 * d + n, dtype=np.uint16), np.arange(n) >= learn_from) for d, n in enumerate(lengths)]


def test_a_row_holds_documents_side_by_side():
    batches = PackedBatches(documents([5, 3, 9, 2], learn_from=2), seq_len=8, vocab_size=1000)
    assert batches.n_samples == 2  # 8 and 4 + 2; the last document has nothing to learn
    rows = next(batches.eval_batches(0, 1, 3))
    np.testing.assert_array_equal(rows.inputs[0, 0], np.arange(200, 208))
    np.testing.assert_array_equal(rows.inputs[0, 1], [0, 1, 2, 3, 100, 101, 0, 0])
    np.testing.assert_array_equal(rows.targets[0, 1], [-100, 2, 3, 4, -100, 102, -100, -100])
    np.testing.assert_array_equal(rows.segments[0, 1], [0, 0, 0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(rows.positions[0, 1], [0, 1, 2, 3, 0, 1, 0, 1])
    assert (rows.targets[0, 2] == -100).all() and rows.segments.dtype == np.int32
    assert batches.about == "the data: 3 documents in 2 rows of 8, 88% full; 1 left out, nothing to learn in them"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_step_and_an_evaluation(world):
    batches = PackedBatches(documents([4 + i % 5 for i in range(40)]), seq_len=16, vocab_size=10000, seed=3)
    alone = batches.step_batch(6, 12, 2, 0, 1)
    parts = [batches.step_batch(6, 12, 2, rank, world) for rank in range(world)]
    for rank, part in enumerate(parts):
        for mine, whole in zip(part, alone, strict=True):
            np.testing.assert_array_equal(mine, whole[rank::world])
    ranks = [list(batches.eval_batches(rank, world, 2)) for rank in range(world)]
    assert len({len(of_rank) for of_rank in ranks}) == 1
    targets = [int(t) for of_rank in ranks for batch in of_rank for t in batch.targets.ravel() if t != -100]
    assert sorted(targets) == sorted(100 * d + i for d in range(40) for i in range(1, 4 + d % 5))


def test_long_documents_are_cut_and_wrong_ids_refused():
    batches = PackedBatches(documents([20]), seq_len=8, vocab_size=100)
    assert batches.about == "the data: 1 documents in 1 rows of 8, 100% full; 1 cut to fit"
    with pytest.raises(ConfigError, match="has id 19, outside the vocabulary of 19"):
        PackedBatches(documents([20]), seq_len=20, vocab_size=19)
    with pytest.raises(ConfigError, match="nothing to learn in 1 documents cut to data.seq_len=8; raise it"):
        PackedBatches(documents([20], learn_from=15), seq_len=8, vocab_size=100)


def test_formats_other_than_text_need_files():
    with pytest.raises(ConfigError, match="data.format=chat needs JSONL files in data.train and data.eval, not stdlib"):
        cfg.validate(cfg.load(None, ["data.format=chat"]), 1)
    with pytest.raises(ConfigError, match="data.chat_template=\"x\" has no effect with data.format=text"):
        cfg.validate(cfg.load(None, ["data.chat_template=x"]), 1)
