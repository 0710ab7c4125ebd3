"""Two real processes whose rows one vLLM server samples, dealt out by TRL's own code; the server is a stub."""

from launch_ranks import launch_script


def test_each_row_is_given_its_own_turns_though_processes_have_unlike_many_left(tmp_path):
    first, second = launch_script("vllm_ranks.py", tmp_path)
    rows = [*first["rows"], *second["rows"]]
    assert sorted({row[0] for row in rows}) == list("abcdefgh")
    for asked_as, answered_as, calls, has_tools in rows:
        assert answered_as == asked_as
        assert calls == 2 * has_tools
    by_rank = [sum(row[3] for row in rank["rows"][:4]) for rank in (first, second)]
    assert by_rank[0] != by_rank[1]  # else nobody would have had to wait for the other
    assert second["asked"] is None  # the main process asks for both
    most = max(by_rank)
    assert first["asked"][:3] == [8, 2 * most, 2 * most]
