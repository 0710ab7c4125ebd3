"""What people take back while it is learned from: what followed a turn, a hint, a correction, a thumb."""

from pathlib import Path

import pytest
import torch
from learner_harness import USER, make_learner, make_turn, open_store, record, states
from tiny import tiny_llama

from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.learner.desk import WITHDRAWN, Desk, LiveBatch
from trl_openclaw.live.learner.rollouts import LiveTurn
from trl_openclaw.live.learner.snapshot import trained_tensors
from trl_openclaw.types import Verdict, Vote

JUDGED = Verdict.from_votes([Vote(score=-1, hint="Be brief.")])


def complaint(store, turn_id):
    """The turn whose request told what followed another one."""
    first = store.show(USER, turn_id)
    turn = make_turn(9, tiny_llama(), messages=[*first.messages, first.reply, *first.next_state], parent=turn_id)
    store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    return turn.turn_id


def deletes_what_followed(store, turn_id):
    store.delete(USER, turn_id=complaint(store, turn_id))


def thumb(score, correction=None, key="later"):
    def say(store, turn_id):
        assert store.add_feedback(USER, turn_id, score, correction, key)

    return say


TAKEN_BACK = {
    "what followed is deleted": deletes_what_followed,
    "hint edited": lambda store, turn_id: store.edit_hint(USER, turn_id, ["Be kind."]),
    "hint removed": lambda store, turn_id: store.edit_hint(USER, turn_id, []),
    "corrected": thumb(-1, "In two words."),
    "thumb against the judge": thumb(1),
}


@pytest.mark.parametrize("moment", ["training_step", "_save_checkpoint"])
@pytest.mark.parametrize("how", ["what followed is deleted", "hint removed"])
def test_what_is_taken_back_during_a_step_is_in_no_version(tmp_path, how, moment):
    store = open_store(tmp_path)
    ids = record(store, range(4))
    learner = make_learner(tmp_path, max_updates=1, token_preferences=True)
    before = {name: tensor.clone() for name, tensor in learner.initial_weights.items()}
    step, done = getattr(learner, moment), []

    def taking_back(*args, **kwargs):
        if not done:
            done.append(True)
            learner.stopping = True
            TAKEN_BACK[how](store, ids[1])
        return step(*args, **kwargs)

    setattr(learner, moment, taking_back)
    learner.train()
    assert list(Path(learner.args.output_dir).glob("checkpoint-*")) == []
    (version,) = store.versions(USER)
    assert (version.events[-1].event, version.events[-1].detail) == ("rejected", {"reason": WITHDRAWN})
    assert not Path(version.path).exists()
    assert store.published_version(USER) == "base"
    assert learner.progress.batches == {}
    for name, tensor in trained_tensors(learner).items():
        assert torch.equal(tensor, before[name]), name
    deleted = how == "what followed is deleted"
    assert states(store, ids) == ["ready", "open" if deleted else "ready", "ready", "ready"]
    assert [store.token_scores(turn_id) is None for turn_id in ids] == [False, deleted, False, False]


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


def claimed(store, **fields):
    """A turn of a batch at hand, and what tells whether it is taken back."""
    (turn_id,) = record(store, [0], **fields)
    return turn_id, *at_hand(store)


def at_hand(store):
    desk = Desk(store, USER, 1, 4, "tiny")
    batch = desk.next("base", lambda turn: LiveTurn(turn, turn.messages))
    assert isinstance(batch, LiveBatch)
    return desk, batch


@pytest.mark.parametrize("how", TAKEN_BACK)
def test_what_takes_something_back(store, how):
    turn_id, desk, batch = claimed(store)
    assert not desk.withdrawn(batch)
    TAKEN_BACK[how](store, turn_id)
    assert desk.withdrawn(batch)


def test_a_correction_that_is_withdrawn(store):
    (turn_id,) = record(store, [0], hints=())
    thumb(-1, "In two words.", "first")(store, turn_id)
    desk, batch = at_hand(store)
    assert batch.turns[0].turn.verdict.hints == ("In two words.",)
    thumb(-1)(store, turn_id)
    assert desk.withdrawn(batch)


def test_what_followed_is_missed_also_where_a_thumb_is_left(store):
    (turn_id,) = record(store, [0], hints=())
    thumb(-1, "In two words.", "first")(store, turn_id)
    desk, batch = at_hand(store)
    deletes_what_followed(store, turn_id)
    assert store.show(USER, turn_id).verdict.hints == ("In two words.",)
    assert desk.withdrawn(batch)


def another_tells_the_same(store, turn_id):
    complaint_id = complaint(store, turn_id)
    first = store.show(USER, turn_id)
    said = [{**message, "content": f" {message['content']}  "} for message in first.next_state]
    again = make_turn(8, tiny_llama(), messages=[*first.messages, first.reply, *said], parent=turn_id)
    after = make_turn(
        7,
        tiny_llama(),
        messages=[*again.messages, again.reply, {"role": "user", "content": "Ok."}],
        parent=again.turn_id,
    )
    for turn in (again, after):
        store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    store.delete(USER, turn_id=complaint_id)
    assert store.show(USER, turn_id).next_state == said


@pytest.mark.parametrize(
    "happens",
    [
        lambda store, turn_id: store.add_verdict(turn_id, JUDGED),
        lambda store, turn_id: store.edit_hint(USER, turn_id, ["Be brief."]),
        thumb(-1),
        lambda store, turn_id: complaint(store, turn_id),
        another_tells_the_same,
    ],
    ids=["the same verdict", "the same hint", "a thumb that agrees", "a later turn", "told by another"],
)
def test_what_takes_nothing_back(store, happens):
    turn_id, desk, batch = claimed(store)
    happens(store, turn_id)
    assert not desk.withdrawn(batch)


def test_what_a_judge_adds_takes_nothing_back(store):
    (turn_id,) = record(store, [0], hints=(), score=None)
    thumb(-1)(store, turn_id)
    desk, batch = at_hand(store)
    assert batch.turns[0].turn.verdict.hints == ()
    store.add_verdict(turn_id, JUDGED)
    assert store.show(USER, turn_id).verdict.hints == ("Be brief.",)
    assert not desk.withdrawn(batch)
    desk.release()
    (turn_id,) = record(store, [1], hints=(), score=None)
    store.edit_hint(USER, turn_id, ["Be kind."])
    store.set_aside([one.turn.turn_id for one in batch.turns], "cut")
    desk, batch = at_hand(store)
    assert batch.turns[0].turn.verdict.score is None
    store.add_verdict(turn_id, JUDGED)
    assert store.show(USER, turn_id).verdict.score == -1
    assert not desk.withdrawn(batch)


def test_what_follows_a_turn_that_a_thumb_alone_made_ready_takes_nothing_back(store):
    turn = make_turn(0, tiny_llama())
    store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
    thumb(-1)(store, turn.turn_id)
    desk, batch = at_hand(store)
    assert store.add_next_state(turn.turn_id, [{"role": "user", "content": "No."}])
    assert not desk.withdrawn(batch)
