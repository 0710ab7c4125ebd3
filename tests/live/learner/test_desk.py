"""What the learner makes of a store that an earlier one left in the middle of something; checkpoints and the lock."""

import json
import multiprocessing
import os
import signal

import pytest
from learner_harness import USER, make_turn, open_store
from tiny import tiny_llama

from trl_openclaw.errors import LearnerError
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.learner.checkpoints import MARKER, Progress, last_checkpoint, mark_whole, read_progress
from trl_openclaw.live.learner.desk import LEFT_BEHIND, OVERTAKEN, Desk, GoTo, LiveBatch, Waiting, same_model
from trl_openclaw.live.learner.folders import adapters_of, lock_of, user_name
from trl_openclaw.live.learner.lock import only_learner
from trl_openclaw.live.learner.rollouts import LiveTurn
from trl_openclaw.types import Verdict, Vote


@pytest.fixture(scope="module")
def turns():
    """Turns as the gateway would record them."""
    model = tiny_llama()
    return [make_turn(number, model) for number in range(8)]


@pytest.fixture
def store(tmp_path, turns):
    """A store with eight ready turns."""
    store = open_store(tmp_path)
    for turn in turns:
        store.record_turn(turn, turn_hashes(turn.messages, turn.reply))
        store.add_verdict(turn.turn_id, Verdict.from_votes([Vote(score=-1)]))
    return store


@pytest.fixture
def desk(store):
    return Desk(store, USER, 4, 4, "tiny")


def usable(turn):
    return LiveTurn(turn, turn.messages)


def events(store) -> dict[str, list[str]]:
    return {version.version: [event.event for event in version.events] for version in store.versions(USER)}


def test_it_waits_then_claims_the_oldest_turns(store, desk, turns):
    found = desk.next("base", usable)
    assert isinstance(found, LiveBatch)
    assert [one.turn.turn_id for one in found.turns] == [turn.turn_id for turn in turns[:4]]
    assert desk.open == found.batch_id
    desk.release()
    assert (desk.open, store.open_batches(USER)) == (None, [])
    few = Desk(store, USER, 9, 4, "tiny")
    assert few.next("base", usable) == Waiting(8)


def test_a_version_that_somebody_published_comes_first(store, desk):
    store.add_version(USER, "v000001", "base", "/somewhere")
    store.publish(USER, "v000001")
    assert desk.next("base", usable) == GoTo("v000001", "/somewhere")
    assert isinstance(desk.next("v000001", usable), LiveBatch)
    desk.release()
    store.roll_back(USER)
    assert desk.next("v000001", usable) == GoTo("base", None)


def published(store, version, parent, error=None):
    store.add_version(USER, version, parent, f"/{version}")
    store.publish(USER, version)
    if error is not None:
        store.add_version_event(USER, version, "load_failed", {"error": error})


def test_it_goes_back_from_what_the_engine_refused_and_ends_at_the_second_in_a_row(store, desk):
    published(store, "v000001", "base")
    published(store, "v000002", "v000001", "rank 64 is too large")
    assert desk.next("v000002", usable) == GoTo("v000001", "/v000001", "rank 64 is too large")
    assert isinstance(desk.next("v000001", usable), LiveBatch)
    desk.release()
    published(store, "v000003", "v000001", "rank 65 is too large")
    with pytest.raises(LearnerError, match=r"two versions in a row .* 'v000003' \(rank 65 is too large\)"):
        desk.next("v000003", usable)


def test_versions_that_the_engine_refused_now_and_then_do_not_end_it(store, desk):
    published(store, "v000001", "base", "its folder is gone")
    assert desk.next("v000001", usable).version == "base"
    published(store, "v000002", "base")
    published(store, "v000003", "v000002", "its folder is gone")
    assert desk.next("v000003", usable).version == "v000002"
    store.publish(USER, "base")
    assert desk.next("v000002", usable) == GoTo("base", None)
    published(store, "v000004", "base", "its folder is gone")
    assert desk.next("v000004", usable).version == "base"


def test_turns_that_cannot_be_read_are_set_aside_and_the_others_claimed_again(store, desk, turns):
    bad = {turns[1].turn_id: "too_long", turns[2].turn_id: "other_template"}

    def read(turn):
        return bad.get(turn.turn_id) or usable(turn)

    assert desk.next("base", read) == Waiting(None)
    assert store.set_aside_counts(USER) == {"other_template": 1, "too_long": 1}
    found = desk.next("base", read)
    assert [one.turn.turn_id for one in found.turns] == [turns[i].turn_id for i in (0, 3, 4, 5)]


def test_long_turns_alone_do_not_stop_it(store, desk):
    assert desk.next("base", lambda turn: "too_long") == Waiting(None)
    assert store.set_aside_counts(USER) == {"too_long": 4}


def test_batches_in_the_weights_are_trained_and_others_are_free(store, desk):
    first, second = store.claim(USER, 4, 4), store.claim(USER, 4, 4)
    assert desk.reconcile(Progress("v000001", {first.batch_id: "v000001"})) == 1
    assert [store.show(USER, turn.turn_id).state for turn in first.turns] == ["trained"] * 4
    assert [store.show(USER, turn.turn_id).state for turn in second.turns] == ["ready"] * 4


@pytest.mark.parametrize(
    ("progress", "published", "expected"),
    [
        (Progress("v000002"), "v000001", ["checked", "published"]),  # it passed: the marker says so
        (Progress("v000001"), "v000001", ["checked", "rejected"]),  # killed before its checkpoint
        (Progress("v000002"), None, ["checked", "rejected"]),  # somebody went back meanwhile
    ],
)
def test_a_version_that_was_left_behind(store, desk, progress, published, expected):
    store.add_version(USER, "v000001", "base", "/1")
    store.publish(USER, "v000001")
    store.add_version(USER, "v000002", "v000001", "/2")
    store.add_version_event(USER, "v000002", "checked")
    if published is None:
        store.roll_back(USER)
    desk.reconcile(progress)
    desk.reconcile(progress)  # once more changes nothing
    assert events(store)["v000002"] == expected
    if expected[-1] == "rejected":
        reason = OVERTAKEN if published is None else LEFT_BEHIND
        assert store.versions(USER)[1].events[-1].detail == {"reason": reason}
    assert store.published_version(USER) == ("v000002" if expected[-1] == "published" else published or "base")


def test_a_roll_back_in_the_last_moment_is_not_overwritten(store, desk, monkeypatch):
    store.add_version(USER, "v000001", "base", "/1")
    store.publish(USER, "v000001")
    store.add_version(USER, "v000002", "v000001", "/2")
    publish = store.publish

    def meanwhile(*args, **kwargs):
        store.roll_back(USER)
        return publish(*args, **kwargs)

    monkeypatch.setattr(store, "publish", meanwhile)
    desk.reconcile(Progress("v000002"))
    assert store.published_version(USER) == "base"
    assert events(store)["v000002"] == ["rejected"]


# Checkpoints


def test_the_last_whole_checkpoint_counts_and_unfinished_ones_go(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (2, 9, 10, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    mark_whole(tmp_path / "checkpoint-9", Progress("v000001", {"a": "v000001"}), USER)
    mark_whole(tmp_path / "checkpoint-10", Progress("v000002", {"a": "v000001", "b": "v000002"}), USER)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9", "checkpoint-x"]
    assert read_progress(tmp_path / "checkpoint-10", USER) == Progress("v000002", {"a": "v000001", "b": "v000002"})
    assert read_progress(None, USER) == Progress("base", {})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": "v000001"}'])
def test_a_marker_that_cannot_be_read_is_not_taken_for_nothing(tmp_path, text):
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(LearnerError, match="it says what was trained"):
        read_progress(tmp_path, USER)


def test_a_checkpoint_of_another_user_is_refused(tmp_path):
    mark_whole(tmp_path, Progress("v000001", {}), "ada")
    with pytest.raises(
        LearnerError, match=r"is of user 'ada', not of 'default': each needs an `output_dir` of its own"
    ):
        read_progress(tmp_path, USER)


def test_what_is_remembered_is_limited(monkeypatch):
    monkeypatch.setattr("trl_openclaw.live.learner.checkpoints.BATCHES_TO_REMEMBER", 3)
    progress = Progress()
    for number in range(5):
        progress = progress.after(f"batch {number}", f"v{number}")
    assert progress == Progress("v4", {"batch 2": "v2", "batch 3": "v3", "batch 4": "v4"})
    assert json.dumps(dict(progress.batches))


# The lock, names


def hold(path, ready) -> None:
    with only_learner(path, USER):
        ready.set()
        signal.pause()


def test_the_lock_is_free_when_its_holder_is_killed(tmp_path):
    path = lock_of(tmp_path, USER)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=hold, args=(path, ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(LearnerError, match=rf"\(process {holder.pid}\)"), only_learner(path, USER):
        pass
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with only_learner(path, USER):
        assert path.read_text() == str(os.getpid())


def test_users_have_folders_of_their_own(tmp_path):
    names = ["ann", "a/b", "..", ".", "A", "a b", "ä", "a%2Fb"]
    assert len({user_name(name) for name in names}) == len(names)
    for name in names:
        assert adapters_of(tmp_path, name).resolve().parent == tmp_path / "adapters"


def test_models_are_told_apart(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert same_model("Qwen/Qwen3-4B", "Qwen/Qwen3-4B")
    assert same_model("model", str(tmp_path / "model"))
    assert not same_model("model", "other")
    assert not same_model("Qwen/Qwen3-4B", "Qwen/Qwen3-8B")


def test_who_has_turns_where_this_user_has_none(store, desk, turns):
    assert desk.other_users() == []
    stranger = Desk(store, "ann", 4, 1, "model")
    assert stranger.other_users() == [desk.user]
