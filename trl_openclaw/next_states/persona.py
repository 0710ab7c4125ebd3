"""Scripted users: each wants one thing of a reply, notices whether it got it, and says so in its own words."""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Template
from typing import Any

from ..types import NextState, Turn
from . import detectors

Detector = Callable[[Turn], bool | Sequence[str]]

_OPENERS = (
    "Hmm, $complaint. $wish",
    "$Complaint. $wish",
    "Sorry, but $complaint. $wish",
    "Well, $complaint. $wish",
    "$wish I mean, $complaint.",
)
_THANKS = (
    "Perfect, thanks.",
    "Great, that's just what I wanted.",
    "Thank you, exactly like that.",
    "Nice, keep it like this please.",
    "Yes, that's how I like it.",
)


@dataclass(frozen=True)
class Persona:
    """A scripted user, and a next-state provider that knows for sure whether a reply pleased.

    The same reply to the same persona always gets the same answer; different replies get different wordings.

    Args:
        name: A short name.
        description: What the person wants, in words that can also tell a model whom to play.
        detector: Looks at a turn and lists what is wrong with it, each complaint a clause such as `"that's a list"`;
            nothing means satisfied. May give a plain bool instead, `True` for satisfied.
        wishes: Sentences that say what is wanted; one is used per complaint.
        thanks: Answers to a reply that pleased.
    """

    name: str
    description: str
    detector: Detector
    wishes: tuple[str, ...]
    thanks: tuple[str, ...] = _THANKS

    def __post_init__(self):
        if not self.wishes or not self.thanks:
            raise ValueError(f"The persona {self.name!r} needs at least one wish and one thanks.")

    async def __call__(self, turn: Turn, row: Mapping[str, Any]) -> NextState:
        """Answer the reply. `info` holds the persona's name, the complaints and, in a complaining answer, the wish."""
        satisfied, complaints = self._look(turn)
        info: dict[str, Any] = {"persona": self.name, "complaints": complaints}
        if satisfied:
            return NextState(self._pick(self.thanks, turn, "thanks"), satisfied=True, info=info)
        wish = self._pick(self.wishes, turn, "wish")
        return NextState(self._complain(complaints, wish, turn), satisfied=False, info={**info, "wish": wish})

    def satisfied(self, turn: Turn) -> bool:
        """Whether the reply has what this person wants."""
        return self._look(turn)[0]

    def _look(self, turn: Turn) -> tuple[bool, tuple[str, ...]]:
        found = self.detector(turn)
        return (found, ()) if isinstance(found, bool) else (not found, tuple(found))

    def _complain(self, complaints: Sequence[str], wish: str, turn: Turn) -> str:
        if not complaints:
            return wish
        complaint = " and ".join(complaints)
        opener = Template(self._pick(_OPENERS, turn, "opener"))
        return opener.substitute(complaint=complaint, Complaint=complaint[:1].upper() + complaint[1:], wish=wish)

    def _pick(self, choices: Sequence[str], turn: Turn, what: str) -> str:
        """A choice that depends on the persona and the reply alone. Python's own hash differs from run to run."""
        key = "\0".join((self.name, what, turn.reply)).encode("utf-8", "surrogatepass")
        return choices[int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) % len(choices)]


def one_sentence(max_words: int = 30) -> Persona:
    """Wants one short sentence, whole.

    Args:
        max_words: The longest sentence that still counts as short. 30 words are about 40 tokens, two lines of a chat
            window. A turn cut at the length limit never pleases, whatever its text looks like.
    """

    def detect(turn: Turn) -> list[str]:
        sentences = detectors.split_sentences(turn.reply)
        words = detectors.count_words(turn.reply)
        if not sentences:
            return ["you didn't say anything"]
        complaints = []
        if len(sentences) > 1:
            complaints.append(f"that's {detectors.number_word(len(sentences))} sentences")
        elif words > max_words:
            complaints.append(f"that sentence runs to {words} words")
        if turn.truncated:
            complaints.append("you stopped in the middle")
        elif not detectors.is_complete(turn.reply):
            complaints.append("that isn't a finished sentence")
        return complaints

    return Persona(
        name="one-sentence",
        description=(
            f"You like answers that are one short sentence: a single complete sentence of at most {max_words} words. "
            "Anything longer, and anything that breaks off, annoys you."
        ),
        detector=detect,
        wishes=(
            "Please answer in one short sentence.",
            "Please answer me in one short sentence.",
            "Please answer in just one short sentence.",
            "Next time, please answer in one short sentence.",
            "Please answer in one short sentence, no more.",
        ),
    )


def plain_text() -> Persona:
    """Wants no bold, no lists and no headings; code fences, links and other Markdown are fine."""

    def detect(turn: Turn) -> list[str]:
        if not turn.reply.strip():
            return ["you didn't say anything"]
        found = (
            (detectors.has_bold(turn.reply), "you put words in bold"),
            (detectors.has_list(turn.reply), "you made a list"),
            (detectors.has_heading(turn.reply), "you put in headings"),
        )
        return [complaint for present, complaint in found if present]

    return Persona(
        name="plain-text",
        description=(
            "You read answers as plain running text. Bold words, bulleted or numbered lists and headings bother you; "
            "code blocks are fine."
        ),
        detector=detect,
        wishes=(
            "Please write plain sentences, without bold, lists or headings.",
            "I'd rather read ordinary paragraphs with no formatting.",
            "Just plain text for me: no bold, no lists, no headings.",
            "Could you put that in normal prose instead?",
            "No bold, bullet points or headings, please.",
        ),
    )


def detailed(min_words: int = 60) -> Persona:
    """Wants detail.

    Args:
        min_words: The fewest words that count as detailed. A third as many must differ, so that repeating does not pay.
    """

    def detect(turn: Turn) -> list[str]:
        words = detectors.count_words(turn.reply)
        if not words:
            return ["you didn't say anything"]
        if words < min_words:
            return [f"that's only {detectors.number_word(words)} word{'s' * (words != 1)}"]
        return ["you keep repeating yourself"] if 3 * detectors.count_distinct_words(turn.reply) < min_words else []

    return Persona(
        name="detailed",
        description=(
            f"You want thorough answers of at least {min_words} words that explain the reasons and give examples. "
            "Short answers leave you unsatisfied."
        ),
        detector=detect,
        wishes=(
            f"I'd like at least {min_words} words of real detail.",
            "Please explain it more fully, with reasons and an example.",
            "Could you go deeper and tell me the whole story?",
            f"Please elaborate, {min_words} words or more.",
            "I was hoping for a longer, more detailed answer.",
        ),
    )


def warm(min_phrases: int = 1) -> Persona:
    """Wants warm, encouraging words. Knows English ones only.

    Args:
        min_phrases: The fewest different warm phrases or emoji.
    """

    def detect(turn: Turn) -> list[str]:
        if not turn.reply.strip():
            return ["you didn't say anything"]
        found = detectors.warm_phrases(turn.reply)
        if len(found) >= min_phrases:
            return []
        return ["that could be a bit warmer"] if found else ["there isn't a kind word in that"]

    return Persona(
        name="warm",
        description=(
            "You want to be talked to warmly, with kind and encouraging words, as by a friend. Dry facts without a "
            "friendly word leave you feeling brushed off."
        ),
        detector=detect,
        wishes=(
            "Please be warm and encouraging when you talk to me.",
            "A few kind, encouraging words would help.",
            "Could you say it the way a good friend would?",
            "I'd like some warmth and encouragement with the answer.",
            "Please cheer me on a little.",
        ),
    )


PERSONA_BUILDERS: dict[str, Callable[..., Persona]] = {
    "one-sentence": one_sentence,
    "plain-text": plain_text,
    "detailed": detailed,
    "warm": warm,
}

PERSONAS: dict[str, Persona] = {name: build() for name, build in PERSONA_BUILDERS.items()}
"""The scripted users with their default settings."""


def make_persona(name: str, **overrides: Any) -> Persona:
    """A scripted user with other settings than the defaults.

    Args:
        name: A key of `PERSONAS`.
        overrides: Settings of that persona, such as `min_words=100` for `"detailed"`.

    Raises:
        ValueError: When there is no such persona, or it has no such setting.
    """
    if name not in PERSONA_BUILDERS:
        raise ValueError(f"There is no persona {name!r}; choose from {sorted(PERSONA_BUILDERS)}.")
    known = list(inspect.signature(PERSONA_BUILDERS[name]).parameters)
    unknown = sorted(set(overrides) - set(known))
    if unknown:
        raise ValueError(f"The persona {name!r} has no setting {', '.join(unknown)}; it has {known or 'none'}.")
    return PERSONA_BUILDERS[name](**overrides)
