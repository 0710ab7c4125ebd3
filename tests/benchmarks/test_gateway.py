"""The benchmark of the gateway: it runs as the docs say, and its last line is JSON."""

from benchmark_script import run_plain_script


def test_runs_and_ends_in_json():
    said, result = run_plain_script("python benchmarks/gateway.py", "--clients 4 --seconds 2")
    assert list(result) == ["added_p50_ms", "added_p99_ms", "added_first_token_ms"]
    assert said.count(" 8 replies") == 2  # as many each way: each client once a second
