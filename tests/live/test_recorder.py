"""The store fails, and chat goes on: nothing is lost that can be kept, and nobody waits long."""

import sqlite3
import time
from contextlib import closing, contextmanager
from dataclasses import replace

import openai
import pytest
from live.gateway_harness import serving_stub, wait_for
from live_traffic import new_turn

from trl_openclaw.errors import StoreFullError
from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.gateway.metrics import Metrics
from trl_openclaw.live.gateway.recorder import Origin, Recorder
from trl_openclaw.live.store import Store


@contextmanager
def locked(path):
    """Another process, so to speak, that holds the store."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


class FullStore(Store):
    """A store on a disk that is full until somebody makes room."""

    full = False

    def _write(self):
        if self.full:
            raise StoreFullError("no room")
        return super()._write()


def test_a_locked_store_does_not_stop_chat(tmp_path, stub):
    store = Store(tmp_path / "store.db", busy_seconds=0.2)
    with serving_stub(tmp_path, stub, store=store) as gateway, gateway.client() as client:
        messages = [{"role": "user", "content": "one"}]
        with locked(tmp_path / "store.db"):
            for word in ("two", "three", "four"):
                started = time.monotonic()
                reply = client.chat.completions.create(model="stub", messages=messages)
                assert time.monotonic() - started < 3
                messages += [reply.choices[0].message.to_dict(), {"role": "user", "content": word}]
            wait_for(lambda: gateway.metric("store_failures_total"))
            assert gateway.metric("turns_waiting") >= 1
            health = gateway.health()
            assert health["status"] == "degraded"
            assert "in use by another process" in health["problems"]["store"]
            with pytest.raises(openai.InternalServerError):
                client.post("/feedback", body={"id": reply.id, "thumb": "up"}, cast_to=object)
        turns = wait_for(lambda: len(gateway.turns()) == 3 and gateway.turns(), what="the records")
        assert [turn.parent for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
        assert [turn.next_state and turn.next_state[0]["content"] for turn in turns] == ["two", "three", None]
        wait_for(lambda: gateway.metric("turns_waiting") == 0)
        assert gateway.health()["status"] == "ok"
        assert gateway.metric("turns_lost_total") == 0


def test_a_full_disk_does_not_stop_chat(tmp_path, stub, caplog):
    store = FullStore(tmp_path / "store.db")
    with serving_stub(tmp_path, stub, store=store) as gateway:
        gateway.ask("before")
        store.full = True
        started = time.monotonic()
        for place in range(20):
            assert gateway.ask(f"n{place}").choices[0].message.content == f"stub: n{place}"
        assert time.monotonic() - started < 20
        assert len(gateway.turns()) == 1
        store.full = False
        wait_for(lambda: len(gateway.turns()) == 21, what="the records")
    assert [turn.messages[0]["content"] for turn in gateway.turns()] == ["before", *(f"n{i}" for i in range(20))]
    assert caplog.text.count("The store cannot be written") == 1  # once in a while, not for each turn


def test_what_does_not_fit_into_memory_is_counted(tmp_path):
    store, metrics = FullStore(tmp_path / "store.db"), Metrics()
    store.full = True
    recorder = Recorder(store, metrics, max_waiting_bytes=1000)
    for place in range(10):
        origin = origin_of(f"turn{place}")
        recorder.begin(origin)
        recorder.finish(origin, lambda found, name=f"turn{place}": turn_of(name), 100).result(5)
    lost = metrics.registry.get_sample_value("openclaw_turns_lost_total")
    assert 0 < lost < 10
    store.full = False
    wait_for(lambda: len(list(store.all_turns())) == 10 - lost)
    recorder.close()


def test_a_request_that_did_not_fit_into_memory_is_matched_when_its_reply_does(tmp_path):
    store, metrics = FullStore(tmp_path / "store.db"), Metrics()
    recorder = Recorder(store, metrics, max_waiting_bytes=1000)
    one = turn_of("one")
    assert recorder.finish(origin_of("one"), lambda found: one, 1).result(5)
    store.full = True
    recorder.finish(origin_of("large"), lambda found: turn_of("large"), 850)
    following = {"role": "user", "content": "Go on."}
    origin = Origin("two", "default", [*one.messages, one.reply, following], None, None, 100)
    recorder.begin(origin)
    wait_for(lambda: recorder.problem)
    store.full = False
    wait_for(lambda: recorder.problem is None)
    two = new_turn(turn_id="two", messages=origin.messages)
    assert recorder.finish(origin, lambda found: replace(two, parent=found.parent), 1).result(5)
    recorder.close()
    turns = {turn.turn_id: turn for turn in store.all_turns()}
    assert turns["two"].parent == "one"
    assert turns["one"].next_state == [following]


def test_what_can_never_be_recorded_holds_up_nothing(tmp_path):
    store, metrics = Store(tmp_path / "store.db"), Metrics()
    recorder = Recorder(store, metrics)

    def broken(found):
        raise ValueError("no turn")

    assert recorder.finish(origin_of("one"), broken, 1).result(5) is False
    assert recorder.finish(origin_of("two"), lambda found: turn_of("two"), 1).result(5) is True
    recorder.close()
    assert [turn.turn_id for turn in store.all_turns()] == ["two"]
    assert metrics.registry.get_sample_value("openclaw_turns_lost_total") == 1


def test_the_end_writes_what_is_left(tmp_path):
    store, metrics = Store(tmp_path / "store.db"), Metrics()
    recorder = Recorder(store, metrics)
    for place in range(200):
        recorder.finish(origin_of(f"t{place}"), lambda found, name=f"t{place}": turn_of(name), 1)
    recorder.close()
    assert len(list(store.all_turns())) == 200
    assert recorder.finish(origin_of("late"), lambda found: turn_of("late"), 1).result(5) is False


def test_the_end_says_what_is_lost(tmp_path, caplog):
    store, metrics = FullStore(tmp_path / "store.db"), Metrics()
    recorder = Recorder(store, metrics)
    store.full = True
    recorder.finish(origin_of("one"), lambda found: turn_of("one"), 1).result(5)
    recorder.close()
    assert "1 turns could not be written before the end and are lost" in caplog.text


def test_what_is_answered_after_its_user_deleted_something_is_not_recorded(tmp_path, stub):
    with serving_stub(tmp_path, stub) as gateway, gateway.client() as client:
        first = gateway.ask("secret-zyx")
        reply = {"role": "assistant", "content": first.choices[0].message.content}
        history = [{"role": "user", "content": "secret-zyx"}, reply, {"role": "user", "content": "Slowly, please."}]
        stub.pause = 0.2
        stream = client.chat.completions.create(model="stub", messages=history, stream=True)
        next(stream)
        assert gateway.store.delete("default").turns == 1
        assert [piece.choices[0].finish_reason for piece in stream][-1] == "stop"
        assert gateway.turns() == []
        assert gateway.metric("turns_deleted_total") == 1
        stub.pause = 0
        again = gateway.ask("Something else.")
        assert [turn.turn_id for turn in gateway.turns()] == [again.id]
        gateway.store.close()
    assert [path for path in tmp_path.rglob("*") if path.is_file() and b"secret-zyx" in path.read_bytes()] == []


def test_what_waits_in_memory_is_dropped_once_its_user_deletes_something(tmp_path):
    store, metrics = FullStore(tmp_path / "store.db"), Metrics()
    people = Store(store.path)
    earlier, secret, said = (turn_of(name) for name in ("earlier", "secret", "said"))
    people.record_turn(earlier, turn_hashes(earlier.messages, earlier.reply))
    recorder = Recorder(store, metrics)
    conversation = [*earlier.messages, dict(earlier.reply), *secret.messages, dict(secret.reply), *said.messages]
    secret = replace(secret, messages=conversation[:3], parent="earlier")
    people.record_turn(secret, turn_hashes(secret.messages, secret.reply))
    store.full = True
    for name, owner, messages in (("hers", "ann", said.messages), ("his", "default", conversation)):
        origin = Origin(name, owner, messages, None, None, 100)
        recorder.begin(origin)
        turn = new_turn(turn_id=name, user=owner, messages=messages)
        assert recorder.finish(origin, lambda found, turn=turn: turn, 1).result(5) is False
    people.delete("default", turn_id="secret")
    store.full = False
    recorder.close()
    # The history that waited would say of the first turn what followed it, which was deleted.
    assert {turn.turn_id: turn.next_state for turn in store.all_turns()} == {"earlier": None, "hers": None}
    lost, deleted = (metrics.registry.get_sample_value(f"openclaw_turns_{what}_total") for what in ("lost", "deleted"))
    assert (lost, deleted) == (0, 1)


def origin_of(name):
    return Origin(name, "default", [{"role": "user", "content": name}], None, None, 100)


def turn_of(name):
    return new_turn(turn_id=name, messages=[{"role": "user", "content": name}])
