import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw.leakage import leakage_metrics, mentions_hint, repeats_hint

HINT = "Answer in one short sentence without any bullet points."


@pytest.mark.parametrize(
    "reply",
    [
        "As the hint says, I will be brief.",
        "as your\n  HINT\tsuggested: short.",
        "Sure! According to the hint, the answer is 4.",
        "According to the **hint**, the answer is 4.",
        "According to the “hint”, the answer is 4.",
        "Based on the hint above, I left the list out.",
        "Based on the feedback above, I left the list out.",
        "Based on the above feedback, I left the list out.",
        "As per your hint, here it is.",
        "As requested in the hint, no list this time.",
        "The hint asks me to answer in one sentence.",
        "You asked me to keep it short in the hint, so I do.",
        "You asked me to keep it short (in the hint).",
        "I was given the hint that you like short answers.",
        "Following the hint I've been shown, I keep it short.",
        "The feedback I’ve been given is clear.",
        "Thanks, your feedback I've been shown helps.",
        "The hint provided to me was: be brief.",
    ],
)
def test_speaks_of_a_hint_it_was_handed(reply):
    assert mentions_hint(reply)
    assert mentions_hint(f"The answer is 4.\n\n{reply}\n\nAnything else?")


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "The answer is 4.",
        "Give me a hint!",
        "Here's a hint: it is round and yellow.",
        "Hint: think of a fruit.",
        "Would you like the hint or the answer?",
        "Should I say what the hints are?",
        "The hint is in the title of the riddle.",
        "He dropped a hint. According to the police, she took it.",
        "There was a hint of lemon, as the menu says.",
        "Based on the hinterland's climate, yes.",
        "According to the feedback of 300 users, the button is too small.",
        "Reflect on the feedback you gave your team.",
        "You asked me to be brief. The hint: it flies.",
        "Type hints tell the reader what a function takes.",
        "I could not have solved it without hints.",
    ],
)
def test_a_hint_as_a_subject_is_none(reply):
    assert not mentions_hint(reply)


def test_what_the_prompt_speaks_of_may_be_spoken_of():
    assert not mentions_hint("According to the hint, it is a lemon.", "My HINT: it is sour. What is it?")
    assert mentions_hint("According to the hint, it is a lemon.", "It is sour. What is it?")
    assert mentions_hint("According to the hint, yes.", "My boss gave me feedback.")  # another word
    assert not mentions_hint("The feedback above is fair.", "My boss gave me feedback.")


@pytest.mark.parametrize(
    ("reply", "repeated"),
    [
        ("I will answer in one short sentence.", True),
        ("answer, IN ONE: *short* SENTENCE", True),
        ("I will answer in one short line.", False),  # four words
        ("in short sentence one answer", False),  # another order
        ("An answer in one short sentence? No, in five.", True),
        ("Yes.", False),
        ("", False),
    ],
)
def test_five_words_in_a_row(reply, repeated):
    assert repeats_hint(reply, HINT, "What is 2 + 2?") is repeated


def test_what_stands_in_the_prompt_is_not_repeated_from_the_hint():
    prompt = "Please answer in one short sentence: what is 2 + 2?"
    assert not repeats_hint("You said: answer in one short sentence. So: 4.", HINT, prompt)
    assert repeats_hint("An answer in one short sentence without any list.", HINT, prompt)  # goes on where it ends


def test_the_number_of_words_can_be_set():
    assert repeats_hint("one short sentence", HINT, "", n=3)
    assert not repeats_hint("one short line", HINT, "", n=3)
    with pytest.raises(ValueError, match=r"`n` is a number of words and must be at least 1, got 0\."):
        repeats_hint("a", "b", "c", n=0)


@pytest.mark.parametrize(
    ("hint", "reply", "repeated"),
    [
        ("Use fewer words", "I will use fewer words.", True),
        ("Use fewer words", "I will use fewer lines.", False),
        ("Be brief", "I will be brief.", False),  # too common to tell
        ("...", "...", False),
        ("", "anything", False),
    ],
)
def test_a_short_hint_counts_as_a_whole(hint, reply, repeated):
    assert repeats_hint(reply, hint, "") is repeated


@pytest.mark.parametrize(
    ("hint", "reply", "repeated"),
    [
        ("Don't use any bullet points", "I don’t use any bullet points.", True),
        ("Écris une seule phrase courte", "J'ÉCRIS une SEULE phrase courte", False),  # J'écris is another word
        ("Écris une seule phrase courte", "ÉCRIS une SEULE phrase courte", True),
        ("छोटे वाक्य में उत्तर दो", "हाँ, छोटे वाक्य में उत्तर दो।", True),
        ("छोटे वाक्य में उत्तर दो", "छोटे वाक्य में उत्तर", False),
        ("한 문장으로 짧게 대답해 주세요", "네, 한 문장으로 짧게 대답해 주세요.", True),
        ("请用一个简短的句子回答问题", "好的,请用一个简短的句子回答。", True),  # ten characters are five words
        ("请用一个简短的句子回答问题", "一个简短的句子回答", False),  # nine
        ("请简短地回答", "请简短地回答", True),  # six characters are three words
        ("请简短答", "请简短答", False),
        ("請用 Python 寫一個簡單的程式", "我會請用 Python 寫一個簡單的程式", True),  # more Chinese than Latin
        ("ひとつの短い文で答えてください", "はい、ひとつの短い文で答えます。", True),
        ("กรุณาตอบเป็นประโยคสั้น ๆ เพียงประโยคเดียว", "กรุณาตอบเป็นประโยคสั้น ๆ ครับ", True),
        ("กรุณาตอบเป็นประโยคสั้น ๆ เพียงประโยคเดียว", "ตอบเป็นประโยคครับ", False),  # one or two words
    ],
)
def test_other_languages(hint, reply, repeated):
    assert repeats_hint(reply, hint, "") is repeated


def test_metrics_are_shares_of_their_own_rows():
    replies = ["As the hint says: 4.", "Use fewer words", "Use fewer words", "4", "According to the hint, 4."]
    hints = ["Be brief, please, always", "Use fewer words", None, " ", None]
    prompts = ["?", "?", "?", "?", "My hint is even."]
    assert leakage_metrics(replies, hints, prompts) == {
        "leak/mentions_hint": [1.0, 0.0, 0.0, 0.0, 0.0],
        "leak/repeats_hint": [0.0, 1.0],
    }
    assert leakage_metrics([], [], []) == {"leak/mentions_hint": [], "leak/repeats_hint": []}


def test_metrics_need_one_of_each_per_row():
    with pytest.raises(ValueError, match="There are 2 replies, 1 hints and 2 prompts; give one of each per row"):
        leakage_metrics(["a", "b"], [None], ["a", "b"])


def seconds(function, *args) -> float:
    started = time.process_time()
    function(*args)
    return time.process_time() - started


MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    "piece", ["a", " \n", "the hint ", "you asked me to ", "based on the ", "as as as ", "中", "ก็", "'", "é́ ", "{} "]
)
def test_time_grows_with_the_length_of_the_text_and_no_faster(piece):
    def both(text):
        mentions_hint(text + " hint")
        repeats_hint(text, HINT, text)
        repeats_hint(text, text[:-1] + "x", text)
        repeats_hint(text, "请用一个简短的句子回答问题", text)

    count = MEGABYTE // len(piece.format(100_000))
    whole = "".join(piece.format(i) for i in range(count))
    both(whole[:1000])  # fills what is kept between calls
    tenth = min(seconds(both, whole[: MEGABYTE // 10]) for _ in range(2))
    assert seconds(both, whole) < 40 * max(tenth, 0.02)  # 10 if linear, 100 if quadratic


WORDS = st.lists(st.sampled_from(["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]), max_size=12)


@given(WORDS, WORDS, WORDS)
def test_a_repetition_is_a_run_of_words_in_reply_and_hint_but_not_in_the_prompt(reply, hint, prompt):
    n = 5 if len(hint) >= 5 else len(hint)

    def runs(words):
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    expected = n >= 3 and bool(runs(reply) & runs(hint) - runs(prompt))
    assert repeats_hint(" ".join(reply), " ".join(hint), " ".join(prompt)) is expected


@given(st.text(), st.text(), st.text())
def test_any_text_has_an_answer_and_the_prompt_only_excuses(reply, hint, prompt):
    assert repeats_hint(reply, hint, "") or not repeats_hint(reply, hint, prompt)
    assert mentions_hint(reply) or not mentions_hint(reply, prompt)
    assert not repeats_hint(hint, hint, hint)


@given(st.text(), st.text(), st.sampled_from([" ", "\n", "\t \u00a0"]))
def test_what_stands_around_a_mention_does_not_hide_it(before, after, space):
    # A space apart, and no sign on either side that would go on with its first or last word.
    assert mentions_hint(f"{before}.{space}According{space}to the Hint, {after}")
