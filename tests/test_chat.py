import asyncio
import gc
import threading
import warnings

import pytest
from stub_chat_server import Reply

from trl_openclaw.chat import ChatClient, ChatReply, strip_thinking
from trl_openclaw.errors import ChatError, JudgeUnavailableError

ASK = [{"role": "user", "content": "hello"}]


def ask(client: ChatClient, max_tokens: int = 16, temperature: float | None = None) -> ChatReply:
    return asyncio.run(client.complete(ASK, max_tokens=max_tokens, temperature=temperature))


def failure(client: ChatClient, **kwargs) -> ChatError:
    with pytest.raises(ChatError) as caught:
        ask(client, **kwargs)
    return caught.value


class TestAnswers:
    def test_a_plain_answer(self, chat_server):
        chat_server.script = "fine"
        assert ask(ChatClient("stub-model", chat_server.base_url), 12, 0.5) == ChatReply("fine")
        request = chat_server.requests[0]
        assert (request["model"], request["max_tokens"], request["temperature"]) == ("stub-model", 12, 0.5)
        assert request["messages"] == ASK

    def test_no_temperature_is_sent_unless_one_is_given(self, chat_server):
        ask(ChatClient("stub-model", chat_server.base_url))
        assert "temperature" not in chat_server.requests[0]

    def test_extra_body_is_sent(self, chat_server):
        ask(ChatClient("stub-model", chat_server.base_url, extra_body={"top_k": 5}))
        assert chat_server.requests[0]["top_k"] == 5

    def test_thinking_is_dropped_wherever_the_server_puts_it(self, chat_server):
        chat_server.script = Reply("<think>a\n</think> b </think>\n\nfine", extra={"reasoning_content": "hidden"})
        assert ask(ChatClient("stub-model", chat_server.base_url)).text == "fine"

    def test_a_server_that_wants_another_name_for_the_limit(self, chat_server):
        chat_server.script = [Reply(status=400, error="Unsupported: use 'max_completion_tokens' instead."), "fine"]
        client = ChatClient("stub-model", chat_server.base_url)
        assert ask(client, 12).text == "fine"
        assert ask(client, 12).text == "fine"
        assert [("max_tokens" in r, r.get("max_completion_tokens")) for r in chat_server.requests] == [
            (True, None),
            (False, 12),
            (False, 12),
        ]


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("plain", "plain"),
        ("<think>x</think>y", "y"),
        ("no opening tag</think>\ny", "y"),
        ("<think>x", None),
        ("\n  <think>x\n never ends", None),
        ("<think>a</think>\n<THINK>b", None),
        ("Print no <think> tags.", "Print no <think> tags."),
        ("The reply was:\n<think>\nVerdict: bad", "The reply was:\n<think>\nVerdict: bad"),
    ],
)
def test_strip_thinking(text, final):
    assert strip_thinking(text) == final


class TestTruncation:
    @pytest.mark.parametrize("cut", [Reply("half an ans", finish_reason="length"), "<think>well, I wonder"])
    def test_is_retried_once_with_more_room(self, chat_server, cut):
        chat_server.script = [cut, "whole"]
        assert ask(ChatClient("stub-model", chat_server.base_url), 10).text == "whole"
        assert [request["max_tokens"] for request in chat_server.requests] == [10, 40]

    @pytest.mark.parametrize(
        "cut",
        [
            Reply("half an ans", finish_reason="length"),
            Reply(None, finish_reason="length", extra={"reasoning_content": "hm"}),
            "<think>well, I wonder",
            "thought</think>\n<think>and more",
        ],
    )
    def test_is_a_failure_the_second_time(self, chat_server, cut):
        chat_server.script = cut
        assert failure(ChatClient("stub-model", chat_server.base_url)).kind == "truncated"
        assert chat_server.count == 2

    def test_more_room_than_the_window_is_still_truncation(self, chat_server):
        chat_server.script = [Reply("half", finish_reason="length"), Reply(status=400, error="maximum context length")]
        error = failure(ChatClient("stub-model", chat_server.base_url))
        assert error.kind == "truncated"
        assert "maximum context length" in str(error)


class TestFailures:
    @pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
    def test_passing_trouble_is_retried(self, chat_server, status):
        chat_server.script = [Reply(status=status), Reply(status=status), "fine"]
        assert ask(ChatClient("stub-model", chat_server.base_url)).text == "fine"
        assert chat_server.count == 3

    @pytest.mark.parametrize(
        ("status", "kind", "tries"),
        [
            (408, "timeout", 3),
            (429, "unreachable", 3),
            (500, "unreachable", 3),
            (503, "unreachable", 3),
            (400, "refused", 1),
            (401, "denied", 1),
            (402, "denied", 1),
            (403, "denied", 1),
            (404, "denied", 1),
            (422, "refused", 1),
        ],
    )
    def test_lasting_trouble_has_a_kind_and_bounded_tries(self, chat_server, status, kind, tries):
        chat_server.script = Reply(status=status, error="the reason")
        error = failure(ChatClient("stub-model", chat_server.base_url, max_retries=2))
        assert error.kind == kind
        assert "the reason" in str(error)
        assert chat_server.base_url in str(error)
        assert chat_server.count == tries

    def test_timeout(self, chat_server):
        chat_server.script = Reply("late", delay=2.0)
        assert failure(ChatClient("stub-model", chat_server.base_url, timeout=0.1, max_retries=1)).kind == "timeout"
        assert chat_server.count == 2

    def test_connection_refused(self, dead_url):
        error = failure(ChatClient("stub-model", dead_url, max_retries=0))
        assert error.kind == "unreachable"
        assert dead_url in str(error)

    def test_unknown_host(self):
        assert failure(ChatClient("m", "http://nowhere.invalid/v1", max_retries=0)).kind == "unreachable"

    def test_dropped_connection(self, chat_server):
        chat_server.script = [Reply(drop=True), "fine"]
        client = ChatClient("stub-model", chat_server.base_url)
        assert ask(client).text == "fine"
        chat_server.script = Reply(drop=True)
        assert failure(client).kind == "unreachable"

    @pytest.mark.parametrize("empty", [Reply(choices=False), Reply(None)])
    def test_an_answer_without_content_gets_one_more_try(self, chat_server, empty):
        chat_server.script = [empty, "fine"]
        client = ChatClient("stub-model", chat_server.base_url)
        assert ask(client).text == "fine"
        chat_server.script = empty
        assert failure(client).kind == "error"
        assert chat_server.count == 4

    @pytest.mark.parametrize("body", ["<html>hello</html>", "{}", '{"choices": [{}]}', '{"choices": null}', "[]"])
    def test_an_answer_that_is_no_completion(self, chat_server, body):
        chat_server.script = Reply(body=body)
        assert failure(ChatClient("stub-model", chat_server.base_url)).kind == "error"

    def test_withheld_content(self, chat_server):
        chat_server.script = Reply("half", finish_reason="content_filter")
        assert failure(ChatClient("stub-model", chat_server.base_url)).kind == "refused"


class TestSettings:
    @pytest.mark.parametrize(
        ("kwargs", "word"),
        [
            ({"model": ""}, "model"),
            ({"base_url": "localhost:8000/v1"}, "base_url"),
            ({"api_key": ""}, "api_key"),
            ({"timeout": 0}, "timeout"),
            ({"max_retries": -1}, "max_retries"),
            ({"max_concurrency": 0}, "max_concurrency"),
        ],
    )
    def test_wrong_values_are_refused(self, kwargs, word):
        with pytest.raises(ValueError, match=word):
            ChatClient(**{"model": "m", "base_url": "http://127.0.0.1:1/v1", **kwargs})

    def test_room_must_be_positive(self, chat_server):
        with pytest.raises(ValueError, match="max_tokens"):
            ask(ChatClient("stub-model", chat_server.base_url), 0)

    @pytest.mark.parametrize(
        ("given", "environment", "sent"),
        [("mine", "theirs", "mine"), (None, "theirs", "theirs"), (None, "", "none"), (None, None, "none")],
    )
    def test_where_the_key_comes_from(self, chat_server, monkeypatch, given, environment, sent):
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        if environment is not None:
            monkeypatch.setenv("OPENAI_API_KEY", environment)
        ask(ChatClient("stub-model", chat_server.base_url, api_key=given))
        assert chat_server.headers[0]["authorization"] == f"Bearer {sent}"


class TestCheck:
    def check(self, server, model: str = "stub-model") -> None:
        asyncio.run(ChatClient(model, server.base_url).check())

    def test_a_served_model(self, chat_server):
        self.check(chat_server)

    def test_unreachable_names_address_and_model(self, dead_url):
        with pytest.raises(JudgeUnavailableError) as caught:
            asyncio.run(ChatClient("the-model", dead_url).check())
        assert dead_url in str(caught.value)
        assert "the-model" in str(caught.value)

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_refused_key(self, chat_server, status):
        chat_server.models_reply = Reply(status=status)
        with pytest.raises(JudgeUnavailableError, match="key"):
            self.check(chat_server)

    @pytest.mark.parametrize("status", [404, 405])
    def test_a_server_without_a_list(self, chat_server, status):
        chat_server.models_reply = Reply(status=status)
        self.check(chat_server)

    def test_a_failing_server(self, chat_server):
        chat_server.models_reply = Reply(status=500)
        with pytest.raises(JudgeUnavailableError, match="500"):
            self.check(chat_server)

    def test_a_model_that_is_not_served(self, chat_server):
        chat_server.models = ["alpha", "beta"]
        with pytest.raises(JudgeUnavailableError, match="alpha, beta"):
            self.check(chat_server)

    @pytest.mark.parametrize("body", ["{}", '{"data": []}', '{"data": [{"id": "stub-model:latest"}]}'])
    def test_lists_that_say_nothing_against_the_model(self, chat_server, body):
        chat_server.models_reply = Reply(body=body)
        self.check(chat_server)

    @pytest.mark.parametrize("body", ["<html>a web page</html>", "[]"])
    def test_an_address_that_is_no_chat_server(self, chat_server, body):
        chat_server.models_reply = Reply(body=body)
        with pytest.raises(JudgeUnavailableError, match="base_url"):
            self.check(chat_server)


class TestEventLoops:
    def test_concurrency_is_bounded(self, chat_server):
        chat_server.script = Reply("ok", delay=0.05)
        client = ChatClient("stub-model", chat_server.base_url, max_concurrency=3)

        async def many():
            await asyncio.gather(*(client.complete(ASK, max_tokens=8) for _ in range(12)))

        asyncio.run(many())
        assert chat_server.count == 12
        assert chat_server.max_in_flight == 3

    def test_one_client_serves_several_loops_at_once(self, chat_server):
        client = ChatClient("stub-model", chat_server.base_url)
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        for _ in range(2):
            other = asyncio.run_coroutine_threadsafe(client.complete(ASK, max_tokens=8), loop)
            assert ask(client).text == "ok"
            assert other.result(10).text == "ok"
        asyncio.run_coroutine_threadsafe(client.aclose(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def test_a_loop_opens_one_client_and_closes_it_as_it_ends(self, chat_server):
        client = ChatClient("stub-model", chat_server.base_url)
        seen = []

        async def twice():
            await asyncio.gather(*(client.complete(ASK, max_tokens=8) for _ in range(4)))
            seen.extend(client._sessions.values())

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(twice())
            gc.collect()
        assert len(seen) == 1
        assert seen[0][1].client.is_closed()

    def test_closed_loops_are_let_go(self, chat_server):
        client = ChatClient("stub-model", chat_server.base_url)
        for _ in range(4):
            ask(client)
        assert len(client._sessions) == 1

    def test_a_closed_client_reopens(self, chat_server):
        client = ChatClient("stub-model", chat_server.base_url)

        async def work():
            await client.complete(ASK, max_tokens=8)
            await client.aclose()
            await client.aclose()
            await client.complete(ASK, max_tokens=8)

        asyncio.run(work())
        assert chat_server.count == 2

    def test_cancelling_frees_the_slot(self, chat_server):
        chat_server.script = [Reply("late", delay=1.0), "ok"]
        client = ChatClient("stub-model", chat_server.base_url, max_concurrency=1)

        async def work():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await client.complete(ASK, max_tokens=8)
            assert (await client.complete(ASK, max_tokens=8)).text == "ok"

        asyncio.run(work())
