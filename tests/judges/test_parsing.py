import re
import time
import unicodedata

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trl_openclaw.errors import ParseError
from trl_openclaw.judges.parsing import parse_hint, parse_score

MARKER = "ab12cd34ef"


def failure(parse, *args) -> str:
    with pytest.raises(ParseError) as caught:
        parse(*args)
    return caught.value.kind


def outcome(parse, *args):
    try:
        return parse(*args)
    except ParseError as error:
        return f"ParseError: {error.kind}"


def filled(text: str) -> str:
    """`text` with M for the marker, to keep the cases short."""
    return re.sub("(?<=[-–_－])M", MARKER, text)


class TestScore:
    @pytest.mark.parametrize(
        ("text", "score"),
        [
            ("VERDICT-M: 1", 1),
            ("VERDICT-M:-1", -1),
            ("verdict-M : 0", 0),
            ("VERDICT-M: +1", 1),
            ("VERDICT-M: + 1", 1),
            ("VERDICT-M: 1.0", 1),
            ("VERDICT-M: -1.00", -1),
            ("VERDICT-M: −1", -1),
            ("VERDICT-M: –1", -1),
            ("VERDICT-M: —1", -1),
            ("VERDICT-M: ‑1", -1),
            ("VERDICT-M: ⁻1", -1),
            ("VERDICT–M: 1", 1),
            ("VERDICT-M：－１", -1),
            ("ＶＥＲＤＩＣＴ－M：＋１．０", 1),
            ("VERDICT-M: ١", 1),
            ("VERDICT-M: \u200b-1", -1),
            ("**VERDICT-M:** -1", -1),
            ("**VERDICT-M**: **-1**", -1),
            ("_VERDICT-M_: 1", 1),
            ("`VERDICT-M: 0`", 0),
            ('VERDICT-M: "1"', 1),
            ("VERDICT-M: “−1”.", -1),
            ("### VERDICT-M: (1)", 1),
            ("| VERDICT-M | -1 |", -1),
            (r"VERDICT-M: \boxed{-1}", -1),
            ("VERDICT-M: $-1$", -1),
            (r"VERDICT-M: \text{-1}", -1),
            (r"VERDICT-M: $\boxed{\text{+1}}$", 1),
            (r"$\boxed{\text{VERDICT-M: -1}}$", -1),
            ("VERDICT-M:\n\\[\n\\boxed{-1}\n\\]", -1),
            ('{"VERDICT-M": -1}', -1),
            ('{"VERDICT-M": "1.0"}', 1),
            ('{"VERDICT-M": -1, "reason": "2 of 3 points were missed"}', -1),
            ('```json\n{\n  "VERDICT-M": 1,\n  "HINT-M": "x"\n}\n```', 1),
            ("VERDICT_M = 1", 1),
            ("VERDICT-M -1", -1),
            ("VERDICT-M: 1 ✅", 1),
            ("VERDICT-M: -1 (the user asked again)", -1),
            ("VERDICT-M: -1, because the user asked again", -1),
            ("VERDICT-M: 1. HINT-M: NONE END-M", 1),
            ("Some thoughts. My verdict is VERDICT-M: 1", 1),
            ("VERDICT-M: 1\nNo, wait.\nVERDICT-M: -1", -1),
            ("VERDICT-M: 1 VERDICT-M: 0", 0),
            ("VERDICT-M: 1\n(The options were VERDICT-M: 1, 0 or -1.)", 1),
            ("I must end with VERDICT-M: 1/0/-1.\nVERDICT-M: 0", 0),
            ("It is VERDICT-M: +1 if good.\nVERDICT-M: -1", -1),
            ("VERDICT-M: -1\nThis VERDICT-M is final.", -1),
        ],
    )
    def test_forms(self, text, score):
        assert parse_score(filled(text), MARKER) == score

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "1",
            "VERDICT: 1",
            "VERDICT-: 1",
            "VERDICT-ab12: 1",
            "VERDICT-Mf: 1",
            "VERDICT-0ab12cd34ef: 1",
            "MYVERDICT-M: 1",
            "VERDICT-M",
            "VERDICT-M:",
            "VERDICT-M:\n\n",
            "VERDICT-M: <score>",
            "VERDICT-M: good",
            "VERDICT-M: true",
            "VERDICT-M: 2",
            "VERDICT-M: -2",
            "VERDICT-M: 10",
            "VERDICT-M: 01",
            "VERDICT-M: 0.5",
            "VERDICT-M: 1.5",
            "VERDICT-M: 1,5",
            "VERDICT-M: 1.05",
            "VERDICT-M: ½",
            "VERDICT-M: 1²",
            "VERDICT-M: 1-2",
            "VERDICT-M: 1/2",
            "VERDICT-M: 1/10",
            "VERDICT-M: 1 out of 10",
            "VERDICT-M: 1 (of 10)",
            "VERDICT-M: 1 out of ten",
            "VERDICT-M: 1%",
            "VERDICT-M: 1e0",
            "VERDICT-M: --1",
            "VERDICT-M: ±1",
            "VERDICT-M: 1, 0 or -1",
            "VERDICT-M: 1/0/-1",
            "VERDICT-M: [1|0|-1]",
            'VERDICT-M: "1", "0" or "-1"',
            "VERDICT-M: -1 to 1",
            "VERDICT-M: +1 if good",
            "VERDICT-M: 1 for a good reply",
            "VERDICT-M: 1 = good",
            '{"VERDICT-M": 0.5}',
            '{"VERDICT-M": null}',
            # The last one is what the judge meant, even where an earlier one could be read.
            "VERDICT-M: 1\nVERDICT-M: 2",
            "VERDICT-M: 1\nVERDICT-M:",
        ],
    )
    def test_values_are_strict(self, text):
        assert failure(parse_score, filled(text), MARKER) == "unparseable"

    @given(
        value=st.sampled_from([("1", 1), ("+1", 1), ("1.0", 1), ("0", 0), ("-1", -1), ("−1", -1), ("－１", -1)]),
        tag=st.sampled_from(["VERDICT", "verdict", "Verdict", "ＶＥＲＤＩＣＴ"]),
        dash=st.sampled_from("-‐‑–—−－"),
        colon=st.sampled_from([":", " :", "：", ": ", ":  ", " = ", ":\t"]),
        wrap=st.sampled_from(
            [("", ""), ("**", "**"), ("`", "`"), ('"', '"'), ("$", "$"), ("(", ")"), (r"\boxed{", "}"), (r"\(", r"\)")]
        ),
        inner=st.sampled_from([("", ""), (r"\text{", "}"), ("{", "}"), ("*", "*")]),
        before=st.text(alphabet="abc 123:-+\n*", max_size=20),
        after=st.sampled_from(["", ".", " ", "\n", "\n\n", " ✅", "\nThat is all 3 of my points.", "**"]),
    )
    def test_any_formatting_of_a_value_yields_it(self, value, tag, dash, colon, wrap, inner, before, after):
        written, score = value
        line = f"{tag}{dash}{MARKER}{colon}{wrap[0]}{inner[0]}{written}{inner[1]}{wrap[1]}"
        assert parse_score(f"{before}\n{line}{after}", MARKER) == score

    @given(
        st.lists(st.one_of(st.text(), st.sampled_from(["VERDICT", "-", "ab12", ":", "1", "HINT", "END", "\n"]))).map(
            "".join
        )
    )
    def test_nothing_without_the_marker_is_read(self, text):
        assume(MARKER not in unicodedata.normalize("NFKC", text).lower())
        assert failure(parse_score, text, MARKER) == "unparseable"
        assert failure(parse_hint, text, MARKER, 100) == "unparseable"

    @given(st.text(), st.text())
    def test_whatever_surrounds_the_tag_gives_a_score_or_a_parse_error(self, before, after):
        got = outcome(parse_score, f"{before}VERDICT-{MARKER}{after}", MARKER)
        assert got in (-1, 0, 1, "ParseError: unparseable")


class TestHint:
    @pytest.mark.parametrize(
        ("text", "hint"),
        [
            ("HINT-M: Be short.\nEND-M", "Be short."),
            ("hint-M: Be short. end-M", "Be short."),
            ("HINT–M： 短く。\nEND–M", "短く。"),
            ("HINT-M: 短\nEND-M", "短"),
            ("**HINT-M:** Be **very** short.\n**END-M**", "Be **very** short."),
            ("HINT-M: **Be short.**\nEND-M", "Be short."),
            ('HINT-M: "Be short."\nEND-M', "Be short."),
            ('HINT-M: "A" or "B"\nEND-M', '"A" or "B"'),
            ("HINT-M:\nUse `code`\nEND-M", "Use `code`"),
            ("HINT-M: one\n\ntwo\nEND-M trailing words", "one\n\ntwo"),
            ("HINT-M: draft\nEND-M\nHINT-M: final\nEND-M", "final"),
            ("VERDICT-M: -1\nHINT-M: Be short.\nEND-M", "Be short."),
            ("HINT-M: None of the bullets helped; write prose.\nEND-M", "None of the bullets helped; write prose."),
            ("HINT-M: Say END or HINT-1234.\nEND-M", "Say END or HINT-1234."),
        ],
    )
    def test_hints(self, text, hint):
        assert parse_hint(filled(text), MARKER, 100) == hint

    @pytest.mark.parametrize(
        "none",
        [
            "NONE",
            "none.",
            "<NONE>",
            "**None**",
            "N/A",
            "n/a",
            "No hint",
            "no hint needed.",
            "null",
            "NONE - all was well",
        ],
    )
    def test_saying_that_there_is_none_is_no_failure(self, none):
        assert parse_hint(filled(f"HINT-M: {none}\nEND-M"), MARKER, 100) is None

    def test_none_is_complete_without_an_end(self):
        assert parse_hint(filled("HINT-M: NONE"), MARKER, 100) is None
        assert parse_hint(filled("HINT-M: NONE\nVERDICT-M: 1"), MARKER, 100) is None

    @pytest.mark.parametrize(
        "text",
        [
            "HINT-M: Be short.",
            "HINT-M: Be short.\nEND",
            "HINT-M: Be short.\nEND-1234",
            "HINT-M: Be short.\nVERDICT-M: 1",
            "HINT-M: Be short.\nVERDICT-M: 1\nEND-M",
            "END-M HINT-M: Be short.",
            "HINT-M: see ab12cd34ef for more\nEND-M",
        ],
    )
    def test_a_missing_end(self, text):
        assert failure(parse_hint, filled(text), MARKER, 100) == "unterminated"

    @pytest.mark.parametrize(
        "text", ["", "Be short.", "HINT: x END", "HINT-1234: x END-1234", "HINT-M: <hint>\nEND-M", "HINT-M:\nEND-M"]
    )
    def test_nothing_to_read(self, text):
        assert failure(parse_hint, filled(text), MARKER, 100) == "unparseable"

    def test_the_upper_limit(self):
        assert parse_hint(filled(f"HINT-M: {'x' * 100}\nEND-M"), MARKER, 100) == "x" * 100
        assert failure(parse_hint, filled(f"HINT-M: {'x' * 101}\nEND-M"), MARKER, 100) == "too_long"

    @given(st.text(min_size=1).filter(str.strip))
    def test_a_hint_comes_back_whole(self, hint):
        assume(not set(hint) & set("*_`\"'<>()[]“”「」『』«»."))
        assert outcome(parse_hint, f"HINT-{MARKER}: {hint}\nEND-{MARKER}", MARKER, 10_000) in (hint.strip(), None)


def test_a_long_run_of_dashes_is_read_in_linear_time():
    """A quadratic pattern would hold up the event loop, and with it every other turn and the deadline."""

    def seconds(n: int) -> float:
        started = time.perf_counter()
        with pytest.raises(ParseError):
            parse_score(f"VERDICT-k: 1{'-' * n}9", "k")
        return time.perf_counter() - started

    short, long = (min(seconds(n) for _ in range(3)) for n in (3_000, 30_000))
    assert long < 40 * short  # ten times the text: about 10 when linear, 100 when quadratic
