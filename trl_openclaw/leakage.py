"""What a hinted teacher can teach by accident: does a reply speak of a hint that the student was never shown?"""

import re
import unicodedata
from collections.abc import Hashable, Iterator, Sequence

_HINT = "(?:the|your)(?: above)? hints?"
_BY = "(?:according to|based on|per|given|following|considering|in line with)"
_SAYS = "(?:says?|said|suggests?|suggested|mentions?|states?|indicates?|asks?|asked|requests?|requested|tells?|told)"
_SAID = "(?:noted|mentioned|stated|said|suggested|requested|instructed|indicated|asked)"
# Feedback is a subject of its own in many conversations, so the word counts only where it was handed over.
_HANDED = "(?:above|(?:i was|i have been|ive been) (?:given|shown)|you (?:gave|showed) me|provided to me)"

HINT_PHRASES = (
    rf"{_BY} {_HINT}",
    rf"as {_HINT} {_SAYS}",
    rf"as {_SAID} (?:in|by) {_HINT}",
    rf"{_HINT} (?:asks|asked|tells|told|wants|wanted|instructs|instructed) me to",
    rf"you (?:asked|told|wanted|instructed) me to [^.!?]{{1,100}} (?:in|with) {_HINT}",
    rf"i was (?:given|shown) {_HINT}",
    rf"{_HINT} {_HANDED}",
    rf"(?:{_BY} the above feedback|(?:the|your) feedback {_HANDED})",
)
"""How a reply in English speaks of a hint as of something that was handed to it. Asking for one, offering or giving one
is none of these. Patterns over text in lower case and single spaces, without apostrophes, quotation marks, brackets and
Markdown's emphasis."""

_MENTION = re.compile(rf"\b(?:{'|'.join(HINT_PHRASES)})\b")
_NOUNS = ("hint", "feedback")
_APOSTROPHES = "'’‘ʼ`´"
_LEFT_OUT = str.maketrans(dict.fromkeys(_APOSTROPHES + '"“”„«»()[]*_~'))

# Scripts written without spaces between words, and how many of their characters a word has, roughly.
_KANA_AND_HAN = (
    "[\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff]"
)
_SOUTHEAST_ASIAN = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]"
_SPACELESS = ((2, re.compile(_KANA_AND_HAN)), (4, re.compile(_SOUTHEAST_ASIAN)))
_FEWEST_WORDS = 3


def mentions_hint(reply: str, prompt_text: str = "") -> bool:
    """Whether a reply speaks of a hint, or of feedback, as something that it was handed.

    Args:
        reply: The completion's text.
        prompt_text: What the student was shown. A reply may speak of a hint that the prompt speaks of, too.

    Returns:
        Whether one of `HINT_PHRASES` stands in the reply, and its noun not in the prompt. English only.
    """
    text = _plain(reply)
    shown = prompt_text.casefold()
    nouns = [noun for noun in _NOUNS if noun in text and noun not in shown]
    return bool(nouns) and any(noun in match[0] for match in _MENTION.finditer(text) for noun in nouns)


def _plain(text: str) -> str:
    """The text as `HINT_PHRASES` reads it."""
    return " ".join(text.casefold().translate(_LEFT_OUT).split())


def repeats_hint(reply: str, hint: str, prompt_text: str, n: int = 5) -> bool:
    """Whether a reply repeats words of its hint that it cannot have from the prompt.

    Words are runs of letters, digits and the marks on them, in any script and whatever the case. Where more than half
    of a hint's letters belong to a script without spaces between words, characters are counted instead: two for a word
    in Chinese and Japanese, four in Thai, Lao, Khmer and Burmese.

    Args:
        reply: The completion's text.
        hint: The hint that the teacher saw.
        prompt_text: What the student was shown.
        n: Words in a row that make a repetition. A shorter hint counts as a whole, from three words on; one that is
            shorter still, never.

    Raises:
        ValueError: When `n` is not positive.
    """
    if n < 1:
        raise ValueError(f"`n` is a number of words and must be at least 1, got {n}.")
    per_word = _characters_per_word(hint)
    units = _characters if per_word else _words
    wanted = units(hint)
    n, fewest = n * (per_word or 1), _FEWEST_WORDS * (per_word or 1)
    if len(wanted) < n:
        n = max(len(wanted), fewest)
    unseen = set(_runs(wanted, n))
    unseen.difference_update(_runs(units(prompt_text), n))
    return bool(unseen) and not unseen.isdisjoint(_runs(units(reply), n))


def _characters_per_word(text: str) -> int:
    """How many characters make a word where most letters are of a script without spaces; 0 where words are apart."""
    letters = len(_characters(text))
    found = [(len(pattern.findall(text)), per_word) for per_word, pattern in _SPACELESS]
    return max(found)[1] if 2 * sum(count for count, _ in found) > letters else 0


class _Kept(dict[int, str]):
    """What becomes of each character, for `str.translate`; filled as characters are met."""

    def __missing__(self, code: int) -> str:
        category = unicodedata.category(chr(code))
        if category == "Cf" or chr(code) in _APOSTROPHES:  # invisible, or inside a word
            kept = ""
        else:
            kept = chr(code) if category[0] in "LMN" else " "
        self[code] = kept
        return kept


_KEPT = _Kept()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.casefold().translate(_KEPT).split())


def _characters(text: str) -> str:
    return "".join(_words(text))


def _runs(units: Sequence[str], n: int) -> Iterator[Hashable]:
    return (units[i : i + n] for i in range(len(units) - n + 1))


def leakage_metrics(
    replies: Sequence[str], hints: Sequence[str | None], prompts: Sequence[str]
) -> dict[str, list[float]]:
    """Numbers for the logs, one per row, whose plain means are the shares. Both keys are there every time.

    | key | mean over | is the share that |
    |---|---|---|
    | `leak/mentions_hint` | rows | speaks of a hint that the prompt does not speak of (`mentions_hint`) |
    | `leak/repeats_hint` | rows with a hint | repeats it word for word (`repeats_hint`) |

    Args:
        replies: The completions' texts.
        hints: The hint that the teacher saw for each; `None` or blank where there was none.
        prompts: The texts that the student was shown.

    Raises:
        ValueError: When the three differ in number.
    """
    if not len(replies) == len(hints) == len(prompts):
        raise ValueError(
            f"There are {len(replies)} replies, {len(hints)} hints and {len(prompts)} prompts; give one of each per "
            "row, and None for a row without a hint."
        )
    rows = list(zip(replies, hints, prompts, strict=True))
    return {
        "leak/mentions_hint": [float(mentions_hint(reply, prompt)) for reply, _, prompt in rows],
        "leak/repeats_hint": [
            float(repeats_hint(reply, hint, prompt)) for reply, hint, prompt in rows if hint and hint.strip()
        ],
    }
