"""docs/live.md: its commands have settings that exist, its links lead somewhere, and `make live-demo` runs the demo."""

import http.client
import json
import re
import shlex
from pathlib import Path

import pytest
from test_readme import commands, placeholders

from trl_openclaw import cli
from trl_openclaw.live.gateway.settings import read_settings

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "live.md"
TEXT = PAGE.read_text(encoding="utf-8")


def of(program: str) -> list[list[str]]:
    """The arguments with which the page calls a program."""
    found = [shlex.split(command)[len(program.split()) :] for command in commands(TEXT) if command.startswith(program)]
    assert found, f"the page shows no {program}"
    return found


def test_the_demo_is_what_make_runs():
    assert of("make live-demo") == [[]]
    recipe = re.search(r"^live-demo:[^\n]*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe[1] == "$(BIN)/python -m recipes.live_demo"


def test_the_settings_of_the_gateway_are_there():
    for args in of("trl-openclaw serve"):
        assert read_settings(args).model.startswith("Qwen/")


def test_the_settings_of_the_learner_are_there():
    parser = cli.load_recipe(cli.recipes_dir() / "live.py").make_parser()
    for args in of("trl-openclaw live"):
        _, unknown = parser.parse_known_args(args)
        assert unknown == []


@pytest.mark.parametrize("program", ["data", "versions"])
def test_commands_over_an_empty_store_say_so(program, tmp_path, monkeypatch, capsys):
    from trl_openclaw.live.store import Store

    (tmp_path / "runs" / "live").mkdir(parents=True)
    Store(tmp_path / "runs" / "live" / "store.db").close()
    monkeypatch.chdir(tmp_path)
    for args in of(f"trl-openclaw {program}"):
        assert cli.main([program, *args]) in (0, 2)
        said = capsys.readouterr()
        assert len((said.out + said.err).splitlines()) <= 2
        assert "usage" not in said.err


def test_the_feedback_is_what_the_gateway_takes(gateway):
    (curl,) = of("curl")
    body = json.loads(curl[curl.index("-d") + 1])
    turn = gateway.ask("Hello?")
    with gateway.client() as client:
        client.post("/feedback", body={**body, "turn_id": turn.id}, cast_to=object)
    assert gateway.store.show("default", turn.id).verdict.score == -1


def test_paths_of_the_api_are_there(gateway):
    named = re.findall(r"`(GET|POST) (/[\w/]+)`", TEXT)
    assert len(named) == 5
    for method, path in named:
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port)
        connection.request(method, path)
        assert connection.getresponse().status in (200, 400), path
        connection.close()


def test_links_lead_somewhere_and_no_figure_is_left_to_be_filled_in():
    links = re.findall(r"\]\(([^)#\s]+)", TEXT)
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
    assert placeholders(TEXT) == []
