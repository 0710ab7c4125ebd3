"""The benchmark of recording: every next state at its turn, and a turn costs no more when there are more of them."""

import gc
import statistics
import tracemalloc

from benchmark_script import run_plain_script

from benchmarks.live_sessions import check, run


def test_runs_and_ends_in_json():
    command = "python benchmarks/live_sessions.py"
    printed, result = run_plain_script(command, "--turns 600 --sessions 60")
    assert "600 turns of 60 sessions" in printed
    assert (result["turns"], result["attached"], result["missing"], result["wrong"]) == (600, 540, 0, 0)
    assert 0 < result["median_ms"] <= result["p99_ms"]
    assert result["heap_growth_kib"] < 500


def test_ten_times_the_turns_cost_less_than_twice_as_much_each(tmp_path):
    def cost(turns):
        store, seconds = run(tmp_path / str(turns), turns, turns // 10, lambda count: None)
        assert check(store, turns, turns // 10) == (turns * 9 // 10, 0, 0)
        store.close()
        return statistics.median(seconds)

    assert cost(3000) < 2 * cost(300)


def test_memory_does_not_grow_with_the_turns(tmp_path):
    heap = {}

    def measure(count):
        if count in (300, 3000):
            gc.collect()
            heap[count] = tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        run(tmp_path, 3000, 300, measure)[0].close()
    finally:
        tracemalloc.stop()
    assert heap[3000] - heap[300] < 200_000


def test_a_next_state_at_the_wrong_turn_is_seen(tmp_path):
    store, _ = run(tmp_path, 60, 6, lambda count: None)
    assert check(store, 60, 6) == (54, 0, 0)
    with store._write() as connection:
        connection.execute("DELETE FROM next_states WHERE number = 20")
        connection.execute(
            "UPDATE next_states SET messages = (SELECT messages FROM next_states WHERE number = 31) WHERE number = 30"
        )
    attached, missing, wrong = check(store, 60, 6)
    assert (attached, missing, wrong) == (53, 1, 1)
