"""Two real processes with a teacher on a server: each asks for its own rows, and both hear of what one meets."""

from launch_ranks import launch_script
from stub_chat_server import Reply
from stub_teacher_server import StubTeacherServer


class FailsForRankOne(StubTeacherServer):
    """Gives rank 1, which it knows by its key, no log-probs."""

    def post(self, path, request, headers):
        if path == "/v1/completions" and "Bearer rank1" in headers.values():
            return Reply(status=500, error="down for rank 1"), {}
        return super().post(path, request, headers)


def test_each_rank_asks_for_its_own_rows_and_one_of_them_checks(tmp_path):
    with StubTeacherServer() as server:
        assert (
            launch_script("server_ranks.py", tmp_path, server.base_url)
            == [{"error": None, "steps": 2, "max_length": 511}] * 2
        )
    keys = [headers["authorization"] for headers in server.headers]
    assert keys.count("Bearer rank1") == 2  # a batch each
    assert keys.count("Bearer rank0") == 3  # and the check
    rows = {key: set() for key in keys}
    for key, request in zip(keys, server.requests, strict=True):
        rows[key] |= set(map(tuple, request["prompt"]))
    assert rows["Bearer rank0"].isdisjoint(rows["Bearer rank1"])


def test_both_stop_with_one_message_when_the_server_fails_one(tmp_path):
    with FailsForRankOne() as server:
        first, second = launch_script("server_ranks.py", tmp_path, server.base_url)
    assert first == second
    assert "down for rank 1" in first["error"]
    assert first["steps"] == 0


def test_both_are_refused_when_the_server_has_another_model(tmp_path):
    with StubTeacherServer(models={"other": None}) as server:
        first, second = launch_script("server_ranks.py", tmp_path, server.base_url)
    assert first == second
    assert "does not serve 'stub-model'" in first["error"]
