import asyncio
import dataclasses
import subprocess
import sys

import pytest

from trl_openclaw.next_states import PERSONAS, Persona, make_persona
from trl_openclaw.types import Turn


def says(persona, reply, **kwargs):
    completion = [{"role": "assistant", "content": reply}]
    return asyncio.run(persona(Turn([{"role": "user", "content": "hi"}], completion, **kwargs), {}))


LONG = (
    "Sunlight looks white but holds every colour, from long red waves to short violet ones. When it meets air, tiny "
    "molecules scatter the short waves far more than the long ones, so blue reaches our eyes from all directions while "
    "red travels straight on. At sunset the light crosses much more atmosphere, most of its blue is lost on the way, "
    "and what remains paints the horizon orange."
)

PLEASED = [
    ("one-sentence", "The sky is blue."),
    ("one-sentence", "Use 3.5 cups, e.g. the ones Dr. Lee sells in the U.S. today!"),
    ("one-sentence", "天空是蓝色的。"),
    ("plain-text", "The sky is blue.\n\nReally *very* blue.\n```\n- **x**\n# y\n```"),
    ("plain-text", "2**3**2 is 512"),
    ("detailed", LONG),
    ("warm", "The sky is blue, and you're doing great!"),
]
ANNOYED = [
    ("one-sentence", "The sky is blue. It is big. It is far.", "that's three sentences"),
    ("one-sentence", "The sky is", "that isn't a finished sentence"),
    ("one-sentence", "word " * 30 + "word.", "that sentence runs to 31 words"),
    ("plain-text", "The **sky** is blue.", "you put words in bold"),
    ("plain-text", "It is:\n- blue", "you made a list"),
    ("plain-text", "### Sky\nIt is blue.", "you put in headings"),
    ("detailed", "The sky is blue.", "that's only four words"),
    ("detailed", "Blue.", "that's only one word"),
    ("detailed", "very " * 100, "you keep repeating yourself"),
    ("warm", "The sky is blue.", "there isn't a kind word in that"),
    *[(name, reply, "you didn't say anything") for name in PERSONAS for reply in ("", " \n")],
]


@pytest.mark.parametrize(("name", "reply"), PLEASED)
def test_pleased(name, reply):
    state = says(PERSONAS[name], reply)
    assert state.satisfied is True
    assert state.text in PERSONAS[name].thanks
    assert state.info == {"persona": name, "complaints": ()}


@pytest.mark.parametrize(("name", "reply", "complaint"), ANNOYED)
def test_annoyed_says_what_was_wrong_and_what_is_wanted(name, reply, complaint):
    state = says(PERSONAS[name], reply)
    assert state.satisfied is False
    assert state.role == "user"
    assert complaint in state.info["complaints"]
    assert complaint.lower() in state.text.lower()
    assert any(wish in state.text for wish in PERSONAS[name].wishes)
    assert "$" not in state.text


def test_a_truncated_turn_never_pleases_who_wants_a_whole_sentence():
    state = says(PERSONAS["one-sentence"], "The sky is blue.", truncated=True)
    assert state.satisfied is False
    assert "you stopped in the middle" in state.text.lower()
    assert not PERSONAS["one-sentence"].satisfied(Turn("p", "The sky is blue.", truncated=True))


def test_several_complaints_are_joined():
    assert "you put words in bold and you made a list" in says(PERSONAS["plain-text"], "- **a**").text.lower()


@pytest.mark.parametrize("name", PERSONAS)
def test_answers_vary_with_the_reply(name):
    good = {"detailed": LONG, "warm": "Well done: "}.get(name, "")
    assert len({says(PERSONAS[name], f"- **it** is {n}. So.").text for n in range(30)}) >= 10
    pleased = [says(PERSONAS[name], f"{good}It is {n}.") for n in range(30)]
    assert all(state.satisfied for state in pleased)
    assert len({state.text for state in pleased}) >= 3


def test_the_same_reply_gets_the_same_answer_in_another_process():
    code = (
        "import asyncio; from trl_openclaw.next_states import PERSONAS; from trl_openclaw.types import Turn;"
        "print(asyncio.run(PERSONAS['one-sentence'](Turn('p', 'A. \\ud83d B. C'), {})).text)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_settings_reach_detector_and_words():
    persona = make_persona("detailed", min_words=3)
    assert says(persona, "It is blue.").satisfied
    assert "3 words" in persona.description
    assert not says(make_persona("one-sentence", max_words=2), "It is blue.").satisfied
    assert not says(make_persona("warm", min_phrases=2), "Well done.").satisfied


def test_unknown_names_and_settings_are_refused():
    with pytest.raises(ValueError, match="plain-text"):
        make_persona("grumpy")
    with pytest.raises(ValueError, match="max_words"):
        make_persona("one-sentence", min_words=3)


def test_own_persona_with_a_yes_or_no_detector():
    shy = Persona("shy", "You like $5 questions {x}.", lambda turn: turn.reply.endswith("?"), wishes=("Ask me $1.",))
    assert says(shy, "And you?").satisfied
    state = says(shy, "Me.")
    assert (state.text, state.satisfied) == ("Ask me $1.", False)
    grumbling = dataclasses.replace(shy, detector=lambda turn: ["that's $wish"])
    assert "hat's $wish" in says(grumbling, "Me.").text


def test_a_persona_needs_words():
    with pytest.raises(ValueError, match="wish"):
        Persona("mute", "d", lambda turn: True, wishes=())
