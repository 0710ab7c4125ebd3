"""A stub of vLLM as a teacher sees it: it lists models, tokenizes, and says how likely the ids of a prompt are."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from stub_chat_server import Reply, Script, StubChatServer
from tiny import tiny_tokenizer

from trl_openclaw import ServerTeacher
from trl_openclaw.errors import TeacherError


def tokens_alone(ids: Sequence[int]) -> torch.Tensor:
    """Log-probs `(t, V)` that depend on nothing but the token, which costs next to nothing."""
    return torch.linspace(-1.0, -9.0, 259).expand(len(ids), -1)


def by_model(model: torch.nn.Module) -> Callable[[Sequence[int]], torch.Tensor]:
    """Log-probs `(t, V)` of a model of the same process."""

    @torch.no_grad()
    def logps(ids: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)

    return logps


class StubTeacherServer(StubChatServer):
    """Serves a model on `127.0.0.1` at a free port; `script` may be a `Reply` that fails in place of an answer.

    Args:
        logps: From the ids of a prompt `(t,)` to log-probs `(t, V)` of what comes after each.
        script: What happens to the requests for log-probs.
        models: What it lists: names with their parents.
        window: Tokens that fit.
        max_logprobs: The k of `prompt_logprobs=k` at most.
        tokenizer: Its tokenizer; `None` for a server that does not tokenize.
        token_seconds: Seconds it takes for each token, at least.
        edit: Changes the payload of an answer.
    """

    def __init__(
        self,
        logps: Callable[[Sequence[int]], torch.Tensor] = tokens_alone,
        script: Script = "",
        *,
        models: Mapping[str, str | None] | None = None,
        window: int = 512,
        max_logprobs: int = 20,
        tokenizer: Any = "default",
        token_seconds: float = 0.0,
        edit: Callable[[dict[str, Any]], Any] | None = None,
        **kwargs: Any,
    ):
        self.cards = {"stub-model": None} if models is None else dict(models)
        super().__init__(script, models=[*self.cards], **kwargs)
        self.logps, self.window, self.max_logprobs, self.edit = logps, window, max_logprobs, edit
        self.tokenizer = tiny_tokenizer() if tokenizer == "default" else tokenizer
        self.token_seconds = token_seconds
        self.root = "/models/stub"

    def get(self, path: str) -> tuple[Reply, dict[str, Any]]:
        if path == "/version":
            return Reply(), {"version": "0.0.stub"}
        reply, payload = super().get(path)
        for card in payload.get("data", ()):
            parent = self.cards[card["id"]]
            card |= {"parent": parent, "root": self.root, "max_model_len": None if parent else self.window}
        return reply, payload

    def post(self, path: str, request: dict[str, Any], headers: Mapping[str, str]) -> tuple[Reply, dict[str, Any]]:
        if path == "/tokenize" and self.tokenizer is not None:
            return Reply(), {"tokens": self.tokenizer(request["prompt"], add_special_tokens=False)["input_ids"]}
        if path != "/v1/completions":
            return super().post(path, request, headers)
        started = time.perf_counter()
        reply = self.answer(request, headers)
        if (problem := self.problem(request)) and reply.status < 400:
            reply = Reply(status=400, error=problem)
        if reply.status >= 400 or reply.drop or reply.body is not None:
            return reply, {}
        choices = [
            {"index": i, "prompt_logprobs": self.entries(ids, request)} for i, ids in enumerate(request["prompt"])
        ]
        time.sleep(max(0.0, self.token_seconds * sum(map(len, request["prompt"])) - (time.perf_counter() - started)))
        payload = {"model": request["model"], "choices": choices}
        return reply, (payload if self.edit is None else self.edit(payload) or payload)

    def problem(self, request: dict[str, Any]) -> str | None:
        """Why vLLM would refuse a request."""
        if request["prompt_logprobs"] > self.max_logprobs:
            return f"Requested prompt logprobs of {request['prompt_logprobs']}, which is greater than max allowed"
        if max(map(len, request["prompt"])) + request["max_tokens"] > self.window:
            return f"This model's maximum context length is {self.window} tokens."
        if request["max_tokens"] < 1:
            return "max_tokens must be at least 1, got 0."
        return None

    def entries(self, ids: Sequence[int], request: dict[str, Any]) -> list[dict[str, Any] | None]:
        """What vLLM says of one prompt: of each token, and of the likeliest in its place, the log-prob."""
        logps = self.logps(ids)[: len(ids) - 1]
        sampled = torch.tensor(ids[1:], dtype=torch.long).unsqueeze(1)
        named = torch.cat([sampled, logps.topk(request["prompt_logprobs"]).indices], dim=1)
        return [None] + [
            {str(i): {"logprob": logp, "rank": 1, "decoded_token": "?"} for i, logp in zip(*position, strict=True)}
            for position in zip(named.tolist(), logps.gather(1, named).tolist(), strict=True)
        ]


def teacher_of(server: StubTeacherServer, **kwargs) -> ServerTeacher:
    """A teacher on the stub, which tries once more."""
    return ServerTeacher(kwargs.pop("model", "stub-model"), server.base_url, **{"max_retries": 1, **kwargs})


def problem(call, *args, **kwargs) -> str:
    """What a call says when the teacher cannot be used."""
    with pytest.raises(TeacherError) as caught:
        call(*args, **kwargs)
    return str(caught.value)
