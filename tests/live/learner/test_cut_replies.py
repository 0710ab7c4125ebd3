"""Replies that ended at the length limit are trained or set aside, as the trainer's own setting says."""

import pytest
from learner_harness import USER, make_learner, open_store, record, states


@pytest.mark.parametrize("masked", [False, True])
def test_a_reply_that_was_cut(tmp_path, masked):
    store = open_store(tmp_path)
    whole, cut = record(store, range(3)), record(store, [4], finish_reason="length")
    later = record(store, [5])
    make_learner(tmp_path, max_updates=1, mask_truncated_completions=masked).train()
    assert states(store, whole) == ["trained"] * 3
    assert states(store, [*cut, *later]) == (["unusable", "trained"] if masked else ["trained", "ready"])
    assert store.set_aside_counts(USER) == ({"cut": 1} if masked else {})
