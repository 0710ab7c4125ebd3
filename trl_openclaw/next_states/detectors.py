"""What a scripted user notices about a reply: small pure functions from text to facts.

They read Markdown the way a person sees it rendered, and lean towards what is meant: `2**3**2` is no bold text,
`**注意：**内容` is.
"""

import re
import unicodedata


def _words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Titles and the like, always followed by more of the same sentence.
_NEVER_END = _words_of("dr mr mrs ms mx prof rev messrs e.g i.e vs cf viz approx")
# These end a sentence only when the next word looks like the start of one.
_MAY_END = _words_of(
    "etc jr sr inc ltd co corp dept est bros st mt ft lt sgt capt gov sen rep gen col hon jan feb mar apr jun jul aug "
    "sep sept oct nov dec a.m p.m ph.d b.c a.d"
)
# Short for something only in front of a number: "No. 5".
_BEFORE_NUMBER = _words_of("no nos fig figs vol p pp ch sec art eq")
_OPENERS = _words_of(
    "a an and another but for he her here his how however i if in it it's its let my no next of on once or our she so "
    "some that that's the their then there there's these they this those to we what when where which who why yes you "
    "your"
)

_QUOTES = "\"'”’»」』)]"
_CLOSERS = _QUOTES + "}*_~`"
_AFTER = f"[{re.escape(_CLOSERS)}]*"
# A stop is a run of marks with what closes after it. Latin marks need a space next ("3.5", "a.b"), wide ones do not.
_STOP = re.compile(rf"(?:[.!?…‽؟۔।]+(?={_AFTER}(?:\s|$))|[。！？｡]+)[.!?…。！？｡]*(?P<closers>{_AFTER})")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`)((?:(?!\n[ \t]*\n).)+?)(?<!`)\1(?!`)", re.DOTALL)
_LIST_MARKER = re.compile(
    r"^[ \t]*(?:>[ \t]*)*(?:(?:[-*+]|\(?\d{1,3}[.)]|\(?[a-zA-Z]\)|\d\ufe0f?\u20e3)(?=[ \t]|$)|[•‣◦▪●○∙])[ \t]*"
)
_HEADING = re.compile(r"^[ \t]*(?:>[ \t]*)*#{1,6}(?:[ \t]+\S|[ \t]*$)", re.MULTILINE)
_UNDERLINED_HEADING = re.compile(r"^(?=.*\w)(?![ \t]*[-*+>|]).+\n {0,3}(?:={2,}|-{2,})[ \t]*$", re.MULTILINE)
_DECORATION = ("Zs", "Cc", "So", "Sk", "Cf", "Mn")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]|[\U00020000-\U0003ffff]")
_NUMBER_WORDS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


def number_word(n: int) -> str:
    """A count as a person writes it: in letters up to twelve."""
    return _NUMBER_WORDS[n] if 0 <= n < len(_NUMBER_WORDS) else str(n)


def strip_code(text: str) -> str:
    """The text with fenced blocks (a paragraph each) and code spans replaced by the word `code`.

    An unclosed fence runs to the end, as it does when rendered.
    """
    lines: list[str] = []
    fence = ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        if not fence and found and not (found[1][0] == "`" and "`" in line[found.end() :]):
            fence = found[1]
            lines += ["", "code", ""]
        elif fence and found and found[1].startswith(fence) and not line[found.end() :].strip():
            fence = ""
        elif not fence:
            lines.append(line)
    return _CODE_SPAN.sub("code", "\n".join(lines))


def count_words(text: str) -> int:
    """The number of words. Two Han or kana characters count as one word, since those scripts use no spaces."""
    unspaced = len(_UNSPACED.findall(text))
    lines = (_LIST_MARKER.sub("", line) for line in _UNSPACED.sub(" ", text).splitlines())
    return sum(len(_words(line)) for line in lines) + (unspaced + 1) // 2


def _words(text: str) -> list[str]:
    """The words, casefolded: whatever stands between spaces, dashes and such, and has a letter or digit."""
    pieces = re.split(r"[\s—–/…;]+|,(?!\d)|\.{2,}|--+", text)
    return [piece.casefold() for piece in pieces if any(c.isalnum() for c in piece)]


def count_distinct_words(text: str) -> int:
    """The number of different words, so that repeating oneself adds nothing. Counted as in `count_words`."""
    unspaced = len(set(_UNSPACED.findall(text)))
    words = {word.strip("\"'“”‘’.,:!?()[]*_`") for word in _words(_UNSPACED.sub(" ", text))}
    return len(words) + (unspaced + 1) // 2


def split_sentences(text: str) -> list[str]:
    """The sentences of a reply, whole or broken off.

    Args:
        text: The reply. Code counts as the word `code`; list markers do not count; a blank line, a list item and a
            heading each start a new sentence, a single line end does not.

    Returns:
        The sentences in order, markers dropped. Pieces without a letter or digit (emoji, rules) are not sentences.
    """
    sentences: list[str] = []
    for block in _blocks(strip_code(text)):
        start = 0
        for stop in _STOP.finditer(block):
            if _is_boundary(block, start, stop):
                sentences.append(block[start : stop.end()].strip())
                start = stop.end()
        sentences.append(block[start:].strip())
    return [sentence for sentence in sentences if any(c.isalnum() for c in sentence)]


def _blocks(text: str) -> list[str]:
    """Paragraphs, list items and headings, without their markers."""
    blocks = [""]
    for line in text.splitlines():
        heading = bool(_HEADING.match(line))
        marker = _LIST_MARKER.match(line)
        if heading or marker or not line.strip():
            blocks.append("")
        content = _LIST_MARKER.sub("", line) if marker else line
        blocks[-1] += (" " if blocks[-1] else "") + content.strip(" \t#" if heading else " \t")
        if heading:
            blocks.append("")
    return blocks


def _is_boundary(block: str, start: int, stop: re.Match[str]) -> bool:
    """Whether a stop ends its sentence, or only an abbreviation, a quotation or a pause."""
    rest = block[stop.end() :]
    following = re.match(r"[\W_]*([\w'’]*)", rest)
    word = following[1].replace("’", "'") if following else ""
    if any(c in _QUOTES for c in stop["closers"]) and (word[:1].islower() or rest[:1].isalnum()):
        return False
    marks = stop[0][: len(stop[0]) - len(stop["closers"])]
    if marks != ".":
        pause = (len(marks) > 1 and not marks.strip(".…")) or marks == "…"
        return not (pause and word[:1].islower())
    before = re.search(r"[\w.]*$", block[start : stop.start()])
    token = before[0] if before else ""
    if token.casefold() in _NEVER_END:
        return not word
    if token.casefold() in _BEFORE_NUMBER and word[:1].isdigit():
        return False
    initials = re.fullmatch(r"(?:[^\W\d_]\.)+[^\W\d_]", token) or (len(token) == 1 and token.isupper())
    if initials or token.casefold() in _MAY_END:
        return not word or (word[0].isupper() and word.casefold() in _OPENERS)
    return True


def is_complete(text: str) -> bool:
    """Whether the text ends with a stop; closing quotes, brackets, marks of emphasis and emoji may follow it."""
    end = len(text)
    while end and (text[end - 1] in _CLOSERS or unicodedata.category(text[end - 1]) in _DECORATION):
        end -= 1
    lines = text[:end].splitlines()
    if not lines or not _LIST_MARKER.sub("", lines[-1]):
        return False
    return lines[-1][-1] in ".!?…‽؟۔।。！？｡"


def has_bold(text: str) -> bool:
    """Whether something is set in bold, by `**`, `__` or HTML. `2**3**2`, `snake__case` and code are not."""
    text = _visible(text)
    if re.search(r"<(?:b|strong)>", text, re.IGNORECASE):
        return True
    return any(_has_strong(paragraph, mark) for paragraph in re.split(r"\n[ \t]*\n", text) for mark in "*_")


def _has_strong(paragraph: str, mark: str) -> bool:
    """Whether a run of two or more marks opens strong emphasis and a later one closes it."""
    opened = False
    for run in re.finditer(rf"{re.escape(mark)}{{2,}}", paragraph):
        before, after = paragraph[run.start() - 1 : run.start()], paragraph[run.end() : run.end() + 1]
        joins = _is_plain(before, mark) and _is_plain(after, mark)
        can_close = bool(before.strip()) and unicodedata.category(before) not in ("Ps", "Pi") and not joins
        can_open = bool(after.strip()) and after not in ".,;:!?)]}" and not joins
        if mark == "_":
            can_close, can_open = can_close and not after.isalnum(), can_open and not before.isalnum()
        if opened and can_close:
            return True
        opened = opened or can_open
    return False


def _is_plain(char: str, mark: str) -> bool:
    """Whether a mark next to this character may be part of a word. Scripts without spaces do set bold mid-word."""
    return char.isalnum() and (char.isascii() or mark == "_")


def has_list(text: str) -> bool:
    """Whether a line is a list item: `-`, `*`, `+`, `1.`, `1)`, `a)`, a bullet character, or an HTML item."""
    text = _visible(text)
    if re.search(r"<(?:li|ul|ol)>", text, re.IGNORECASE):
        return True
    markers = ((_LIST_MARKER.match(line), line) for line in text.splitlines())
    return any(marker and any(c.isalnum() for c in line[marker.end() :]) for marker, line in markers)


def has_heading(text: str) -> bool:
    """Whether there is a heading of any level: `#` to `######`, underlined, or HTML. `#hashtag` is none."""
    text = _visible(text)
    return bool(
        _HEADING.search(text) or _UNDERLINED_HEADING.search(text) or re.search(r"<h[1-6]>", text, re.IGNORECASE)
    )


def _visible(text: str) -> str:
    """The text without code, and with escaped marks made harmless."""
    return re.sub(r"\\([\\*_#\-+.)`])", "\ufffc", strip_code(text))


_KIND = "good|great|nice|amazing|awesome|excellent|wonderful|lovely|brilliant|fantastic|exciting"
_WARM = re.compile(
    rf"\b(?:well done|(?:{_KIND}) (?:job|work|question|idea|start|choice|effort|luck|news)"
    rf"|(?:that's|how|what an?) (?:\w+ )?(?:{_KIND})|best of luck|best wishes|congrat\w*|you(?:'ve)? got this"
    r"|you can (?:absolutely |totally |definitely )?do (?:it|this)|you'll (?:do great|be fine|get there)"
    r"|you(?:'re| are) (?:doing|not alone|on the right track|capable|welcome)|keep (?:going|at it)|keep (?:it )?up"
    r"|don't worry|no worries|take care|take your time|proud of you|be proud|believe in you|rooting for you"
    r"|(?:happy|delighted|glad) (?:to|you|that|for)|my pleasure|with pleasure|so sorry|sorry to hear|here for you"
    r"|here to help|hang in there|cheer up|thank you|thanks for|i(?:'m| am) (?:so |very )?(?:happy|glad|excited)"
    r"|warm (?:wishes|regards|hug)|i hope|hope (?:this|that|you)|one step at a time|enjoy (?:it|your|every)"
    r"|it's (?:(?:completely |totally |perfectly )?(?:okay|ok|normal|fine)) to)\b|[❤💛💖💕💙💚🤗😊🙂🎉💪🙌🥰👏🌟✨]",
    re.IGNORECASE,
)
_NEGATED = re.compile(r"\b(?:not|never|no|hardly|isn't|aren't|wasn't|won't|can't|don't)\W+(?:\w+\W+)?$", re.IGNORECASE)


def warm_phrases(text: str) -> list[str]:
    """The different warm or encouraging phrases and emoji in an English reply, in order; negated ones do not count."""
    text = text.replace("’", "'")
    found = (m for m in _WARM.finditer(text) if not _NEGATED.search(text[: m.start()]))
    return list(dict.fromkeys(m[0].casefold() for m in found))
