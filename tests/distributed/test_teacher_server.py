"""Two real processes with a teacher on a server: each asks for its own rows, and both hear of what one meets."""

import json
import time
from contextlib import ExitStack

import pytest
from launch_ranks import found_in, launch_script
from stub_chat_server import Reply
from stub_teacher_server import StubTeacherServer
from tiny import tiny_tokenizer
from tokenizers import normalizers


class BadForRankOne(StubTeacherServer):
    """Gives rank 1, which it knows by its key, something else than log-probs.

    Args:
        bad: What.
    """

    def __init__(self, **bad):
        super().__init__()
        self.bad = Reply(**bad)

    def post(self, path, request, headers):
        if path == "/v1/completions" and "Bearer rank1" in headers.values():
            time.sleep(self.bad.delay)
            return self.bad, {}
        return super().post(path, request, headers)


def another_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


GOOD = {"good": StubTeacherServer, "hardly a window": StubTeacherServer}
AT_START = {
    "another model": (lambda: StubTeacherServer(models={"other": None}), "does not serve 'stub-model'"),
    "another tokenizer": (lambda: StubTeacherServer(tokenizer=another_tokenizer()), "has another vocabulary"),
    "an adapter that it does not have": (StubTeacherServer, "does not serve 'rude'. It serves: stub-model."),
    "too few log-probs": (lambda: StubTeacherServer(max_logprobs=5), "Start it with a larger `--max-logprobs`."),
    "too small a window": (StubTeacherServer, "reads 511 tokens, which leaves no room for a prompt beside"),
}
IN_TRAINING = {
    "down for rank 1": (lambda: BadForRankOne(status=500, error="no memory"), "failed 1 tries: Error code: 500"),
    "drops rank 1": (lambda: BadForRankOne(drop=True), "failed 1 tries: Connection error ("),
    "slow for rank 1": (lambda: BadForRankOne(delay=6.0), "did not answer within `timeout=3` seconds"),
    "no key of rank 1": (lambda: BadForRankOne(status=401), "refused the API key (HTTP 401)"),
}
BAD = AT_START | IN_TRAINING
"""A server that is of no use, and what is said of it; rank 0 alone asks at the start."""


def train(folder):
    """Both ranks train with each server, and what the good one was asked is written down."""
    makers = GOOD | {name: make for name, (make, _) in BAD.items()}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(make()) for name, make in makers.items()}
        launch_script("server_ranks.py", folder, json.dumps({name: s.base_url for name, s in servers.items()}))
        good = servers["good"]
    asked = [[h["authorization"], r["prompt"]] for h, r in zip(good.headers, good.requests, strict=True)]
    (folder / "asked.json").write_text(json.dumps(asked))


@pytest.fixture
def folder(run_once):
    return run_once("teacher-servers", train)


def test_each_rank_asks_for_its_own_rows_and_one_of_them_checks(folder):
    for name in GOOD:
        assert [r[name] for r in found_in(folder, 2)] == [{"error": None, "steps": 2, "max_length": 511}] * 2
    asked = json.loads((folder / "asked.json").read_text())
    keys = [key for key, _ in asked]
    assert keys.count("Bearer rank1") == 2  # a batch each
    assert keys.count("Bearer rank0") == 3  # and the check
    rows = {key: {tuple(ids) for asker, prompts in asked for ids in prompts if asker == key} for key in keys}
    assert rows["Bearer rank0"].isdisjoint(rows["Bearer rank1"])


@pytest.mark.parametrize("name", BAD)
def test_both_stop_with_one_line(folder, name):
    first, second = (rank[name] for rank in found_in(folder, 2))
    assert first == second
    assert BAD[name][1] in first["error"]
    assert first["error"].partition(": ")[2].startswith("The teacher's server at ")
    assert "\n" not in first["error"]
    assert first["steps"] == (None if name in AT_START else 0)
