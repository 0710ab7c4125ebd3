"""`trl-openclaw versions`: what it lists, and that one command goes back."""

import pytest

from trl_openclaw import cli
from trl_openclaw.live.status.views import version_views
from trl_openclaw.live.store import Store

CHECKS = {"checks": {"held_out": {"outcome": "no_data", "note": "no held-out turns yet", "numbers": {}}}}


@pytest.fixture
def store(tmp_path) -> Store:
    """Three versions: published, published, rejected."""
    store = Store(tmp_path / "store.db", clock=lambda: 0.0)
    for number, parent in ((1, "base"), (2, "v000001"), (3, "v000002")):
        name = f"v{number:06d}"
        (tmp_path / name).mkdir()
        store.add_version("default", name, parent, str(tmp_path / name))
        store.add_version_event("default", name, "checked", CHECKS)
        if number < 3:
            store.publish("default", name)
        else:
            store.add_version_event("default", name, "rejected", {"reason": "held_out: worse"})
    return store


def run(store: Store, *arguments: str) -> int:
    return cli.main(["versions", *arguments, "--live_dir", str(store.path.parent)])


def test_list(store, capsys):
    assert run(store, "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "v000001  from base  1970-01-01 00:00 UTC  answered earlier",
        "    held_out: no data (no held-out turns yet)",
        "v000002  from v000001  1970-01-01 00:00 UTC  answers now",
        "    held_out: no data (no held-out turns yet)",
        "v000003  from v000002  1970-01-01 00:00 UTC  rejected",
        "    held_out: no data (no held-out turns yet)",
        "    rejected: held_out: worse",
    ]


def test_roll_back(store, capsys):
    assert run(store, "roll-back") == 0
    assert capsys.readouterr().out == "v000001 answers from now on.\n"
    assert store.published_version("default") == "v000001"
    assert run(store, "roll-back", "--to", "base") == 0
    assert store.published_version("default") == "base"
    run(store, "list")
    assert "rolled back" in capsys.readouterr().out


def test_what_cannot_be_loaded_does_not_answer(store, capsys):
    store.add_version_event("default", "v000002", "load_failed", {"error": "rank 64 is too large"})
    assert run(store, "list") == 0
    out = capsys.readouterr().out
    assert "v000001  from base  1970-01-01 00:00 UTC  answers now" in out
    assert "v000002  from v000001  1970-01-01 00:00 UTC  cannot be loaded" in out
    assert "    load failed: rank 64 is too large" in out
    store.add_version_event("default", "v000001", "load_failed", {"error": "so is rank 32"})
    run(store, "list")
    out = capsys.readouterr().out
    assert "answers now" not in out
    assert out.endswith("\nThe base model answers.\n")


def test_the_page_offers_what_answered_and_is_still_there(store):
    store.publish("default", "v000003")

    def offered():
        views = version_views(store.versions("default"), "v000003")
        return [view["version"] for view in views if view["can_return_to"]]

    assert offered() == ["v000002", "v000001", "base"]
    (store.path.parent / "v000001").rmdir()
    assert offered() == ["v000002", "base"]
    store.add_version_event("default", "v000002", "load_failed", {"error": "rank 64 is too large"})
    assert offered() == ["base"]


def test_publish(store, capsys):
    assert run(store, "publish", "v000003") == 0
    assert run(store, "publish", "v000003") == 0
    assert capsys.readouterr().out == "v000003 answers from now on.\nv000003 answers already.\n"
    assert store.published_version("default") == "v000003"


def test_users_have_their_own(store, capsys):
    assert run(store, "list", "--user", "ann") == 0
    assert capsys.readouterr().out == "User 'ann' has no versions yet: the base model answers.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["publish", "v000009"], "User 'default' has no version 'v000009'."),
        (["roll-back", "--user", "ann"], "User 'ann' has no published version"),
        (["roll-back", "--to", "v000001"], "The adapter of version 'v000001' was removed"),
        (["publish", "v000001"], "The adapter of version 'v000001' was removed"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(store, capsys, arguments, message):
    (store.path.parent / "v000001").rmdir()
    assert run(store, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-openclaw versions: error: ")
    assert message in error
    assert store.published_version("default") == "v000002"


def test_a_folder_without_a_store_is_not_made_one(tmp_path, capsys):
    assert cli.main(["versions", "list", "--live_dir", str(tmp_path)]) == 2
    assert "There is no store in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
