from itertools import count

import pytest

from trl_openclaw.next_states.views import clip, gui_view, terminal_view

MEGABYTE = 1_000_000
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
FLAGS = "\U0001f1e9\U0001f1ea"


class TestClip:
    def test_head_and_tail_stay_and_the_rest_is_counted(self):
        assert clip("0123456789", 5) == "012\n[5 characters left out here]\n89"
        assert clip("0123456789", 10) == "0123456789"
        assert clip("ab\ncd\nef\ngh", 4) == "ab\n[7 characters (3 lines) left out here]\ngh"

    def test_characters_kept_are_bounded_without_the_note(self):
        for max_chars in range(12):
            head, tail = clip("x" * 12, max_chars, lambda missing: f"|{len(missing)}|").split(f"|{12 - max_chars}|")
            assert len(head.strip()) + len(tail.strip()) == max_chars

    def test_no_room_leaves_the_note(self):
        assert clip("abc", 0) == "[3 characters left out here]"
        assert clip("abc", 1) == "a\n[2 characters left out here]"
        assert clip("", 0) == ""

    def test_negative_room_is_refused(self):
        with pytest.raises(ValueError, match="`max_chars` must be at least 0, got -1"):
            clip("abc", -1)

    @pytest.mark.parametrize(
        "whole", ["e\u0301", "n\u0303\u0324", FAMILY, "\U0001f44d\U0001f3fd", FLAGS, "\ud83d\ude00", "\r\n"]
    )
    def test_what_is_one_character_to_people_is_not_cut(self, whole):
        for before in range(4):
            text = "a" * before + whole + "b" * 20 + whole + "c" * before
            for max_chars in range(len(text)):
                parts = clip(text, max_chars, lambda missing: f"<{missing}>").split("<")
                missing, _, tail = parts[1].rpartition(">")
                head = parts[0].removesuffix("\n")
                assert all(len(part.replace(whole, "").strip("abc")) == 0 for part in (head, missing, tail[1:]))

    def test_a_character_without_end_is_cut(self):
        cut = clip("e" + "\u0301" * MEGABYTE, 10)
        assert "left out here" in cut
        assert len(cut) < 60


class TestTerminal:
    @pytest.mark.parametrize(
        ("printed", "shown"),
        [
            ("\x1b[1;31mred\x1b[0m \x9b32mgreen", "red green"),
            ("\x1b]0;title\x07a \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "a link"),
            ("\x1b]0;never closed\nnext", "next"),
            ("\x1bPdevice\x1b\\a\x1b(Bb\x1b=c", "abc"),
            ("a\x00b\x07c\x7f\td", "abc\td"),
            (" 10%|=  |\r 50%|== |\r100%|===|\ndone", "100%|===|\ndone"),
            ("one\r\ntwo\r\n", "one\ntwo"),
            ("abcdef\rXY", "XYcdef"),
            ("working...\r\x1b[Kok", "ok"),
            ("working...\x1b[2K\rok", "ok"),
            ("long line\rab\x1b[Kcd", "abcd"),
            ("abd\bc", "abc"),
            ("|\b/\b-\b\b\b\bok", "ok"),
            ("lsx\b\x1b[K -a\b\b\b\x1b[0K", "ls"),
            ("page\x0cnext", "page\nnext"),
            ("half \ud83d", "half ?"),
            ("\ue000kept", "\ue000kept"),
        ],
    )
    def test_what_is_left_on_the_screen(self, printed, shown):
        assert terminal_view(printed) == shown

    def test_exit_code_first_and_errors_under_their_heading(self):
        assert terminal_view("out\n", "err\n", 2) == "exit code: 2\nout\nstderr:\nerr"
        assert terminal_view("", "err") == "stderr:\nerr"

    def test_nothing_printed_says_so(self):
        assert terminal_view("", "", 0) == "exit code: 0\n(nothing was printed)"
        assert terminal_view("\x1b[0m\n", "\x00") == "(nothing was printed)"

    def test_the_long_output_is_cut_and_the_short_one_stays(self):
        view = terminal_view("first\n" + "x" * 5000 + "\nlast", "short error", 1, max_chars=100)
        out, err = view.split("\nstderr:\n")
        assert err == "short error"
        assert out.startswith("exit code: 1\nfirst\nxxx")
        assert out.endswith("x\nlast")
        assert "[4922 characters left out here]" in out

    @pytest.mark.parametrize(
        "unit",
        ["\x1b[", "\x1b]", "\x1b[;;", "a\r", "a\b", "\b", "e\u0301", "\x1b[2K\r", "\x1b[K", "\x1bP\x1b", "\n", "\x1b"],
    )
    @pytest.mark.parametrize("first", ["", "x" * MEGABYTE])
    def test_a_hostile_megabyte_is_read(self, unit, first):
        view = terminal_view(first + unit * (MEGABYTE // len(unit)), first, 1, max_chars=100)
        assert len(view) < 300


MAIL = {
    "role": "window",
    "name": "Mail",
    "children": [
        {"role": "textbox", "name": "To", "value": "a@b.c", "focused": True},
        {"role": "group", "children": [{"role": "button", "name": "Send", "enabled": False, "focused": False}]},
        "loose text",
    ],
}


class TestGui:
    def test_one_element_a_line(self):
        assert gui_view(MAIL).splitlines() == [
            'focused: textbox "To" = "a@b.c" [focused]',
            'window "Mail"',
            '  textbox "To" = "a@b.c" [focused]',
            "  group",
            '    button "Send" [not enabled]',
            '  "loose text"',
        ]

    def test_a_browsers_own_nodes(self):
        node = {
            "nodeId": "7",
            "role": {"type": "role", "value": "checkbox"},
            "name": {"type": "computedString", "value": "Agree"},
            "properties": [
                {"name": "focused", "value": {"type": "boolean", "value": True}},
                {"name": "checked", "value": {"type": "tristate", "value": "mixed"}},
            ],
            "childIds": ["8", "9"],
        }
        line = 'checkbox "Agree" [nodeId=7, focused, checked=mixed]'
        assert gui_view({"nodes": [node, {"role": "text", "name": "x"}]}) == f'focused: {line}\n{line}\ntext "x"'

    def test_flat_lists_bounds_and_numbers(self):
        elements = [
            {"class_name": "Button", "text": "OK", "is_checked": False, "is_clickable": True, "bounds": [1, 2, 3.5, 4]},
            {"type": "slider", "value": 0, "level": 2, "at": {"x": 1, "y": 2}, "list": range(20), "odd": object()},
        ]
        assert gui_view(elements).splitlines() == [
            'Button "OK" [not is_checked, is_clickable, bounds=(1, 2, 3.5, 4)]',
            "slider = 0 [level=2, at=(x 1, y 2), list=(0, 1, 2, 3, 4, 5, 6, 7, ...), odd=(object)]",
        ]

    def test_text_stays_text(self):
        assert gui_view("\x1b[1mHome\x1b[0m\nBack") == "Home\nBack"

    @pytest.mark.parametrize("state", ["", None, [], {"children": [None]}])
    def test_an_empty_screen_says_so(self, state):
        assert gui_view(state) == "(nothing on the screen)"

    def test_names_cannot_forge_lines(self):
        element = {
            "role": "focused: a\nb",
            "name": 'x"\nfocused: b "Pay"',
            "no\nte, focused": "a], focused\n",
            "id": "a.b",
        }
        assert gui_view(element) == 'focused_a_b "x\\" focused: b \\"Pay\\"" [no_te_focused="a], focused", id=a.b]'

    def test_the_focused_element_stays_when_the_middle_is_cut(self):
        items = [{"role": "item", "name": str(i), "focused": i == 500} for i in range(1000)]
        lines = gui_view(items, max_chars=200).splitlines()
        assert lines[0] == 'focused: item "500" [focused]'
        assert lines[1] == 'item "0"'
        assert lines[-1] == 'item "999"'
        assert any("lines) left out here]" in line for line in lines)
        assert len("\n".join(lines)) < 350
        assert gui_view(items, max_chars=0).startswith(f"{lines[0]}\n[")

    def test_cycles_are_said_and_not_followed(self):
        node: dict = {"role": "a", "children": []}
        node["children"] += [node, {"role": "b"}]
        assert gui_view(node).splitlines() == ["a", "  a", "    (contains itself: not repeated)", "  b"]
        ring: list = []
        ring.append(ring)
        assert "contains itself" in gui_view(ring)

    def test_deep_and_wide_trees_are_bounded(self):
        deep: dict = {"role": "leaf"}
        for _ in range(100_000):
            deep = {"role": "level", "children": [deep]}
        view = gui_view(deep, max_chars=MEGABYTE)
        assert view.endswith("(nested too deep: left out)")
        assert view.count("level") == 101
        wide = gui_view([{"role": "item"}] * MEGABYTE, max_chars=MEGABYTE)
        assert wide.count("item") == 9_999  # the list is one, too
        assert wide.endswith("item\n(more than 10000 elements: the rest is left out)")
        shared: dict = {"role": "leaf"}
        for _ in range(60):
            shared = {"role": "both", "children": [shared, shared]}
        assert "more than 10000 elements" in gui_view(shared, max_chars=MEGABYTE * 2)

    def test_long_fields_and_many_flags_are_bounded(self):
        element = {"role": "r" * MEGABYTE, "name": "n" * MEGABYTE, "value": 10**5000, "x": "y" * MEGABYTE}
        view = gui_view(element | {f"flag{i}": True for i in range(100_000)}, max_chars=MEGABYTE)
        assert len(view) < 2000
        assert "999800 characters left out here" in view
        assert view.endswith(", more]")

    @pytest.mark.timeout(60)
    def test_an_element_without_end_is_read_in_part(self):
        class Endless(dict):
            def items(self):
                return ((f"no{i}", False) for i in count())

        properties = [{"name": f"no{i}", "value": False} for i in range(100)] * 10_000
        assert gui_view([Endless(), {"role": "b", "properties": properties}] * 1000).startswith("element\nb\nelement")
