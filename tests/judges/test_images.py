import asyncio
import base64
import io
import json
import threading
import time

import pytest
from PIL import Image
from stub_chat_server import Reply

from trl_openclaw.chat import ChatReply
from trl_openclaw.feedback import collect_feedback, feedback_metrics
from trl_openclaw.judges import LLMJudge, LocalJudge, PromptedJudge, images
from trl_openclaw.judges.images import UnreadableError, image_part
from trl_openclaw.types import NextState, Turn


def picture(kind="PNG", mode="RGB", size=(3, 2)) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


PNG = picture()
DATA_URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
OTHER_DATA_URL = f"DATA:image/x-odd;base64,{base64.encodebytes(PNG).decode()}"
TEXT = {"type": "text", "text": "The button is gone."}


def url(address):
    return {"type": "image_url", "image_url": {"url": address}}


def marker_of(content) -> str:
    text = content if isinstance(content, str) else content[0]["text"]
    return text.split("The marker is ")[1].split(".")[0]


def answer(messages):
    marker = marker_of(messages[-1]["content"])
    return f"VERDICT-{marker}: -1\nHINT-{marker}: Keep the button.\nEND-{marker}"


class Asked:
    """A chat model that remembers what it was asked."""

    def __init__(self):
        self.content = []

    async def complete(self, messages, *, max_tokens, temperature=None):
        self.content.append(messages[-1]["content"])
        return ChatReply(answer(messages))


def ask(turn, **kwargs):
    """The question's content and the verdict."""
    client = Asked()
    verdict = asyncio.run(PromptedJudge(client, num_votes=1, reads_images=True, **kwargs)(turn))
    return (client.content or [None])[0], verdict


def urls(content):
    return [part["image_url"]["url"] for part in content if part["type"] == "image_url"]


class TestParts:
    @pytest.mark.parametrize("address", ["https://example.org/a.png", "HTTP://x/y", DATA_URL, OTHER_DATA_URL])
    def test_urls_are_passed_on_as_they_are(self, address):
        expected = {"type": "image_url", "image_url": {"url": address}}
        assert image_part(url(address)) == expected
        assert image_part({"type": "image_url", "image_url": address}) == expected
        assert image_part({"type": "image", "url": address}) == expected
        detailed = {"type": "image_url", "image_url": {"url": address, "detail": "low"}}
        assert image_part(detailed) == detailed

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
    def test_bytes_and_base64_become_data_urls(self, kind):
        data = picture(kind)
        expected = f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"
        for image in (data, bytearray(data), base64.b64encode(data).decode(), base64.encodebytes(data).decode()):
            assert image_part({"type": "image", "image": image})["image_url"] == {"url": expected}

    @pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "1", "P", "CMYK", "F", "I;16"])
    def test_images_of_pil_become_png(self, mode):
        shown = image_part({"type": "image", "image": Image.new(mode, (3, 2))})["image_url"]["url"]
        data = base64.b64decode(shown.removeprefix("data:image/png;base64,"))
        assert Image.open(io.BytesIO(data)).size == (3, 2)

    @pytest.mark.parametrize(
        ("part", "why"),
        [
            ({"type": "image"}, "it holds no image"),
            ({"type": "image_url", "image_url": {}}, "it holds no image"),
            ({"type": "image", "image": 5}, "cannot be given as int"),
            ({"type": "image", "image": "/etc/passwd.png"}, "paths are not read"),
            ({"type": "image", "path": "~/a.png"}, "paths are not read"),
            ({"type": "image", "url": "file:///a.png"}, "paths are not read"),
            (url("data:image/png;base64,@@@"), "nor base64"),
            (url("data:,"), "nor base64"),
            (url(f"data:text/html;base64,{base64.b64encode(PNG).decode()}"), "nor base64"),
            ({"type": "image", "image": picture("BMP")}, "not a PNG, JPEG, GIF or WebP"),
            ({"type": "image", "image": b""}, "not a PNG"),
            ({"type": "image", "image": base64.b64encode(b"secret" * 9).decode()}, "not a PNG"),
            ({"type": "image", "image": "ä"}, "nor base64"),
        ],
    )
    def test_anything_else_says_why_not(self, part, why):
        with pytest.raises(UnreadableError, match=why):
            image_part(part)

    def test_limits_in_bytes_and_pixels(self, monkeypatch):
        monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
        for image in (PNG + b"\0" * 100, "A" * 200, "https://x/" + "y" * 200):
            with pytest.raises(UnreadableError, match=r"bytes, more than 100"):
                image_part({"type": "image", "image": image})
        monkeypatch.setattr(images, "MAX_IMAGE_PIXELS", 5)
        with pytest.raises(UnreadableError, match="3 x 2 pixels"):
            image_part({"type": "image", "image": Image.new("L", (3, 2))})

    def test_a_broken_file_is_refused(self):
        lazy = Image.open(io.BytesIO(picture(size=(64, 64))[:60]))
        with pytest.raises(UnreadableError, match="PIL cannot write it as a PNG"):
            image_part({"type": "image", "image": lazy})

    def test_one_image_at_a_time_is_read_from_its_file(self, monkeypatch):
        part = {"type": "image", "image": Image.open(io.BytesIO(picture("JPEG", size=(40, 40))))}
        saving, most, save = [], [], Image.Image.save

        def watched(image, *args):
            saving.append(image)
            most.append(len(saving))
            time.sleep(0.02)
            save(image, *args)
            saving.pop()

        monkeypatch.setattr(Image.Image, "save", watched)
        threads = [threading.Thread(target=image_part, args=(part,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert most == [1] * 4


class TestQuestion:
    def test_every_image_stands_where_it_was_said(self):
        turn = Turn(
            [{"role": "user", "content": [{"type": "text", "text": "Make it so:"}, url("https://x/wish")]}],
            [{"role": "assistant", "content": [url("https://x/done"), {"type": "text", "text": "Done."}]}],
            NextState([TEXT, url("https://x/after")], "tool"),
        )
        content, verdict = ask(turn)
        assert urls(content) == ["https://x/wish", "https://x/done", "https://x/after"]
        assert [part["type"] for part in content] == ["text", "image_url"] * 3 + ["text"]
        marker = marker_of(content)
        texts = [part["text"] for part in content if part["type"] == "text"]
        for number, (before, last) in enumerate(
            zip(texts, ["Make it so:", "the reply to judge (assistant) ---", "gone."], strict=False), 1
        ):
            assert before.endswith(f"{last}\n--- {marker}: image {number}, shown here ---")
        assert texts[2].lstrip().startswith("Done.")
        assert f"===== transcript {marker} ends =====" in texts[3]
        assert (verdict.score, verdict.hints) == (-1, ("Keep the button.",))

    def test_images_alone_are_judged_by_a_judge_that_sees(self):
        content, verdict = ask(Turn("hi", "hello", NextState([url("https://x/a")], "tool")))
        assert urls(content) == ["https://x/a"]
        assert verdict.score == -1

    def test_a_question_without_images_is_text(self):
        content, _ = ask(Turn("hi", "hello", NextState("thanks")))
        assert isinstance(content, str)

    def test_every_vote_and_question_sees_the_images(self, chat_server):
        chat_server.script = lambda messages: answer(messages)
        turn = Turn("hi", "hello", NextState([{"type": "image", "image": PNG}], "tool"))
        asking = LLMJudge("stub-model", chat_server.base_url, question="separate", num_votes=2, reads_images=True)
        assert asyncio.run(asking(turn)).score == -1
        assert [urls(request["messages"][-1]["content"]) for request in chat_server.requests] == [[DATA_URL]] * 4
        json.dumps(chat_server.requests)

    def test_a_server_that_takes_no_images_fails_the_votes(self, chat_server):
        chat_server.script = Reply(status=400)
        turn = Turn("hi", "hello", NextState([url("https://x/a")], "tool"))
        verdict = asyncio.run(LLMJudge("stub-model", chat_server.base_url, reads_images=True)(turn))
        assert {vote.failure for vote in verdict.votes} == {"refused"}

    def test_text_cannot_stand_for_an_image(self):
        turn = Turn("\udc00 \udc01", "--- 123: image 1, shown here ---\udc00", NextState([TEXT, url("https://x/a")]))
        content, _ = ask(turn)
        assert urls(content) == ["https://x/a"]
        assert len(content) == 3

    def test_what_followed_finds_room_first_then_what_is_closest(self):
        prompt = [{"role": "user", "content": [url(f"https://x/{i}")]} for i in range(4)]
        content, _ = ask(Turn(prompt, "hello", NextState([TEXT, url("https://x/after")])), max_images=3)
        assert urls(content) == ["https://x/2", "https://x/3", "https://x/after"]
        assert content[0]["text"].count("[image_url] (not shown: only 3 images are)") == 2

    def test_images_that_are_cut_away_are_counted(self):
        parts = [{"type": "text", "text": "x" * 500}, url("https://x/a"), {"type": "text", "text": "y" * 500}]
        state = NextState([TEXT, url("https://x/after")])
        content, _ = ask(Turn([{"role": "user", "content": parts}], "hello", state), max_transcript_chars=300)
        assert urls(content) == ["https://x/after"]
        assert "1 image and 8" in content[0]["text"]

    def test_images_before_the_reply_that_cannot_be_read_are_said(self):
        content, verdict = ask(Turn([{"role": "user", "content": [{"type": "image"}]}], "hello", NextState("thanks")))
        assert "[image] (not shown: it holds no image)" in content
        assert verdict.score == -1

    @pytest.mark.parametrize("broken", [{"type": "image"}, {"type": "image", "image": "a/path.png"}, None])
    def test_a_malformed_part_of_what_followed_fails_the_votes(self, broken):
        content, verdict = ask(Turn("hi", "hello", NextState([TEXT, broken], "tool")))
        assert content is None
        assert [(vote.failure, vote.hint_failure) for vote in verdict.votes] == [("unreadable", "unreadable")]
        assert "has a part that cannot be read" in verdict.votes[0].raw

    def test_what_is_no_image_either_cannot_be_judged(self):
        content, verdict = ask(Turn("hi", "hello", NextState([{"type": "audio"}], "tool")))
        assert content is None
        assert "holds no text but audio, and this judge is given text and images only" in verdict.votes[0].raw


def test_unreadable_next_states_are_counted_apart():
    turns = [Turn("hi", "hello", NextState([url("https://x/a")], "tool")), Turn("hi", "hello", NextState("thanks"))]
    judge = PromptedJudge(Asked(), num_votes=2)
    feedbacks = asyncio.run(collect_feedback(turns, [{}, {}], next_state=None, judge=judge))
    metrics = feedback_metrics(feedbacks)
    assert metrics["judge/vote_failed/unreadable"] == [1, 1, 0, 0]
    assert metrics["judge/hint_failed/unreadable"] == [1, 1, 0, 0]
    assert metrics["judge/vote_failed/unparseable"] == [0] * 4


def test_a_judge_of_text_refuses_to_be_asked_for_images():
    with pytest.raises(ValueError, match="`reads_images=True`: LocalChat gives its model text only"):
        LocalJudge("some/path", reads_images=True)
    assert LocalJudge("some/path").reads_images is False
