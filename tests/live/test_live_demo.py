"""The demo that learns while it talks: its user, its judge, its processes and its summary."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
from learner_harness import open_store, record
from live.gateway_harness import serving_stub, wait_for
from tiny import tiny_llama, tiny_tokenizer

from recipes.live_demo.__main__ import (
    check,
    held_out_numbers,
    is_enough,
    main,
    make_parser,
    read_questions,
    summarize,
    talk,
)
from recipes.live_demo.person import Person, Session
from recipes.live_demo.reactions import read_reaction
from recipes.live_demo.services import ROOT, Service, ServiceError, gateway
from trl_openclaw import PERSONAS, NextState, Persona, RuleJudge, Turn

ON_SECOND_TRY = Persona(
    "second", "Wants to be told twice.", lambda turn: len(turn.prompt) > 1, ("Say it again, please.",), ("Perfect.",)
)
NEVER = Persona("never", "Is never content.", lambda turn: False, ("Say it again, please.",))


def told(text: str) -> Turn:
    return Turn([{"role": "user", "content": "Q"}], [{"role": "assistant", "content": "A"}], NextState(text))


def talked(running, persona, question="Why?", side=False):
    async def talk():
        async with running.async_client() as client:
            person = Person(client, "stub", persona, 2)
            return await (person.ask if side else person.talk)(question)

    return asyncio.run(talk())


def all_told(running, number):
    """All turns, as soon as the first so many have a next state: a person leaves when the last answer begins, which may
    be before what it said is written down."""

    def told():
        return [turn.next_state is not None for turn in running.turns()[:number]] == [True] * number

    wait_for(told, what="every next state")
    return running.turns()


@pytest.mark.parametrize("name", PERSONAS)
def test_the_judge_tells_every_thanks_from_every_complaint(name):
    persona = PERSONAS[name]
    assert all(read_reaction(told(text)) == 1 for text in persona.thanks)
    for wish in persona.wishes:
        for found in ((), ("that's long",)):
            assert read_reaction(told(persona._complain(found, wish, told(wish)))) == (-1, wish)
    assert read_reaction(told("That makes no sense.")) == (-1, "That makes no sense.")


class TestPerson:
    def test_a_reply_that_pleases_is_thanked_for_and_a_complaint_is_its_next_state(self, stub, tmp_path):
        with serving_stub(tmp_path, stub, judge=RuleJudge(read_reaction)) as running:
            session = talked(running, ON_SECOND_TRY)
            first, second, *rest = all_told(running, 2)
        assert session.satisfied == [False, True]
        assert not session.first_satisfied
        assert session.turn_ids == [first.turn_id, second.turn_id]
        assert session.replies == [first.reply["content"], second.reply["content"]]
        assert session.errors == []
        assert "again" in first.next_state[0]["content"]
        assert second.next_state[0]["content"] == "Perfect."
        assert second.parent == first.turn_id
        assert len(rest) <= 1  # the last answer, which was not waited for

    def test_a_person_gives_up(self, gateway):
        session = talked(gateway, NEVER)
        assert session.satisfied == [False, False]
        all_told(gateway, 2)

    def test_held_out_questions_are_side_traffic(self, gateway):
        session = talked(gateway, NEVER, side=True)
        assert len(session.replies) == 1
        assert [turn.kind for turn in gateway.turns()] == ["side"]

    def test_an_error_is_counted_and_ends_the_session(self, gateway, stub):
        stub.trouble = lambda request: "fails"
        session = talked(gateway, NEVER)
        assert len(session.errors) == 1
        assert session.replies == []


def test_the_person_takes_a_break_while_there_is_enough_to_learn_from():
    asked, looks = [], iter([False, True, True, False, False])

    class Someone:
        async def talk(self, question):
            asked.append(question)
            return Session(question, ["A"], [True])

    class Learner:
        @property
        def running(self):
            return len(asked) < 3

    def enough():
        found = next(looks)
        seen.append((found, len(asked)))
        return found

    seen, talked = [], []
    asyncio.run(talk(Someone(), iter("abcdef"), Learner(), enough, talked))
    assert asked == ["a", "b", "c"]
    assert [session.question for session in talked] == asked
    assert seen == [(False, 0), (True, 1), (True, 1), (False, 1), (False, 2)]


def test_enough_are_the_turns_of_an_update(tmp_path):
    store, model = open_store(tmp_path), tiny_llama()
    record(store, range(15), model=model)
    assert not is_enough(store)
    record(store, range(15, 16), model=model)
    assert is_enough(store)


class TestSummary:
    def test_numbers(self, gateway, tmp_path):
        session = talked(gateway, ON_SECOND_TRY)
        lost = Session("Q", ["A"], [True], ["chatcmpl-" + "0" * 32], ["APIError: down"])
        found = summarize([session], [session, lost], [], tmp_path)
        assert found["first_replies_satisfied"] == [0, 1]
        assert found["updates"] == 0
        assert found["lost_turns"] == 1
        assert found["errors"] == 1
        gateway.store.add_version("default", "v000001", "base", "somewhere")
        assert summarize([], [], [], tmp_path)["updates"] == 0
        gateway.store.publish("default", "v000001")
        assert summarize([], [], [], tmp_path)["updates"] == 1

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"lost_turns": 2}, "2 replies are not in the store"),
            ({"errors": 1}, "1 requests failed"),
            ({"updates": 0}, "no version"),
        ],
    )
    def test_what_went_wrong_is_said_and_ends_the_demo_with_an_error(self, changed, said):
        fine = {"updates": 1, "lost_turns": 0, "errors": 0}
        check(fine)
        with pytest.raises(SystemExit, match=said):
            check({**fine, **changed})

    @pytest.mark.parametrize(
        ("satisfied", "sessions"),
        [("", None), ("11", None), ("111", 3), ("0111", 4), ("110110", None), ("1101110", 6), ("011", None)],
    )
    def test_sessions_until_three_in_a_row(self, satisfied, sessions):
        found = held_out_numbers([Session("Q", ["A"], [mark == "1"]) for mark in satisfied])
        assert found["sessions_until_three_in_a_row"] == sessions
        assert found["satisfied"] == satisfied.count("1")

    def test_questions_are_the_demo_s_and_apart(self):
        assert len(read_questions("train")) == 48
        assert not set(read_questions("train")) & set(read_questions("test"))
        assert make_parser().parse_args([]).held_out <= len(read_questions("test"))


class TestServices:
    def test_last_words_of_a_service_that_ends(self, tmp_path):
        service = Service("learner", [sys.executable, "-c", "raise SystemExit('no room')"], tmp_path)
        with pytest.raises(ServiceError, match="no room"):
            service.wait_for("ready")
        with pytest.raises(ServiceError, match="code 1"):
            service.check()

    def test_one_that_will_not_end_is_made_to(self, tmp_path, monkeypatch):
        monkeypatch.setattr("recipes.live_demo.services._STOP_SECONDS", 0.5)
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(99)"
        service = Service("gateway", [sys.executable, "-c", code], tmp_path)
        service.wait_for("up")
        service.stop()
        assert not service.running

    def test_the_gateway_s_settings_are_those_there_are(self, tmp_path):
        with (
            pytest.raises(ServiceError, match="nowhere"),
            gateway(tmp_path / "nowhere", "m", tmp_path, max_tokens=8, temperature=0.5),
        ):
            pass


def test_nothing_of_something_is_refused(monkeypatch, capsys, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("something")
    monkeypatch.setattr(
        sys, "argv", ["live_demo", "--replies", "0", "--model", str(tmp_path), "--folder", str(tmp_path)]
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--replies must be at least 1" in capsys.readouterr().err
    assert kept.exists()


def test_asked_to_end_it_ends_its_processes(tmp_path):
    folder = tmp_path / "model"
    tiny_llama(max_position_embeddings=4096).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    demo = subprocess.Popen(
        [sys.executable, "-m", "recipes.live_demo", "--model", str(folder), "--folder", str(tmp_path / "live")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a script starts it in the background
    )  # fmt: skip
    log = tmp_path / "live" / "learner.log"
    wait_for(lambda: log.exists() and "Learning from" in log.read_text(), seconds=240, what="the learner")
    started = psutil.Process(demo.pid).children(recursive=True)
    assert len(started) >= 3  # the gateway, the launcher, and the learner itself
    demo.terminate()
    complaints = demo.communicate(timeout=120)[1]
    assert demo.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in complaints
    psutil.wait_procs(started, timeout=60)
    assert not [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
