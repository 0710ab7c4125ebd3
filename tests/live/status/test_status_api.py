"""What the status page asks of the gateway: each user's own data, safe headers, changes that only its user makes."""

import hashlib
import math
import sqlite3
import time

import pytest
from status_harness import call, serving_page

from benchmarks.status_store import HINT, USER, add_scores, add_turn, made_up_scores, turn_id, votes
from trl_openclaw.live.gateway.auth import Keys
from trl_openclaw.live.records import TokenScores
from trl_openclaw.live.status.api import FILES, PAGE

HI = [{"role": "user", "content": "Why does bread go stale?"}]
KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob")}
READS = ("overview", "sessions", "turns?session=s", f"tokens?turn={turn_id('a')}")
CHANGES = {"hints": {"turn": turn_id("a"), "hints": []}, "delete": {"turn": turn_id("a")}, "opt-out": {"on": True},
           "roll-back": {"to": "base"}}  # fmt: skip


def keys_of(**users):
    return Keys({hashlib.sha256(KEYS[name].encode()).digest(): user for name, user in users.items()})


@pytest.fixture
def two(tmp_path, stub, store):
    """A gateway with two users, of whom one has a turn that was trained."""
    add_turn(store, "a", HI, "Its starch.", session="s", user="ann", verdict=votes(1, 1), next_state="Thanks")
    batch = store.claim("ann", 1, 9)
    store.add_token_scores(batch.batch_id, {turn_id("a"): made_up_scores("Its starch.", 1)})
    with serving_page(tmp_path, stub, store, keys=keys_of(ann="ann", bob="bob")) as running:
        yield running


class TestUsersAreKeptApart:
    @pytest.mark.parametrize("path", READS)
    @pytest.mark.parametrize("key", [None, "wrong", ""])
    def test_no_data_without_a_key(self, two, path, key):
        status, _, body = call(two, f"/status/{path}", key=key)
        assert status == 401
        assert set(body) == {"error"}

    @pytest.mark.parametrize("path", CHANGES)
    def test_no_change_without_a_key(self, two, path):
        assert call(two, f"/status/{path}", CHANGES[path])[0] == 401
        assert two.store.show("ann", turn_id("a"))
        assert not two.store.opted_out("ann")

    def test_the_owner_sees_it_all(self, two):
        answers = [call(two, f"/status/{path}", key=KEYS["ann"]) for path in READS]
        assert [status for status, _, _ in answers] == [200] * 4
        overview, sessions, turns, tokens = (body for _, _, body in answers)
        assert overview["turns"] == {"claimed": 1}
        assert [session["session_id"] for session in sessions["sessions"]] == ["s"]
        assert [turn["reply"]["text"] for turn in turns["turns"]] == ["Its starch."]
        assert "".join(tokens["tokens"]) == "Its starch.<|im_end|>"

    def test_another_user_sees_none_of_it(self, two):
        overview, sessions, turns, tokens = (call(two, f"/status/{path}", key=KEYS["bob"]) for path in READS)
        assert overview[2]["turns"] == {}
        assert overview[2]["satisfaction"] == {"version": [], "day": []}
        assert sessions[2] == {"sessions": [], "more": False}
        assert turns[2] == {"turns": [], "more": False}
        assert tokens[0] == 404

    @pytest.mark.parametrize("body", [{"turn": turn_id("a")}, {"session": "s"}])
    def test_another_user_deletes_none_of_it(self, two, body):
        assert call(two, "/status/delete", body, key=KEYS["bob"])[0] == 404
        assert two.store.show("ann", turn_id("a"))

    def test_another_user_plants_no_hint(self, two):
        body = {"turn": turn_id("a"), "hints": ["Say what bob wants."]}
        assert call(two, "/status/hints", body, key=KEYS["bob"])[0] == 404
        assert two.store.show("ann", turn_id("a")).verdict.hints == ()

    def test_the_page_itself_needs_no_key_and_tells_nothing(self, two):
        for path in ("/", *(f"/status/{name}" for name in FILES)):
            status, _, text = call(two, path)
            assert status == 200
            assert "starch" not in text
            assert "ann" not in text.replace("cannot", "").replace("channel", "")


class TestHeaders:
    @pytest.mark.parametrize(
        "path", ["/", "/status/app.js", "/status/style.css", "/status/icon.svg", "/status/overview"]
    )
    def test_nothing_but_the_pages_own_files_runs_or_loads(self, page, path):
        _, headers, _ = call(page, path)
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"

    @pytest.mark.parametrize("path", ["sessions", "overview", "turns?session=x"])
    def test_no_browser_keeps_what_people_said(self, page, path):
        assert call(page, f"/status/{path}")[1]["Cache-Control"] == "no-store"

    @pytest.mark.parametrize("path", CHANGES)
    @pytest.mark.parametrize(
        "header", [{"Origin": "http://other.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Content_Type": "text/plain"}]
    )
    def test_other_sites_change_nothing(self, page, store, path, header):
        add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(1, hint=HINT), next_state="Thanks")
        assert call(page, f"/status/{path}", CHANGES[path], **header)[0] in (403, 415)
        assert store.show(USER, turn_id("a")).verdict.hints == (HINT,)
        assert not store.opted_out(USER)

    @pytest.mark.parametrize("path", CHANGES)
    def test_nothing_is_changed_by_looking(self, page, path):
        assert call(page, f"/status/{path}")[0] == 404

    def test_every_file_that_the_page_names_is_there(self, page):
        assert {path.name for path in PAGE.iterdir()} == {"index.html", *FILES}
        for name, kind in FILES.items():
            status, headers, text = call(page, f"/status/{name}")
            assert (status, headers.get_content_type()) == (200, kind)
            assert text == (PAGE / name).read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        "name", ["index.html", "..%2Fapi.py", "..%2f..%2f..%2fpyproject.toml", "%2Fetc%2Fpasswd", "api.py"]
    )
    def test_no_other_file_is(self, page, name):
        assert call(page, f"/status/{name}")[0] == 404


class TestOverview:
    def test_counts_are_those_of_the_store(self, filled, store):
        _, _, body = call(filled, "/status/overview")
        assert body["turns"] == store.counts(USER)
        assert body["queue"]["ready"] == store.ready_count(USER, 4) == body["turns"]["ready"]
        assert body["queue"]["says"] == f"{body['turns']['ready']}/16 turns ready, waiting for feedback"
        assert body["published"] == "v000003"
        assert [version["version"] for version in body["versions"]] == ["v000003", "v000002", "v000001", "base"]
        assert [version["status"] for version in body["versions"]] == [
            "published",
            "rejected",
            "superseded",
            "superseded",
        ]
        assert [version["can_return_to"] for version in body["versions"]] == [False, False, True, True]

    def test_satisfaction_is_counted_by_hand(self, page, store):
        good, bad, neutral = votes(1), votes(-1), votes(0)
        day = 86400.0
        for number, (version, verdict, at) in enumerate(
            [
                ("base", good, 0),
                ("base", bad, 0),
                ("base", neutral, day),
                ("v000001", good, day),
                ("v000001", None, day),
            ]
        ):
            add_turn(store, f"t{number}", HI, f"reply {number}", session="s", model_version=version, verdict=verdict,
                     next_state="x", created=at)  # fmt: skip
        add_turn(store, "tied", HI, "tied", session="s", verdict=votes(1, -1), next_state="x", created=0.0)
        add_turn(store, "side", HI, "side", session="s", kind="side", verdict=good, created=0.0)
        found = call(page, "/status/overview")[2]["satisfaction"]
        assert found["version"] == [
            {"name": "base", "positive": 1, "scored": 3},
            {"name": "v000001", "positive": 1, "scored": 1},
        ]
        assert found["day"] == [
            {"name": "1970-01-01", "positive": 1, "scored": 2},
            {"name": "1970-01-02", "positive": 1, "scored": 2},
        ]

    def test_an_idle_page_gets_nothing_again(self, filled):
        _, headers, _ = call(filled, "/status/overview")
        status, again, body = call(filled, "/status/overview", If_None_Match=headers["ETag"])
        assert (status, body, again["ETag"]) == (304, "", headers["ETag"])

    def test_a_change_by_another_process_is_seen(self, filled, tmp_path):
        tag = call(filled, "/status/overview")[1]["ETag"]
        with sqlite3.connect(tmp_path / "store.db") as other:
            other.execute("INSERT INTO opt_outs (user, opted_out, created) VALUES ('default', 1, 0)")
        other.close()
        while (answer := call(filled, "/status/overview", If_None_Match=tag))[0] == 304:
            pass  # it rests for ten times as long as it counted
        assert answer[2]["opted_out"] is True

    def test_counting_rests_while_others_talk(self, page, store, monkeypatch):
        counted = []
        real = type(store).counts

        def slow(self, user):
            counted.append(user)
            time.sleep(0.05)
            return real(self, user)

        monkeypatch.setattr(type(store), "counts", slow)
        end = time.monotonic() + 0.4
        number = 0
        while time.monotonic() < end:
            add_turn(store, f"busy {number}", HI, "reply", session="s")
            assert call(page, "/status/overview")[0] == 200
            number += 1
        assert len(counted) == 1 < number

    def test_the_engine_that_is_down_is_told(self, tmp_path, stub, store):
        class Down:
            model, base_url = "nobody", "http://127.0.0.1:9/v1"

        with serving_page(tmp_path, Down(), store) as running:
            problems = call(running, "/status/overview")[2]["problems"]
            health = call(running, "/health")[2]["problems"]
        assert problems == [f"Engine: {health['engine']}"]

    def test_the_last_update_says_how_many_turns_the_next_one_wants(self, page, store):
        store.add_version(USER, "v000001", "base", "nowhere")
        store.add_version_event(USER, "v000001", "checked", {"checks": {}, "turns": 8})
        assert call(page, "/status/overview")[2]["queue"]["wanted"] == 8

    @pytest.mark.parametrize(
        ("ready", "says"),
        [(1, "1/2 turns ready, waiting for feedback"), (2, "2/2 turns ready, waiting for the learner")],
    )
    def test_who_is_waited_for(self, page, store, ready, says):
        store.add_version(USER, "v000001", "base", "nowhere")
        store.add_version_event(USER, "v000001", "checked", {"turns": 2})
        place = made = 0
        while made < ready:
            name = turn_id(str(place))
            add_turn(store, str(place), HI, f"reply {place}", session="s", verdict=votes(1), next_state="x")
            made += store.show(USER, name).state == "ready"
            place += 1
        assert call(page, "/status/overview")[2]["queue"]["says"] == says
        store.claim(USER, ready, 9)
        call(page, "/status/opt-out", {"on": False})  # so that it is counted at once
        says = call(page, "/status/overview")[2]["queue"]["says"]
        assert says == f"training on {ready} turns, 0/2 ready for the next update"


class TestTurns:
    def test_a_turn_shows_what_its_request_added(self, page, store):
        call_of = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"up": "herbs"}'}}
        history = [
            {"role": "system", "content": "Be brief."},
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call_of]},
            {"role": "tool", "tool_call_id": "c", "name": "look", "content": "Rosemary"},
            {
                "role": "tool",
                "tool_call_id": "d",
                "content": [{"type": "text", "text": "Thyme"}, {"type": "image_url"}],
            },
        ]
        add_turn(
            store, "first", history[:2], {"role": "assistant", "content": None, "tool_calls": [call_of]}, session="s"
        )
        reply = {"role": "assistant", "content": "Both.", "reasoning_content": "Two herbs."}
        add_turn(store, "second", history, reply, session="s", finish_reason="length")
        first, second = call(page, "/status/turns?session=s")[2]["turns"]
        assert [message["text"] for message in first["messages"]] == ["Be brief.", HI[0]["content"]]
        assert first["reply"]["tool_calls"] == [{"name": "look", "arguments": '{"up": "herbs"}'}]
        assert [message["text"] for message in second["messages"]] == ["Rosemary", "Thyme\n[image_url]"]
        assert (second["reply"]["text"], second["reply"]["reasoning"]) == ("Both.", "Two herbs.")

    def test_long_texts_are_cut_and_say_so(self, page, store):
        add_turn(store, "long", [{"role": "user", "content": "x" * 50_000}], "reply", session="s")
        message = call(page, "/status/turns?session=s")[2]["turns"][0]["messages"][0]
        assert (len(message["text"]), message["cut"]) == (20_000, 30_000)

    def test_pages_hold_every_turn_once(self, page, store):
        for number in range(45):
            add_turn(store, str(number), HI, f"reply {number}", session="s")
            add_turn(store, f"other {number}", HI, f"reply {number}", session=f"other {number}")
        seen, before, more = [], "", True
        while more:
            body = call(page, f"/status/turns?session=s{before}")[2]
            seen = [turn["reply"]["text"] for turn in body["turns"]] + seen
            more, before = body["more"], f"&before={body['turns'][0]['number']}"
        assert seen == [f"reply {number}" for number in range(45)]

    def test_pages_hold_every_conversation_once_newest_first(self, page, store):
        for number in range(45):
            add_turn(store, str(number), HI, "reply", session=f"s{number}")
        add_turn(store, "late", HI, "late reply", session="s7")
        seen, before, more = [], "", True
        while more:
            body = call(page, f"/status/sessions?limit=10{before}")[2]
            seen += [session["session_id"] for session in body["sessions"]]
            more, before = body["more"], f"&before={body['sessions'][-1]['number']}"
        assert seen == ["s7", *(f"s{number}" for number in reversed(range(45)) if number != 7)]

    def test_side_traffic_is_listed_when_asked_for(self, page, store):
        add_turn(store, "main", HI, "reply", session="s")
        add_turn(store, "title of it", HI, "Bread", session="s", kind="side", side_reason="title")
        add_turn(store, "ping", HI, "pong", session="p", kind="side", side_reason="ping")
        plain, full = (call(page, f"/status/sessions?side={side}")[2]["sessions"] for side in ("false", "true"))
        assert [session["session_id"] for session in plain] == ["s"]
        assert [session["session_id"] for session in full] == ["p", "s"]
        assert plain[0]["turns"] == 2

    def test_a_session_shows_its_newest_verdicts(self, page, store):
        for number in range(14):
            verdict = votes(-1) if number == 1 else votes(1, -1) if number == 2 else votes(1)
            add_turn(store, str(number), HI, f"reply {number}", session="s", verdict=verdict, next_state="x")
        add_turn(store, "open", HI, "reply", session="s")
        outcomes = call(page, "/status/sessions")[2]["sessions"][0]["outcomes"]
        assert outcomes == ["positive"] * 11 + [None]
        assert len(outcomes) == 12

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=101", "limit=many", "before=x", "before=-1", f"before={2**63}"]
    )
    @pytest.mark.parametrize("path", ["sessions?", "turns?session=s&"])
    def test_pages_have_limits(self, page, path, query):
        assert call(page, f"/status/{path}{query}")[0] == 400
        assert call(page, f"/status/{path}before={2**63 - 1}")[0] == 200

    def test_missing_numbers_are_missing(self, page, store):
        add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(1), next_state="Thanks")
        batch = store.claim(USER, 1, 9)
        scores = TokenScores([-1.0, -2.0], [math.nan, -math.inf], [0.5, math.nan])
        add_scores(store, batch.batch_id, {turn_id("a"): scores}, "v000001")
        body = call(page, f"/status/tokens?turn={turn_id('a')}")[2]
        assert body["teacher"] == [None, None]
        assert body["advantages"] == [0.5, None]
        assert body["tokens"] == ["<0>", "<1>"]
        assert call(page, "/status/turns?session=s")[2]["turns"][0]["scored"] == batch.batch_id

    def test_votes_that_failed_are_no_scores(self, page, store):
        add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(1, None, 0), next_state="Thanks")
        verdict = call(page, "/status/turns?session=s")[2]["turns"][0]["verdict"]
        assert [vote["outcome"] for vote in verdict["votes"]] == ["positive", "failed", "neutral"]
        assert (verdict["score"], verdict["outcome"]) == (None, "tied")


class TestChanges:
    @pytest.fixture
    def turn(self, store):
        add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(-1, hint=HINT), next_state="Shorter")
        return turn_id("a")

    def test_hints_are_replaced(self, page, store, turn):
        status, _, answer = call(page, "/status/hints", {"turn": turn, "hints": [" Be brief. ", "", "Be kind."]})
        assert (status, answer) == (200, {"hints": ["Be brief.", "Be kind."], "state": "ready"})
        verdict = store.show(USER, turn).verdict
        assert (verdict.hints, verdict.hint_source, verdict.score) == (("Be brief.", "Be kind."), "edit", -1)

    def test_hints_that_come_too_late_are_told_so(self, page, store, turn):
        batch = store.claim(USER, 1, 9)
        store.end_batch(batch.batch_id, "trained", "v000001")
        assert call(page, "/status/hints", {"turn": turn, "hints": ["Be brief."]})[2]["state"] == "trained"

    def test_the_last_hint_can_go(self, page, store, turn):
        assert call(page, "/status/hints", {"turn": turn, "hints": []})[0] == 200
        assert store.show(USER, turn).verdict.hints == ()

    @pytest.mark.parametrize(
        "body",
        [
            {},
            [],
            "x",
            {"turn": 5, "hints": []},
            {"turn": turn_id("a")},
            {"turn": turn_id("a"), "hints": "x"},
            {"turn": turn_id("a"), "hints": ["x" * 4001]},
            {"turn": turn_id("a"), "hints": ["x"] * 21},
            {"hints": []},
        ],
    )
    def test_hints_that_make_no_sense_are_refused(self, page, store, turn, body):
        status, _, answer = call(page, "/status/hints", body)
        assert status == 400
        assert answer["error"]["message"]
        assert store.show(USER, turn).verdict.hints == (HINT,)

    @pytest.mark.parametrize(
        ("path", "body"), [("hints", {"turn": "\ud800", "hints": ["x"]}), ("delete", {"session": "\ud800"})]
    )
    def test_names_that_are_no_text_name_nothing(self, page, turn, path, body):
        assert call(page, f"/status/{path}", body)[0] == 404

    def test_a_turn_is_deleted_with_its_text(self, page, store, turn, tmp_path):
        assert call(page, "/status/delete", {"turn": turn})[2] == {"turns": 1}
        assert call(page, "/status/turns?session=s")[2]["turns"] == []
        assert not any(b"Its starch." in path.read_bytes() for path in tmp_path.glob("store.db*"))
        assert call(page, f"/status/tokens?turn={turn}")[0] == 404

    def test_a_session_is_deleted(self, page, store, turn):
        add_turn(store, "b", HI, "Another.", session="s")
        add_turn(store, "c", HI, "Third.", session="t")
        assert call(page, "/status/delete", {"session": "s"})[2] == {"turns": 2}
        assert [session["session_id"] for session in call(page, "/status/sessions")[2]["sessions"]] == ["t"]

    @pytest.mark.parametrize("body", [{}, None, [], {"session": 1}, {"turn": None}, {"user": USER}])
    def test_nothing_is_deleted_by_mistake(self, page, store, turn, body):
        assert call(page, "/status/delete", body)[0] in (400, 404)
        assert store.show(USER, turn)

    def test_opting_out_and_in(self, page, store):
        for on in (True, False):
            assert call(page, "/status/opt-out", {"on": on})[0] == 200
            assert store.opted_out(USER) is on
        assert call(page, "/status/opt-out", {"on": "yes"})[0] == 400

    @pytest.mark.parametrize("to", ["v000001", "base"])
    def test_rolling_back_and_forth(self, filled, store, to):
        assert call(filled, "/status/roll-back", {"to": to})[2] == {"published": to}
        assert store.published_version(USER) == to
        versions = {version["version"]: version for version in call(filled, "/status/overview")[2]["versions"]}
        assert versions[to]["status"] == "published"
        assert versions["v000003"]["status"] == "rolled_back"
        assert versions["v000003"]["can_return_to"]
        assert call(filled, "/status/roll-back", {"to": "v000003"})[0] == 200
        assert store.published_version(USER) == "v000003"

    @pytest.mark.parametrize("to", ["v000002", "v000003", "v000009", ""])
    def test_no_going_back_to_what_never_answered_or_answers_now(self, filled, store, to):
        assert call(filled, "/status/roll-back", {"to": to})[0] == 409
        assert store.published_version(USER) == "v000003"

    def test_a_locked_store_is_told(self, page, turn, tmp_path):
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        status, _, body = call(page, "/status/opt-out", {"on": True})
        other.execute("ROLLBACK")
        other.close()
        assert status == 503
        assert "in use" in body["error"]["message"]
