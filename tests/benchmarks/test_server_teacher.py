"""The benchmark of a teacher on a server: it runs, and its last line is JSON."""

from benchmark_script import run_plain_script


def test_runs_and_ends_in_json():
    printed, result = run_plain_script(
        "python benchmarks/server_teacher.py", "--rows 6 --prompt 60 --completion 10 --topk 2 --rounds 1 --token-ms 0.2"
    )
    assert "420 tokens" in printed
    assert list(result) == ["added_over_server"]
