"""A teacher on a server, against a stub of vLLM: what is asked, what is made of the answers, and what goes wrong."""

import time

import pytest
import torch
from stub_chat_server import Reply
from stub_teacher_server import StubTeacherServer, by_model, problem, teacher_of
from tiny import tiny_llama, tiny_tokenizer

from trl_openclaw import ServerTeacher
from trl_openclaw.errors import VocabularyMismatchError
from trl_openclaw.scoring import TeacherRow
from trl_openclaw.teachers import problem_with_scores
from trl_openclaw.teachers import server as server_module
from trl_openclaw.teachers.prompt_logprobs import groups_of, read_answer

ROWS = [TeacherRow([72, 105], [10, 20, 30]), TeacherRow([72], [40]), TeacherRow([1, 2, 3, 4], [50, 60])]


@pytest.fixture
def server():
    """A running stub of a server; its attributes say how it behaves."""
    with StubTeacherServer() as stub:
        yield stub


class TestScores:
    def test_are_those_of_the_model(self, server):
        model = tiny_llama()
        server.logps = by_model(model)
        scores = teacher_of(server).score(ROWS, topk=3)
        assert problem_with_scores(scores, ROWS, topk=3) is None
        for i, row in enumerate(ROWS):
            n, start = len(row.completion_ids), len(row.prompt_ids)
            logps = by_model(model)([*row.prompt_ids, *row.completion_ids])[start - 1 : -1]
            own = logps.gather(1, torch.tensor(row.completion_ids).unsqueeze(1)).squeeze(1)
            assert scores.mask[i].tolist() == [True] * n + [False] * (3 - n)
            assert torch.equal(scores.per_token_logps[i, :n], own)
            assert torch.equal(scores.topk_ids[i, :n], logps.topk(3).indices)

    def test_ids_go_out_as_they_are_and_nothing_else_is_asked(self, server):
        scores = teacher_of(server, api_key="secret").score(ROWS)
        (request,) = server.requests
        assert request["prompt"] == [[*row.prompt_ids, *row.completion_ids] for row in ROWS]
        assert (request["prompt_logprobs"], request["max_tokens"], request["model"]) == (0, 1, "stub-model")
        assert scores.topk_ids is None
        assert server.headers[0]["authorization"] == "Bearer secret"

    def test_an_adapter_is_asked_by_its_name(self, server):
        teacher_of(server, adapter="kind").score(ROWS)
        assert server.requests[0]["model"] == "kind"

    def test_no_rows_ask_nobody(self, server):
        scores = teacher_of(server).score([], topk=2)
        assert scores.per_token_logps.shape == (0, 0)
        assert server.count == 0

    def test_what_the_server_has_no_number_for_is_masked_and_never_0(self, server):
        def gaps(payload):
            first, second, third = (choice["prompt_logprobs"] for choice in payload["choices"])
            first[3] = None
            del first[4]["30"]
            second[1]["40"]["logprob"] = -9999.0
            third[4]["50"]["logprob"] = None
            third[5] = {"60": {"logprob": float("nan")}}

        server.edit = gaps
        scores = teacher_of(server).score(ROWS)
        assert scores.mask.tolist() == [[True, False, False], [False] * 3, [False] * 3]
        assert scores.per_token_logps[~scores.mask].isnan().all()

    def test_a_position_that_names_too_few_tokens_is_masked(self, server):
        def short(payload):
            entries = payload["choices"][0]["prompt_logprobs"]
            entries[2] = {"10": entries[2]["10"]}

        server.edit = short
        scores = teacher_of(server).score(ROWS, topk=2)
        assert scores.mask[0].tolist() == [False, True, True]
        assert problem_with_scores(scores, ROWS, topk=2) is None

    def test_choices_in_any_order(self, server):
        expected = teacher_of(server).score(ROWS)
        server.edit = lambda payload: payload["choices"].reverse()
        assert torch.equal(teacher_of(server).score(ROWS).mask, expected.mask)

    def test_ids_that_the_server_may_not_know_stay_here(self, server):
        teacher = teacher_of(server)
        teacher.check(tiny_tokenizer())
        server.requests.clear()
        rows = [TeacherRow([7], [10, 300, 20]), TeacherRow([300], [10]), TeacherRow([7], [258])]
        assert teacher.score(rows).mask.tolist() == [[True, False, False], [False] * 3, [True, False, False]]
        assert [request["prompt"] for request in server.requests] == [[[7, 10], [7, 258]]]


class TestRequests:
    def test_hold_neighbours_up_to_a_number_of_tokens(self, server):
        rows = [TeacherRow([7] * n, [8]) for n in (3, 5, 9, 1, 30, 1)]
        scores = teacher_of(server, request_tokens=12).score(rows)
        assert sorted([len(ids) for ids in request["prompt"]] for request in server.requests) == [
            [2],
            [4, 6],
            [10, 2],
            [31],
        ]
        assert scores.mask.all()

    def test_no_row_is_lost_in_a_group(self):
        assert groups_of([4, 0, 6, 10, 2, 31, 2], 12) == [[0, 2], [3, 4], [5], [6]]

    def test_are_in_flight_together_up_to_a_bound(self, server):
        server.hold_until = 3
        server.hold_seconds = 1.0
        teacher_of(server, request_tokens=1, max_concurrency=3).score([TeacherRow([7], [8])] * 9)
        assert server.count == 9
        assert server.max_in_flight == 3

    def test_the_next_one_is_under_way_while_an_answer_is_read(self, server, monkeypatch):
        seen = []

        def read(*args):
            until = time.monotonic() + 5
            while server.count < 2 and time.monotonic() < until:
                time.sleep(0.01)
            seen.append(server.count)
            return read_answer(*args)

        monkeypatch.setattr(server_module, "read_answer", read)
        scores = teacher_of(server, request_tokens=1, max_concurrency=1).score([TeacherRow([7], [8])] * 2)
        assert scores.mask.all()
        assert seen == [2, 2]

    def test_work_inside_a_running_event_loop(self, server):
        import asyncio

        async def main():
            return teacher_of(server).score(ROWS)

        assert asyncio.run(main()).mask.any()


class TestFailures:
    @pytest.mark.parametrize("failure", [Reply(status=429), Reply(status=503), Reply(drop=True)], ids=str)
    def test_that_may_pass_are_tried_again(self, server, failure):
        server.script = [failure, failure, Reply()]
        assert teacher_of(server, max_retries=2).score(ROWS).mask.any()
        assert server.count == 3

    @pytest.mark.parametrize("failure", [Reply(status=429), Reply(status=500), Reply(drop=True)], ids=str)
    def test_that_stay_are_one_error_after_a_bounded_number_of_tries(self, server, failure):
        server.script = failure
        said = problem(teacher_of(server, max_retries=2).score, ROWS)
        assert server.count == 3
        assert f"at {server.base_url} (model 'stub-model') failed 3 tries" in said
        assert "`max_retries`" in said

    def test_a_server_that_is_gone(self, dead_url):
        said = problem(ServerTeacher("m", dead_url, max_retries=0).score, ROWS)
        assert "failed 1 tries: Connection error" in said

    def test_a_slow_server(self, server):
        server.script = Reply(delay=1.0)
        said = problem(teacher_of(server, timeout=0.1).score, ROWS)
        assert "did not answer within `timeout=0.1` seconds, in 2 tries. Raise it, or lower `request_tokens` (" in said

    def test_a_batch_that_takes_too_long_in_all(self, server):
        server.script = Reply(delay=1.0)
        said = problem(teacher_of(server, score_timeout=0.2).score, ROWS)
        assert "did not score 3 rows within `score_timeout=0.2` seconds" in said

    def test_the_first_failure_ends_the_other_requests(self, server):
        answers = iter([Reply(status=400, error="broken"), *[Reply(delay=0.2)] * 9])
        server.script = lambda messages: next(answers)
        teacher = teacher_of(server, request_tokens=1, max_concurrency=2)
        assert "refused" in problem(teacher.score, [TeacherRow([7], [8])] * 8)
        time.sleep(1.0)  # in which the others would have been sent
        assert server.count <= 4

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_key_that_is_refused(self, server, status):
        server.script = Reply(status=status)
        said = problem(teacher_of(server).score, ROWS)
        assert f"refused the API key (HTTP {status}). Pass `api_key`" in said
        assert server.count == 1

    @pytest.mark.parametrize(
        ("body", "words"),
        [
            ("<html>no</html>", "answered with something"),
            ("{", "answered with something"),
            ("[]", "answered with something"),
        ],
    )
    def test_an_answer_that_is_no_json_of_vllm(self, server, body, words):
        server.script = Reply(body=body)
        assert words in problem(teacher_of(server).score, ROWS)

    @pytest.mark.parametrize(
        ("edit", "words"),
        [
            (lambda payload: payload["choices"].pop(), r"it holds the choices [0, 1]"),
            (lambda payload: payload["choices"][1].pop("prompt_logprobs"), "row 1 has 2 tokens, and none came back"),
            (lambda payload: payload["choices"][0]["prompt_logprobs"].pop(), "row 0 has 5 tokens, and 4 came back"),
            (lambda payload: payload.pop("choices"), "'choices'"),
            (lambda payload: payload["choices"][0].update(prompt_logprobs=[7] * 5), "no attribute"),
            (lambda payload: payload["choices"][0]["prompt_logprobs"][2]["10"].update(logprob=5.5), "raw_logprobs"),
        ],
    )
    def test_an_answer_to_something_else(self, server, edit, words):
        server.edit = lambda payload: edit(payload) and None
        said = problem(teacher_of(server).score, ROWS)
        assert "one `prompt_logprobs` for each of 3 rows" in said
        assert words in said


class TestCheck:
    def test_keeps_what_the_server_says(self, server):
        teacher = teacher_of(server)
        assert teacher.max_length is None
        facts = teacher.check(tiny_tokenizer(), topk=4)
        assert (facts.version, facts.root, facts.window, facts.vocabulary) == ("0.0.stub", "/models/stub", 512, 259)
        assert teacher.max_length == 511  # vLLM samples one token more

    def test_the_longest_row_fits_and_a_longer_one_does_not(self, server):
        teacher = teacher_of(server)
        teacher.check()
        assert teacher.score([TeacherRow([7] * 510, [8])]).mask.all()
        assert "maximum context length" in problem(teacher.score, [TeacherRow([7] * 511, [8])])

    @pytest.mark.parametrize(
        ("kwargs", "words"),
        [
            ({"model": "other"}, "does not serve 'other'. It serves: stub-model, kind, strange."),
            ({"adapter": "rude"}, "does not serve 'rude'. It serves: stub-model, kind, strange."),
            ({"adapter": "strange"}, "that adapter belongs to 'another-model', not to 'stub-model'"),
        ],
    )
    def test_a_model_or_adapter_that_is_not_there(self, kwargs, words):
        cards = {"stub-model": None, "kind": "stub-model", "strange": "another-model"}
        with StubTeacherServer(models=cards) as server:
            assert teacher_of(server, adapter="kind").check().window == 512
            assert words in problem(teacher_of(server, **kwargs).check)

    def test_another_tokenizer(self):
        other = tiny_tokenizer()
        other.add_tokens(["hello"])
        with StubTeacherServer(tokenizer=other) as server:
            for token in ("goodbye", "hellos"):
                with pytest.raises(VocabularyMismatchError, match="has another vocabulary than the student"):
                    teacher_of(server).check(_with_token(token))
            assert teacher_of(server).check(tiny_tokenizer()).vocabulary == 259  # what else it knows does no harm
            assert teacher_of(server).check(_with_token("hello")).vocabulary == 260
            assert server.count == 2  # an id that a model does not know would have ended vLLM

    def test_a_server_that_does_not_tokenize(self):
        with StubTeacherServer(tokenizer=None) as server:
            assert "refused: Error code: 404" in problem(teacher_of(server).check, tiny_tokenizer())

    def test_too_few_logprobs(self, server):
        server.max_logprobs = 5
        assert teacher_of(server).check(topk=5)
        said = problem(teacher_of(server).check, topk=6)
        assert "Start it with a larger `--max-logprobs`" in said

    def test_logits_in_place_of_logprobs(self, server):
        server.logps = lambda ids: torch.linspace(9.0, -9.0, 259).expand(len(ids), -1)
        assert "`--logprobs-mode raw_logprobs`" in problem(teacher_of(server).check)

    def test_a_server_without_prompt_logprobs(self, server):
        server.edit = lambda payload: payload["choices"][0].update(prompt_logprobs=[None] * 3)
        assert "gives no log-probs of a prompt's tokens" in problem(teacher_of(server).check)

    def test_an_address_without_v1(self, server):
        teacher = ServerTeacher("stub-model", server.base_url.removesuffix("/v1"))
        assert "usually ends in /v1" in problem(teacher.check)

    def test_nobody_there(self, dead_url):
        assert "cannot be reached" in problem(ServerTeacher("m", dead_url).check)

    def test_a_key_that_is_refused(self, server):
        server.models_reply = Reply(status=401)
        assert "refused the API key" in problem(teacher_of(server).check)

    @pytest.mark.parametrize(
        "kwargs",
        [{"request_tokens": 0}, {"score_timeout": 0}, {"adapter": ""}, {"api_key": ""}, {"timeout": 0}],
        ids=str,
    )
    def test_arguments_that_cannot_be(self, kwargs):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            ServerTeacher("m", "http://127.0.0.1:9/v1", **kwargs)


def _with_token(token: str):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([token])
    return tokenizer
