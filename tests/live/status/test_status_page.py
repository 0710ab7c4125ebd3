"""The status page in a real browser: what it shows, what its buttons do, and what a message cannot do to it."""

import hashlib
import json
import math

import pytest
from status_harness import Key, call, serving_page, wait_for

from benchmarks.status_store import HINT, SHORTER, USER, add_scores, add_turn, made_up_scores, turn_id, votes
from trl_openclaw.live.gateway.auth import Keys
from trl_openclaw.live.records import TokenScores

HI = [{"role": "user", "content": "Why does bread go stale?"}]
TRAINED = f"#session={json.dumps('chat-0')[1:-1]}"


def hinted(store):
    """A turn that waits for its update, with a hint."""
    add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(-1, -1, hint=HINT), next_state=SHORTER)


def trained(store, text="Its starch turns into crystals. Is that all?", scores=None, **more):
    """A turn that was trained, with token scores."""
    add_turn(store, "a", HI, text, session="s", verdict=votes(-1, -1, hint=HINT), next_state=SHORTER, **more)
    batch = store.claim(more.get("user", USER), 1, 9)
    scores = scores or made_up_scores(text, -1)
    add_scores(store, batch.batch_id, {turn_id("a"): scores}, "v000001")
    return scores


class TestShows:
    def test_conversations_queue_and_versions(self, filled, browser, store):
        browser.open(filled)
        assert len(browser.texts("#session-list > li")) == 20
        assert browser.text("#connection") == "Live"
        assert browser.text("#serving") == "stub, v000003"
        ready = store.ready_count(USER, 4)
        assert f"{ready}/16 turns ready, waiting for feedback" in browser.text("#queue")
        bar = browser.one("[role=progressbar]")
        assert bar.get_attribute("aria-valuenow") == str(ready)
        filled_part = browser.run(
            "const [bar, part] = [arguments[0], arguments[0].firstChild].map((e) => e.getBoundingClientRect());"
            "return part.width / bar.width",
            bar,
        )
        assert filled_part == pytest.approx(ready / 16, abs=0.02)
        assert browser.texts("#version-list strong") == ["v000003", "v000002", "v000001", "base"]
        assert browser.texts("#version-list .chip") == ["answers now", "rejected", "earlier", "earlier"]
        assert "-0.143" in browser.text(".version.rejected .why")
        assert browser.texts(".version.rejected .checks b")[:2] == ["held out", "plain questions"]
        assert browser.texts(".version.rejected .checks .sign") == ["✕", "✓", "–", "✓"]

    def test_the_newest_conversation_is_open_and_others_are_a_click_away(self, filled, browser):
        browser.open(filled)
        first, second = browser.texts("#session-list .title")[:2]
        assert browser.text("#turn-list .said-by.user .text") == first
        browser.all("#session-list button")[1].click()
        browser.one("#turn-list .said-by.user .text", second)
        browser.one("#session-list [aria-current]", second)
        browser.driver.refresh()  # the address remembers it
        browser.one("#turn-list .said-by.user .text", second)

    def test_all_about_a_turn(self, page, store, browser):
        trained(store)
        browser.open(page)
        turn = browser.one(".turn")
        browser.one(".heatmap")
        assert browser.text(".said-by.user .text") == HI[0]["content"]
        assert browser.text(".reply .who") == "Replybase"
        assert browser.text(".following .text") == SHORTER
        assert browser.text(".following .who") == "Then the user"
        assert browser.text(".verdict .chip") == "−1 negative"
        assert browser.texts(".votes i") == ["−", "−"]
        assert browser.one(".votes").accessible_name == "votes: negative, negative"
        assert browser.text(".hints li .text") == HINT
        assert "trained in v000001" in browser.text(".turn .state")
        assert turn_id("a") == browser.one(".turn .id").get_attribute("title")
        assert turn.accessible_name == "Turn 1"

    def test_the_state_of_a_turn_in_words(self, page, store, browser):
        made = {
            "waiting for what follows": {},
            "waiting for the judge": {"next_state": "x"},
            "nothing to learn": {"next_state": "x", "verdict": votes(1, -1)},
            "ready": {"next_state": "x", "verdict": votes(1)},
            "not usable": {"finish_reason": "disconnect"},
            "side traffic: title": {"kind": "side", "side_reason": "title"},
        }
        for number, more in enumerate(made.values()):
            add_turn(store, f"{number}", HI, f"Its starch {number}.", session="s", **more)
        browser.open(page)
        wait_for(lambda: browser.texts(".turn .state") == list(made), what="the states")

    def test_tools_reasoning_and_what_tools_said(self, page, store, browser):
        looked = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"up": "herbs"}'}}
        reply = {"role": "assistant", "content": None, "reasoning_content": "I will look.", "tool_calls": [looked]}
        answer = [{"role": "tool", "tool_call_id": "c", "name": "look", "content": "Rosemary"}]
        add_turn(store, "a", HI, reply, session="s", next_state=answer)
        browser.open(page)
        assert browser.one(".reply .call").text == 'look {"up": "herbs"}'
        assert browser.text(".reply details .text") == "I will look."
        assert browser.text(".following .who") == "Then the toollook"
        assert browser.text(".following .text") == "Rosemary"

    def test_satisfaction_is_drawn_where_the_numbers_are(self, filled, browser):
        browser.open(filled)
        points = call(filled, "/status/overview")[2]["satisfaction"]
        for per in ("version", "day"):
            browser.one(f"[data-per={per}]").click()
            drawn = browser.run(
                "const scale = [...document.querySelectorAll('.chart .grid')].map((e) => +e.getAttribute('y1'));"
                "return [...document.querySelectorAll('.chart .dot')]"
                ".map((e) => (scale[0] - e.getAttribute('cy')) / (scale[0] - scale[2]))"
            )
            assert drawn == pytest.approx([point["positive"] / point["scored"] for point in points[per]])
            rows = browser.texts("#satisfaction tbody tr, #satisfaction table > tr")
            assert any(points[per][0]["name"] in row for row in rows)
            assert browser.one(f"[data-per={per}]").get_attribute("aria-pressed") == "true"

    def test_an_empty_store_says_what_to_do(self, page, browser):
        browser.open(page)
        assert "Point any OpenAI client" in browser.text("#empty")
        assert browser.text("#satisfaction") == "No verdict has a score yet."
        assert "0/16 turns ready" in browser.text("#queue")

    def test_what_is_wrong(self, tmp_path, store, browser):
        class Down:
            model, base_url = "nobody", "http://127.0.0.1:9/v1"

        with serving_page(tmp_path, Down(), store) as running:
            browser.open(running)
            assert browser.one("#problems li").text.startswith("Engine: ")
            assert browser.text("#connection") == "Needs attention"


class TestHeatmap:
    SCORES = TokenScores(
        [-0.1, -2.0, -0.5, -1.0, -3.0],
        [-0.2, -0.5, -0.5, math.nan, -0.1],
        [-0.25, 1.0, 0.0, math.nan, -2.0],
        [
            [["Its", 0.8187, 0.9048]],
            [[" starch", 0.6065, 0.1353], [" crumb", 0.2, 0.7]],
            [[" <b>bold</b>", 0.6065, 0.6065]],
            [["\n\n", None, 0.3679]],
            [["<|im_end|>", 0.9048, 0.0498]],
        ],
        ["Its", " starch", " is", "\n\n", "<|im_end|>"],
    )

    @pytest.mark.parametrize("dark", [False, True])
    def test_colours_are_the_numbers(self, page, store, browser, dark):
        trained(store, scores=self.SCORES)
        browser.open(page, dark=dark)
        browser.one(".token")
        found = browser.run(
            "return [...document.querySelectorAll('.token')].map((e) => getComputedStyle(e).backgroundColor)"
        )
        root = "getComputedStyle(document.documentElement).getPropertyValue"
        more, less, surface = (
            rgb_of(browser.run(f"return {root}('--{name}')")) for name in ("more", "less", "surface")
        )
        full = float(browser.run(f"return {root}('--full')").strip().rstrip("%")) / 100
        for text, advantage, colour in zip(self.SCORES.tokens, self.SCORES.advantages, found, strict=True):
            if math.isnan(advantage) or advantage == 0:
                assert colour == "rgba(0, 0, 0, 0)", text
                continue
            share = full * abs(advantage) / 2.0  # 2 is the largest here
            end = more if advantage > 0 else less
            wanted = [share * e + (1 - share) * s for e, s in zip(end, surface, strict=True)]
            assert rgb_of(colour) == pytest.approx(wanted, abs=0.006), text

    @pytest.mark.parametrize("dark", [False, True])
    def test_text_can_be_read_on_every_colour(self, page, store, browser, dark):
        trained(store, scores=self.SCORES)
        browser.open(page, dark=dark)
        browser.one(".token")
        for colour, ink, behind in browser.run(
            "const behind = getComputedStyle(document.querySelector('.turn')).backgroundColor;"
            "return [...document.querySelectorAll('.token')].map((e) => getComputedStyle(e))"
            ".map((style) => [style.backgroundColor, style.color, behind])"
        ):
            background = behind if colour == "rgba(0, 0, 0, 0)" else colour
            assert contrast(rgb_of(ink), rgb_of(background)) >= 4.5

    def test_the_numbers_of_the_token_under_the_pointer(self, page, store, browser):
        trained(store, scores=self.SCORES)
        browser.open(page)
        token = browser.one(".token", " starch")
        assert not browser.one("#peek").is_displayed()
        point_at(browser, token)
        peek = browser.one("#peek", "starch")
        assert peek.is_displayed()
        assert browser.text("#peek .peek-head") == "␣starch+1.000"
        assert browser.texts("#peek dd") == ["±2.00", "−2.00 nats14 %", "−0.50 nats61 %"]
        rows = browser.texts("#peek tbody tr")
        assert rows == ["␣starch61 %14 %", "␣crumb20 %70 %"]
        point_at(browser, browser.one("#queue-title"))
        wait_for(lambda: not browser.one("#peek").is_displayed(), what="closing")

    def test_the_keyboard_goes_from_token_to_token(self, page, store, browser):
        trained(store, scores=self.SCORES)
        browser.open(page)
        browser.run("arguments[0].focus()", browser.one(".token"))
        assert browser.text("#peek .peek-head") == "Its−0.250"
        browser.press(Key.ARROW_RIGHT)
        assert browser.focused() == "␣starch: advantage +1.00, student −2.00, teacher −0.50"
        assert browser.text("#peek .peek-head") == "␣starch+1.000"
        browser.press(Key.END)
        assert browser.text("#peek .peek-head") == "<|im_end|>−2.000"
        browser.press(Key.ARROW_LEFT)
        assert browser.text("#peek .peek-head") == "⏎⏎not trained"
        assert "teacher unknown" in browser.focused()
        assert browser.texts("#peek tbody tr") == ["⏎⏎37 %"]
        browser.press(Key.ESCAPE)
        assert not browser.one("#peek").is_displayed()
        browser.press(Key.HOME)
        assert browser.run("return document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
        browser.press(Key.TAB)  # the reply is one stop
        assert "token" not in browser.run("return document.activeElement.className")

    def test_the_window_with_numbers_stays_inside(self, page, store, browser):
        text = " ".join(f"word{number}" for number in range(600))
        trained(store, text)
        for size in ((1280, 500), (380, 600)):
            browser.open(page, size=size)
            browser.one(".token")
            for place in (0, 40, -1):
                browser.run("[...document.querySelectorAll('.token')].at(arguments[0]).focus()", place)
                inside = "const r = document.getElementById('peek').getBoundingClientRect();"
                box = browser.run(f"{inside} return [r.left, r.top, innerWidth - r.right, innerHeight - r.bottom]")
                assert browser.one("#peek").is_displayed()
                assert min(box) >= 0, (size, place, box)

    def test_a_legend_says_what_colours_mean(self, page, store, browser):
        browser.open(page)
        assert not browser.one("#legend").is_displayed()
        trained(store)
        wait_for(lambda: browser.one("#legend").is_displayed())
        assert "less of this token" in browser.text("#legend")

    def test_the_reply_is_all_there(self, filled, store, browser):
        browser.open(filled, "#session=chat-0")
        browser.one(".heatmap")
        turn = store.turns(USER, "chat-0")[-1]
        whole = turn.reply["content"] + "<|im_end|>"
        wait_for(lambda: browser.texts(".heatmap")[0].replace("⏎", "") == whole, what="the first heatmap")


class TestButtons:
    def test_a_hint_is_edited(self, page, store, browser):
        hinted(store)
        browser.open(page)
        browser.one(".hints li button", "Edit").click()
        field = browser.one(".edit textarea")
        assert field.get_attribute("value") == HINT
        assert browser.focused() == "Hint"
        field.clear()
        field.send_keys("Say it in ten words.")
        browser.one(".edit button", "Save").click()
        browser.one(".hints li .text", "Say it in ten words.")
        assert store.show(USER, turn_id("a")).verdict.hints == ("Say it in ten words.",)
        assert browser.text("#said") == "Hint saved."
        assert "edited" in browser.text(".hints h3")

    def test_editing_can_be_given_up(self, page, store, browser):
        hinted(store)
        browser.open(page)
        for leave in (lambda: browser.press(Key.ESCAPE), lambda: browser.one(".edit button", "Cancel").click()):
            browser.one(".hints li button", "Edit").click()
            browser.one(".edit textarea").send_keys("nonsense")
            leave()
            assert browser.text(".hints li .text") == HINT
        assert store.show(USER, turn_id("a")).verdict.hint_source == "judge"

    def test_what_one_writes_survives_a_refresh(self, page, store, browser):
        hinted(store)
        browser.open(page)
        browser.one(".hints li button", "Edit").click()
        field = browser.one(".edit textarea")
        field.clear()
        field.send_keys("Half a")
        store.add_feedback(USER, turn_id("a"), 1, None, "k")
        add_turn(store, "b", HI, "Another.", session="s")
        browser.one(".turn", "Another.")  # the page has refreshed
        field.send_keys(" sentence", Key.CONTROL, Key.ENTER)
        browser.one(".hints li .text", "Half a sentence")
        assert store.show(USER, turn_id("a")).verdict.hints == ("Half a sentence",)
        browser.one(".verdict .chip", "+1 positive")

    def test_a_hint_is_added_and_deleted(self, page, store, browser):
        add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(-1), next_state="x")
        browser.open(page)
        browser.one(".hints button", "Add a hint").click()
        browser.one(".edit textarea").send_keys("Name the crystals.", Key.CONTROL, Key.ENTER)
        browser.one(".hints li .text", "Name the crystals.")
        browser.one(".hints li button", "Delete").click()
        assert browser.text("#ask-text") == "Name the crystals."
        browser.one("#ask-yes").click()
        wait_for(lambda: not browser.all(".hints li"), what="deleting")
        assert store.show(USER, turn_id("a")).verdict.hints == ()

    def test_a_hint_is_changed_only_while_something_is_learned_from_it(self, page, store, browser):
        hinted(store)
        browser.open(page)
        browser.one(".turn .state", "ready")
        assert self.of_hints(browser) == ["Edit hint 1", "Delete hint 1", "Add a hint"]
        batch = store.claim(USER, 1, 9)
        browser.one(".turn .state", "in training")
        assert self.of_hints(browser) == ["Edit hint 1", "Delete hint 1", "Add a hint"]  # the step is undone then
        for outcome, state in (("trained", "trained in"), ("rejected", "update rejected")):
            store.end_batch(batch.batch_id, outcome, "v000001")
            browser.one(".turn .state", state)
            assert self.of_hints(browser) == []
            assert browser.text(".hints li .text") == HINT

    def of_hints(self, browser):
        return [button.accessible_name for button in browser.all(".hints button")]

    @pytest.mark.parametrize("held_out", [True, False])
    def test_nor_is_that_of_a_turn_that_is_never_trained(self, page, store, browser, monkeypatch, held_out):
        monkeypatch.setattr("trl_openclaw.live.store_turns.is_held_out", lambda turn_id: held_out)
        hinted(store)
        if not held_out:
            store.set_aside([turn_id("a")], "cut")
        browser.open(page)
        browser.one(".turn .state", "held out" if held_out else "not usable")
        assert browser.text(".hints li .text") == HINT
        assert self.of_hints(browser) == []

    def test_those_of_who_opted_out_for_now_are(self, page, store, browser):
        hinted(store)
        store.opt_out(USER)
        browser.open(page)
        browser.one(".turn .state", "opted out")
        assert self.of_hints(browser) == ["Edit hint 1", "Delete hint 1", "Add a hint"]

    def test_a_hint_that_comes_too_late_is_told_so(self, page, store, browser):
        hinted(store)
        browser.open(page)
        browser.one(".hints li button", "Edit").click()
        store.end_batch(store.claim(USER, 1, 9).batch_id, "trained", "v000001")
        browser.one(".edit textarea").send_keys(" Please.", Key.CONTROL, Key.ENTER)
        browser.one("#said", "Hint saved. It comes too late")

    def test_deleting_is_asked_about(self, page, store, browser):
        trained(store)
        browser.open(page)
        for leave in (lambda: browser.press(Key.ESCAPE), lambda: browser.one("#ask-no").click()):
            browser.one(".turn footer button", "Delete").click()
            assert browser.focused().startswith("ask-no")  # the harmless answer
            leave()
        assert store.show(USER, turn_id("a"))
        browser.one(".turn footer button", "Delete").click()
        browser.one("#ask-yes", "Delete turn").click()
        wait_for(lambda: not browser.all(".turn"), what="deleting")
        assert store.turns(USER) == []

    def test_a_conversation_is_deleted(self, filled, store, browser):
        browser.open(filled, "#session=chat-0")
        browser.one(".heatmap")
        browser.one("#delete-session").click()
        browser.one("#ask-yes", "Delete conversation").click()
        browser.one("#said", "Conversation deleted.")
        assert store.turns(USER, "chat-0") == []
        wait_for(lambda: browser.text("#session-name") != "chat-0", what="another conversation")

    def test_all_of_ones_data_is_deleted(self, filled, store, browser):
        browser.open(filled, "#session=chat-0")
        browser.one(".heatmap")
        add_turn(store, "his", HI, "Its starch.", session="s", user="bob")
        last = "[...document.querySelectorAll('#data button')].at(-1)"  # drawn anew with each change
        button = lambda: browser.run(f"{last}.click()")  # noqa: E731
        assert browser.run(f"return {last}.textContent") == "Delete all my data"
        count = len(list(store.all_turns(USER)))
        button()
        assert browser.text("#ask-title") == f"Delete all data of user {USER}?"
        told = browser.text("#ask-text")
        for word in ("removed for good", "exports", "is not recorded", "What stays: versions", "choice about training"):
            assert word in told
        assert browser.focused().startswith("ask-no")  # the harmless answer
        browser.press(Key.ENTER)
        assert len(list(store.all_turns(USER))) == count
        button()
        browser.one("#ask-yes", "Delete all").click()
        browser.one("#said", "All your data is deleted.")
        assert store.users() == ["bob"]
        browser.one("#data", "0 turns.")
        wait_for(lambda: not browser.all("#turn-list > li, #session-list > li"), what="an empty page")
        assert browser.one("#empty", "No conversation yet").is_displayed()
        assert browser.text("#satisfaction") == "No verdict has a score yet."
        assert browser.texts("#version-list strong") == ["v000003", "v000002", "v000001", "base"]
        assert "#session" not in browser.run("return location.href")
        button()  # once more is no mistake
        browser.run("document.getElementById('said').textContent = ''")
        browser.one("#ask-yes", "Delete all").click()
        browser.one("#said", "All your data is deleted.")

    def test_rolling_back(self, filled, store, browser):
        browser.open(filled)
        browser.one(".version button", "Roll back to v000001").click()
        browser.one("#ask-yes", "Roll back").click()
        browser.one(".version.published strong", "v000001")
        assert store.published_version(USER) == "v000001"
        browser.one(".version.rolled_back strong", "v000003")
        wait_for(lambda: filled.gateway.versions.current(USER) == "v000001", what="the gateway's answer")
        assert not [button for button in browser.texts(".version button") if "v000002" in button]  # it never answered

    def test_opting_out_and_in(self, page, store, browser):
        browser.open(page)
        browser.one("#data button", "Opt out").click()
        browser.one("#ask-yes").click()
        browser.one("#data button", "Let the model learn").click()
        browser.one("#data button", "Opt out")
        assert not store.opted_out(USER)

    def test_a_change_that_fails_is_told(self, page, store, browser):
        hinted(store)
        browser.open(page)
        browser.one(".hints li button", "Edit").click()
        store.delete(USER, turn_id=turn_id("a"))
        browser.one(".edit textarea").send_keys(" more", Key.CONTROL, Key.ENTER)
        browser.one("#said", "There is no turn")
        assert browser.all(".edit textarea")  # what was written is still there
        assert [line for line in browser.complaints() if "404" not in line] == []
        browser.forget()


class TestPages:
    def test_of_conversations(self, page, store, browser):
        for number in range(45):
            add_turn(
                store, str(number), [{"role": "user", "content": f"Question {number}"}], "Yes.", session=f"s{number}"
            )
        browser.open(page)
        titles = lambda: browser.texts("#session-list .title")  # noqa: E731
        pages = [[f"Question {n}" for n in range(44 - 20 * p, max(-1, 24 - 20 * p), -1)] for p in range(3)]
        assert titles() == pages[0]
        for wanted in pages[1:]:
            browser.one("#older-sessions").click()
            wait_for(lambda wanted=wanted: titles() == wanted, what=wanted[0])
        assert not browser.one("#older-sessions").is_displayed()
        for wanted in (pages[1], pages[0]):
            browser.one("#newer-sessions").click()
            wait_for(lambda wanted=wanted: titles() == wanted, what=wanted[0])
        assert not browser.one("#newer-sessions").is_displayed()

    def test_of_turns(self, page, store, browser):
        for number in range(45):
            add_turn(store, str(number), HI, f"Reply {number}", session="s")
        browser.open(page)
        replies = lambda: browser.texts(".reply .text")  # noqa: E731
        assert replies() == [f"Reply {n}" for n in range(25, 45)]
        for first, last in ((5, 25), (0, 5)):
            browser.one("#earlier-turns").click()
            wait_for(lambda a=first, b=last: replies() == [f"Reply {n}" for n in range(a, b)], what=str(first))
        browser.one("#later-turns").click()
        wait_for(lambda: replies()[0] == "Reply 5", what="the way back")

    def test_side_traffic_on_request(self, page, store, browser):
        add_turn(store, "main", HI, "reply", session="s")
        add_turn(
            store, "ping", [{"role": "user", "content": "Ping"}], "pong", session="p", kind="side", side_reason="ping"
        )
        browser.open(page)
        assert browser.texts("#session-list .title") == [HI[0]["content"]]
        browser.one("#side").click()
        browser.one("#session-list .title", "Ping")
        assert browser.one("#side").get_attribute("aria-pressed") == "true"


class TestRefresh:
    def test_news_appears_by_itself(self, page, store, browser):
        browser.open(page)
        add_turn(store, "a", HI, "Its starch.", session="s")
        browser.one(".turn .state", "waiting for what follows")
        store.add_next_state(turn_id("a"), [{"role": "user", "content": "Thanks"}])
        browser.one(".turn .state", "waiting for the judge")
        store.add_verdict(turn_id("a"), votes(1))
        browser.one(".turn .state", "ready")
        browser.one("#queue", "1/16")

    def test_an_idle_page_costs_nothing(self, filled, browser):
        browser.open(filled)
        wait_for(lambda: browser.answers("/status/turns"), what="the turns")
        wait_for(lambda: 304 in browser.answers("/status/overview"), what="the first idle look")
        browser.requests.clear()
        wait_for(lambda: len(browser.answers("/status/overview")) >= 3, what="three looks")
        assert set(browser.answers("/status/overview")) == {304}
        assert browser.answers("/status/(sessions|turns|tokens)") == []

    def test_what_is_selected_stays_when_nothing_of_it_changed(self, page, store, browser):
        trained(store)
        browser.open(page)
        browser.one(".heatmap")
        browser.run("document.querySelectorAll('.token')[2].focus(); document.querySelector('.turn').marked = true")
        add_turn(store, "b", HI, "Another.", session="s")
        browser.one(".turn", "Another.")
        assert browser.run("return document.querySelector('.turn').marked") is True
        assert browser.run("return document.activeElement.dataset.place") == "2"

    def test_a_gateway_that_ends_and_comes_back(self, tmp_path, stub, store, browser):
        with serving_page(tmp_path, stub, store) as running:
            browser.open(running)
            assert browser.text("#connection") == "Live"
        wait_for(lambda: browser.text("#connection") == "Not connected", what="the loss")
        assert all("ERR_CONNECTION" in line for line in browser.complaints())
        browser.log.clear()


ATTACKS = (
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg/onload=window.hacked=1>",
    "\"><iframe src='javascript:parent.hacked=1'></iframe>",
    "javascript:window.hacked=1",
    "</textarea><script>window.hacked = 1</script>",
    "{{constructor.constructor('window.hacked=1')()}}",
    "<a href='javascript:window.hacked=1' onmouseover='window.hacked=1'>click</a>",
    "<style>* { display: none }</style>",
    "‮evil‬ \u0000\ud83d",
)


EDIT = """
if (document.querySelector(".edit textarea")) return true;
[...document.querySelectorAll(".hints li button")].find((one) => one.textContent.includes("Edit"))?.click();
"""


def test_text_is_never_markup(page, store, browser):
    for number, text in enumerate(ATTACKS):
        attack(store, str(number), text)
    for number, text in enumerate(ATTACKS):
        with_hint_to_change(store, str(number), text)
    browser.open(page)
    for number, text in reversed(list(enumerate(ATTACKS))):
        shown, hint = text.replace("\ud83d", "\ufffd"), text.encode("utf-8", "replace").decode()
        browser.one(f"#session-list li:nth-child({len(ATTACKS) - number}) button").click()
        wait_for(lambda n=number: browser.text("#session-name").startswith(f"s {n} "), what="the conversation")
        browser.run("arguments[0].focus()", browser.one(".token"))
        wait_for(lambda: browser.run(EDIT), what="the editor")
        assert browser.one(".edit textarea").get_attribute("value") == hint
        browser.press(Key.ESCAPE)
        browser.one(".hints li button", "Delete").click()
        browser.one("#ask-no").click()
        texts = ".said-by .text, .reply > .text, .reply details .text, .following .text"
        assert set(browser.texts(texts)) == {shown}
        assert set(browser.texts(".hints .text")) == {hint}
        assert browser.texts(".token")[0] == shown
        assert shown in browser.texts(".version .why")
    elements = browser.run("return [...new Set([...document.querySelectorAll('body *')].map((e) => e.localName))]")
    assert not {"script", "img", "iframe", "style", "object"} & set(elements)
    assert len(browser.all("a")) == 1
    assert browser.run("return window.hacked ?? null") is None
    assert browser.one("#turns").is_displayed()


def attack(store, name, text):
    """A conversation in which everything that is text is this one."""
    plain = text.encode("utf-8", "replace").decode()  # what is no JSON has no half emoji
    looked = {"id": "c", "type": "function", "function": {"name": text, "arguments": json.dumps({"x": text})}}
    reply = {"role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [looked]}
    followed = [{"role": "user", "name": text, "content": text}, {"role": text, "content": text}]
    session, messages = f"s {name} {plain}", attacking(text)
    common = {"session": session, "next_state": followed, "verdict": votes(-1, hint=text)}
    add_turn(store, f"side {name}", messages, text, session=session, kind="side", side_reason=plain)
    for number in range(3):  # one of them is not held out
        add_turn(store, f"tool {name} {number}", messages, reply, model_version=plain, **common)
        add_turn(store, f"{name} {number}", messages, text, **common)
    batch = store.claim(USER, store.ready_count(USER, 9), 9)
    scores = TokenScores([-1.0], [-1.0], [0.5], [[[text, 0.5, 0.5]]], [text])
    add_scores(store, batch.batch_id, {turn.turn_id: scores for turn in batch.turns}, f"v{name}")
    checks = {text: {"outcome": text, "note": text, "numbers": {}}}
    store.add_version_event(USER, f"v{name}", "checked", {"checks": checks, text: text})
    store.add_version_event(USER, f"v{name}", "rejected", {"reason": text})


def attacking(text):
    """A request that is this text."""
    return [{"role": "user", "content": [{"type": "text", "text": text}], "name": text}]


def with_hint_to_change(store, name, text):
    """A hint in the same conversation that can still be changed."""
    session = f"s {name} {text.encode('utf-8', 'replace').decode()}"
    for number in range(3):  # one of them is not held out
        more = {"session": session, "verdict": votes(-1, hint=text)}
        add_turn(store, f"hint {name} {number}", attacking(text), text, **more)


class TestKeys:
    KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob")}

    @pytest.fixture
    def keyed(self, tmp_path, stub, store):
        add_turn(
            store, "ann's", [{"role": "user", "content": "A question of ann"}], "For ann.", session="s", user="ann"
        )
        add_turn(
            store, "bob's", [{"role": "user", "content": "A question of bob"}], "For bob.", session="s", user="bob"
        )
        keys = Keys({hashlib.sha256(key.encode()).digest(): name for name, key in self.KEYS.items()})
        with serving_page(tmp_path, stub, store, keys=keys) as running:
            yield running

    def sign_in(self, browser, key):
        browser.one("#key-value").send_keys(key, Key.ENTER)

    def forgive_401(self, browser):
        assert [line for line in browser.complaints() if "401" not in line] == []
        browser.forget()

    def open(self, browser, running):
        browser.start(running)
        wait_for(lambda: browser.all("#key[open]"), what="being asked for a key")

    def test_each_key_shows_its_own_users_data(self, keyed, browser):
        for name, other in (("ann", "bob"), ("bob", "ann")):
            self.open(browser, keyed)
            self.sign_in(browser, self.KEYS[name])
            browser.one(".turn", f"For {name}.")
            assert f"User {name}" in browser.text("#data")
            assert other not in browser.run("return document.body.textContent")
        self.forgive_401(browser)

    def test_a_wrong_key_shows_nothing_and_is_forgotten(self, keyed, browser):
        self.open(browser, keyed)
        self.sign_in(browser, "wrong-key-0123456789")
        browser.one("#key-why", "not known here")
        assert browser.run("return sessionStorage.length") == 0
        assert browser.all(".turn") == []
        self.sign_in(browser, self.KEYS["ann"])
        browser.one(".turn", "For ann.")
        self.forgive_401(browser)

    def test_the_key_stays_in_the_tab_and_can_be_forgotten(self, keyed, browser):
        self.open(browser, keyed)
        self.sign_in(browser, self.KEYS["ann"])
        browser.one(".turn", "For ann.")
        assert browser.run("return [localStorage.length, document.cookie, location.href.includes('key-of')]") == [
            0,
            "",
            False,
        ]
        browser.driver.refresh()
        browser.one(".turn", "For ann.")
        browser.one("#forget-key").click()
        wait_for(lambda: browser.all("#key[open]"), what="being asked again")
        assert browser.run("return sessionStorage.length") == 0
        assert browser.all(".turn") == []
        self.forgive_401(browser)


class TestForEverybody:
    @pytest.mark.parametrize("place", ["", "#session=chat-0"])
    def test_all_that_can_be_pressed_has_a_name(self, filled, browser, place):
        browser.open(filled, place)
        browser.one(".turn")
        everything = browser.all("button, input, [tabindex='0'], [role=progressbar], li.turn")
        found = [e for e in everything if e.is_displayed()]
        assert len(found) > 30
        assert [e.get_attribute("outerHTML")[:80] for e in found if not e.accessible_name.strip()] == []
        assert browser.run("return document.documentElement.lang") == "en"
        ids = browser.run("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(set(ids)) == len(ids)

    def test_names_of_buttons_tell_them_apart(self, page, store, browser):
        add_turn(store, "a", HI, "Its starch.", session="s", verdict=votes(-1, hint=HINT), next_state="x")
        store.edit_hint(USER, turn_id("a"), ["One.", "Two."])
        browser.open(page)
        names = [button.accessible_name for button in browser.all(".turn button")]
        assert names == [
            "Edit hint 1",
            "Delete hint 1",
            "Edit hint 2",
            "Delete hint 2",
            "Add a hint",
            "Delete this turn",
        ]

    def test_a_conversation_is_opened_and_a_turn_deleted_by_keyboard_alone(self, filled, store, browser):
        browser.open(filled)
        for _ in range(60):
            browser.press(Key.TAB)
            if "bread" in browser.focused():
                break
        title = browser.run("return document.activeElement.querySelector('.title').textContent")
        browser.press(Key.ENTER)
        browser.one("#turn-list .said-by.user .text", title)
        assert title in browser.focused()  # refreshing has not taken the focus away
        name = browser.text("#session-name")
        for _ in range(80):
            browser.press(Key.TAB)
            if "Delete this turn" in browser.focused():
                break
        browser.press(Key.ENTER)
        browser.press(Key.TAB, Key.ENTER)
        browser.one("#said", "Turn deleted.")
        assert store.turns(USER, name) == []

    def test_narrow_screens_show_one_part_at_a_time(self, filled, browser):
        browser.open(filled, "#session=chat-0", size=(380, 700))
        browser.one(".heatmap")
        parts = ("sessions", "turns", "learning")
        for part in parts:
            browser.one(f"[data-show={part}]").click()
            assert [name for name in parts if browser.one(f"#{name}").is_displayed()] == [part]
            assert browser.run("return document.documentElement.scrollWidth") <= 380
            too_wide = (
                "return [...document.querySelectorAll('main *')].filter((e) => e.offsetParent && !e.closest('.unseen')"
            )
            assert browser.run(f"{too_wide} && e.getBoundingClientRect().right > 381).map((e) => e.className)") == []
        browser.one("[data-show=sessions]").click()
        browser.all("#session-list button")[2].click()
        wait_for(lambda: browser.one("#turns").is_displayed(), what="the turns")

    @pytest.mark.parametrize("dark", [False, True])
    def test_all_text_can_be_read(self, filled, browser, dark):
        browser.open(filled, "#session=chat-0", dark=dark)
        browser.one(".heatmap")
        faint = []
        for text, ink, behind in browser.run(TEXTS):
            if contrast(rgb_of(ink), rgb_of(behind)) < 4.5:
                faint.append((text, ink, behind))
        assert faint == []


TEXTS = """
const opaque = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
  }
};
return [...document.querySelectorAll('body *')]
  .filter((e) => e.offsetParent && !e.closest('.unseen, dialog, svg, .skip')
    && [...e.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()))
  .map((e) => [e.textContent.slice(0, 40), getComputedStyle(e).color, opaque(e)]);
"""


def point_at(browser, element):
    """Move the pointer to the middle of an element."""
    box = browser.run(
        "const r = arguments[0].getClientRects()[0]; return [r.left + r.width / 2, r.top + r.height / 2]", element
    )
    event = {"type": "mouseMoved", "x": box[0], "y": box[1]}
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)


def rgb_of(colour):
    """Red, green and blue from 0 to 1 of a computed colour, or one in hex."""
    colour = colour.strip()
    if colour.startswith("#"):
        return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    numbers = [
        float(part) for part in colour.split("(")[1].rstrip(")").replace("srgb", "").replace(",", " ").split()[:3]
    ]
    return numbers if colour.startswith("color(") else [number / 255 for number in numbers]


def contrast(one, other):
    """The contrast of two colours by the Web Content Accessibility Guidelines, from 1 to 21."""

    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
