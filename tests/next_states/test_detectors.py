import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_openclaw.next_states import detectors


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        (" \n\t", 0),
        ("😊 ...", 0),
        ("---", 0),
        ("It is blue.", 1),
        ("It is blue. It is big.", 2),
        ("it is blue. it is big.", 2),
        ("It is blue", 1),
        ("It is blue. It is", 2),
        ("Pi is about 3.14 and e is 2.7.", 1),
        ("Use fruit, e.g. apples, i.e. sweet ones.", 1),
        ("Use fruit (e.g. Apples) today.", 1),
        ("Dr. Smith met Mrs. Jones vs. Mr. Brown.", 1),
        ("The U.S. Army moved.", 1),
        ("He lives in the U.S. She does not.", 2),
        ("J. R. R. Tolkien wrote it.", 1),
        ("It opens at 9 a.m. on Monday.", 1),
        ("It opens at 9 a.m. The door is red.", 2),
        ("Bring pens, paper, etc. Then wait.", 2),
        ("Bring pens, paper, etc. when you come.", 1),
        ("See No. 5 in Fig. 3 for it.", 1),
        ("No. It is not.", 2),
        ("Really?! Yes.", 2),
        ("What?!", 1),
        ("Well... maybe it is.", 1),
        ("Well… maybe it is.", 1),
        ("Well... It is.", 2),
        ('He said "Stop!" and left.', 1),
        ('"Why?" he asked.', 1),
        ('He said "Stop." Then he left.', 2),
        ("It is blue (I think.) It is big.", 2),
        ("**It is blue.** It is big.", 2),
        ("今天天气很好。", 1),
        ("今天天气很好。我们去公园。", 2),
        ("今天天气很好！对吗？", 2),
        ("彼は「はい。」と言った。", 1),
        ("यह नीला है। यह बड़ा है।", 2),
        ("First line\nof one sentence.", 1),
        ("First\n\nSecond", 2),
        ("- one\n- two\n* three", 3),
        ("1. one\n2. two", 2),
        ("• one\n• two", 2),
        ("Steps:\n1.", 1),
        ("# Title\nIt is blue.", 2),
        ("Run `a. B. C` now.", 1),
        ("Do this:\n```\na. B. C.\n```\nDone.", 3),
        ("See example.com or a.b.c for more.", 1),
        ("It is blue. 😊", 1),
        ("Version 2.0 is out!!! Get it.", 2),
        ("Rain falls. . .", 1),
    ],
)
def test_split_sentences(text, count):
    assert len(detectors.split_sentences(text)) == count, detectors.split_sentences(text)


def test_sentences_keep_their_text():
    assert detectors.split_sentences("1. Wash it. Dry it (well).\n2) Done") == ["Wash it.", "Dry it (well).", "Done"]


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("It is blue.", True),
        ("Is it?", True),
        ("It is!", True),
        ('He said "no."', True),
        ("He said “no.” ", True),
        ("**It is blue.**", True),
        ("It is blue. 😊❤️", True),
        ("今天天气很好。", True),
        ("「はい。」", True),
        ("Well...", True),
        ("It is blue.\n\n", True),
        ("It is", False),
        ("It is,", False),
        ("Here it is:", False),
        ("Steps:\n1.", False),
        ("- ", False),
        ("", False),
        ('He said "no', False),
        ("It costs 3.5", False),
    ],
)
def test_is_complete(text, complete):
    assert detectors.is_complete(text) is complete


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("... — 😊", 0),
        ("It is blue.", 3),
        ("don't well-known 3.5 U.S.", 4),
        ("yes—no/maybe", 3),
        ("a,b, 1,000", 3),
        ("- one\n2. two\n• three", 3),
        ("यह नीला है।", 3),
        ("今天天气", 2),
        ("今天天", 2),
        ("用 Python 写", 2),
        ("안녕 세계", 2),
    ],
)
def test_count_words(text, count):
    assert detectors.count_words(text) == count


def test_distinct_words_ignore_case_and_marks():
    assert detectors.count_distinct_words('Very, very "very" good. Good!') == 2


@pytest.mark.parametrize(
    "text",
    [
        "This is **bold** text.",
        "**Bold**",
        "__Bold__ here",
        "***both***",
        "**注意：**内容",
        "这是**重点**内容",
        "**Note:**text",
        "**two\nlines**",
        "<b>x</b> and",
        "a <strong>x</strong>",
        "2**10 is big, **very** big",
    ],
)
def test_bold(text):
    assert detectors.has_bold(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2**3**2 is 512",
        "x**2 and y**3.",
        "2 ** 3 ** 2",
        "`**not bold**`",
        "``a ` **b** ``",
        "```\n**not bold**\n```",
        "~~~\n**not bold**\n~~~",
        "```python\n**cut off**",
        "snake__case__name",
        "`snake__case` and `__init__`",
        "call f(*args, **kwargs) and g(**kwargs)",
        r"\*\*not bold\*\*",
        "* * *",
        "***",
        "an *italic* _word_",
        "**opened only",
        "**one paragraph\n\nthe other**",
        "fill in ____ and ____.",
    ],
)
def test_not_bold(text):
    assert not detectors.has_bold(text)


@pytest.mark.parametrize(
    "text",
    [
        "- one\n- two",
        "* one",
        "+ one",
        "1. one",
        "1) one",
        "(1) one",
        "a) one",
        "• one",
        "•one",
        "◦ one",
        "Text:\n  - nested",
        "> - quoted",
        "1️⃣ one",
        "<ul><li>x</li></ul>",
    ],
)
def test_list(text):
    assert detectors.has_list(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-5 degrees",
        "3.5 is a number",
        "1984. That was the year.",
        "* * *",
        "- - -",
        "---",
        "*italic* start",
        "**bold** start",
        "+1 from me",
        "well - maybe",
        "```\n- code\n```",
        r"1\. no item",
        r"\- no item",
        "-",
        "2. ",
    ],
)
def test_not_list(text):
    assert not detectors.has_list(text)


@pytest.mark.parametrize(
    "text",
    ["# One", "###### Six", "text\n## Two\ntext", "> # quoted", "Title\n=====", "Title\n---", "<h2>x</h2>", "##"],
)
def test_heading(text):
    assert detectors.has_heading(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#hashtag",
        "#1 of them",
        "####### Seven",
        "C# is a language",
        "```\n# comment\n```",
        "`# x`",
        r"\# no heading",
        "text\n\n---\n\ntext",
        "a | b\n--- | ---",
        "- item\n---",
    ],
)
def test_not_heading(text):
    assert not detectors.has_heading(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("Paris is the capital of France.", 0),
        ("You've got this! Well done.", 2),
        ("You’ve got this, I’m so happy", 2),
        ("well done, WELL DONE", 1),
        ("That's not a good question, don't worry.", 1),
        ("It is a lovely circle.", 0),
        ("How lovely! ❤️", 2),
        ("Farewell done", 0),
    ],
)
def test_warm_phrases(text, count):
    assert len(detectors.warm_phrases(text)) == count, detectors.warm_phrases(text)


def test_number_word():
    assert [detectors.number_word(n) for n in (0, 3, 12, 13)] == ["no", "three", "twelve", "13"]


marks = st.text(alphabet="ab1 .!?…。*_`~#->\n\"'()|\\•:", max_size=60)


@given(marks)
def test_any_text_gets_an_answer(text):
    sentences = detectors.split_sentences(text)
    assert all(any(c.isalnum() for c in s) for s in sentences)
    assert detectors.count_words(text) >= 0
    for detect in (detectors.is_complete, detectors.has_bold, detectors.has_list, detectors.has_heading):
        assert detect(text) in (True, False)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("piece", ["`", "`a ", "**a ", ". ", "- ", "a\n", "#", "\\", "=\n"])
def test_long_odd_text_is_read_quickly(piece):
    text = piece * 4000
    detectors.split_sentences(text)
    detectors.is_complete(text)
    detectors.has_bold(text)
    detectors.has_list(text)
    detectors.has_heading(text)
    detectors.warm_phrases(text)
    detectors.count_words(text)
