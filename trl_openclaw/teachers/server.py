"""A teacher on a vLLM server: token ids go there, log-probs of the very same ids come back, and nothing is decoded.

vLLM's completions endpoint takes ids and says, with `prompt_logprobs=k`, how likely each of them was after those before
it, and which k were likeliest. That is all a teacher is asked for. It says so at temperature 1, whatever it samples at.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from ..errors import TeacherError, VocabularyMismatchError
from ..scoring import TeacherRow, TeacherScores
from ..server_client import ServerClient, failure_kind, run_in_background, say
from .prompt_logprobs import RowScores, groups_of, read_answer

T = TypeVar("T")

REQUEST_TOKENS = 8_192
"""Tokens of the rows that one request holds: few enough that a lost one costs little, too many to feel its overhead."""

PROBE = TeacherRow([0], [1, 0])
"""Ids that every model knows. An id that a model does not know ends a vLLM server, so nothing else is tried."""

IN_A_CONFIG = "`teacher_server_...` in a config"
"""How the settings of a teacher are called there."""

_SAMPLED = 1
"""Tokens that vLLM samples after a row at least. They have to fit into its window, too."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself.

    Args:
        version: Of vLLM, if it says so.
        root: Where it loaded the weights from, a path or Hub name.
        window: Tokens that its model can read.
        vocabulary: How many ids are known to mean the same there; `None` where that was not compared.
    """

    version: str | None = None
    root: str | None = None
    window: int | None = None
    vocabulary: int | None = None


class ServerTeacher(ServerClient):
    """A model on a vLLM server that scores rows, for losses on the sampled token.

    ```python
    teacher = ServerTeacher("Qwen/Qwen3-32B", "http://localhost:8000/v1")
    trainer = OPDTrainer("Qwen/Qwen3-1.7B", teacher_model=teacher, ...)
    ```

    Requests of several rows are in flight at once. Timeouts, dropped connections and statuses 408, 409, 429 and 5xx are
    tried again with growing pauses; a server that stays away is a `TeacherError`. What it has no log-prob for is
    masked.

    Args:
        model (`str`):
            Name of the model as the server lists it.
        base_url (`str`):
            Address of the API, `/v1` included.
        adapter (`str`, *optional*):
            Name of a LoRA adapter that the server has loaded on that model.
        api_key (`str`, *optional*):
            Key. Defaults to the environment's `OPENAI_API_KEY`, else to a placeholder, for servers that need none.
        timeout (`float`, *optional*, defaults to `300.0`):
            Seconds to wait for a single try.
        max_retries (`int`, *optional*, defaults to `5`):
            Further tries after a failure that may pass. The pauses grow from half a second to 8 seconds.
        max_concurrency (`int`, *optional*, defaults to `32`):
            Requests in flight at once, per process.
        request_tokens (`int`, *optional*, defaults to `8192`):
            Tokens of the rows in one request; a longer row goes alone.
        score_timeout (`float`, *optional*, defaults to `900.0`):
            Seconds that scoring one batch may take in all. Must stay below `ddp_timeout`, after which the process group
            would give up.
        same_weights_at_start (`bool`, *optional*):
            Whether its weights are the policy's when training starts: the self-test then compares it with the policy.
            By default they are when the server loaded the policy's own path, without an adapter.
    """

    server = "The teacher's server"
    unavailable = TeacherError

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        adapter: str | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
        max_retries: int = 5,
        max_concurrency: int = 32,
        request_tokens: int = REQUEST_TOKENS,
        score_timeout: float = 900.0,
        same_weights_at_start: bool | None = None,
    ):
        super().__init__(
            model,
            base_url,
            api_key=api_key,
            timeout=timeout,
            max_retries=max_retries,
            max_concurrency=max_concurrency,
        )
        if request_tokens < 1 or score_timeout <= 0:
            raise ValueError(
                f"`request_tokens` must be at least 1 and `score_timeout` positive, got {request_tokens} and "
                f"{score_timeout}."
            )
        if adapter == "":
            raise ValueError("`adapter` is an empty string: leave it out for the model without one.")
        self.adapter = adapter
        self.request_tokens = request_tokens
        self.score_timeout = score_timeout
        self.same_weights_at_start = same_weights_at_start
        self.facts = ServerFacts()

    @property
    def max_length(self) -> int | None:
        """The longest prompt plus completion that the server can score, in tokens; `None` if unknown."""
        return None if self.facts.window is None else self.facts.window - _SAMPLED

    @property
    def where(self) -> str:
        adapter = "" if self.adapter is None else f", adapter {self.adapter!r}"
        return f"{self.server} at {self.base_url} (model {self.model!r}{adapter})"

    def score(self, rows: Sequence[TeacherRow], *, topk: int = 0) -> TeacherScores:
        """Score `rows` `(N,)` with a completion of at most T tokens.

        Args:
            topk: How many of the most likely tokens to name at each position.

        Raises:
            TeacherError: If the server cannot be reached, refuses, or answers with something else.
        """
        return run_in_background(self._score(rows, topk))

    def check(self, tokenizer: PreTrainedTokenizerBase | None = None, *, topk: int = 0) -> ServerFacts:
        """See whether the server can be the teacher, and keep what it says of itself.

        Args:
            tokenizer: The student's tokenizer, whose ids must mean the same there.
            topk: How many of the most likely tokens it will have to name.

        Raises:
            TeacherError: If it cannot be reached, does not serve the model, or gives too few log-probs.
            VocabularyMismatchError: If its tokenizer is another one.
        """
        self.facts = run_in_background(self._check(tokenizer, topk))
        return self.facts

    async def _check(self, tokenizer: PreTrainedTokenizerBase | None, topk: int) -> ServerFacts:
        served = await self.served()
        if not served:
            raise TeacherError(
                f"{self.where} lists no models, as vLLM does. Correct `base_url`: it usually ends in /v1."
            )
        cards = {str(card.id): card for card in served}
        if missing := [name for name in (self.model, self.adapter) if name is not None and name not in cards]:
            raise TeacherError(f"{self.where} does not serve {missing[0]!r}. It serves: {', '.join([*cards][:20])}.")
        card = cards[self.adapter or self.model]
        parent = getattr(card, "parent", None)
        if self.adapter is not None and parent not in (None, self.model, getattr(cards[self.model], "root", None)):
            raise TeacherError(f"{self.where}: that adapter belongs to {parent!r}, not to {self.model!r}.")
        vocabulary = None
        if tokenizer is not None:
            await self._check_vocabulary(tokenizer)
            vocabulary = max(tokenizer.get_vocab().values()) + 1
        await self._probe(max(topk, 1))
        window = getattr(cards[self.model], "max_model_len", None)
        return ServerFacts(await self._version(), getattr(card, "root", None), window, vocabulary)

    async def _check_vocabulary(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Have the server tokenize a text of all the student's tokens: other vocabularies or merges show there."""
        text = tokenizer.decode(sorted(tokenizer.get_vocab().values()))
        own = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        request = {"model": self.adapter or self.model, "prompt": text, "add_special_tokens": False}
        answer = await self._post(self._beside("tokenize"), request)
        found = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(found, list):
            raise TeacherError(
                f"{self.where} does not tokenize text as vLLM does (`/tokenize`), so nothing can be said "
                "of its vocabulary. Use a vLLM server."
            )
        if found != own:
            at = next(
                (i for i, (a, b) in enumerate(zip(own, found, strict=False)) if a != b), min(map(len, (own, found)))
            )
            raise VocabularyMismatchError(
                f"{self.where} has another vocabulary than the student: of one text it makes {len(found):,} tokens, "
                f"the student {len(own):,}, and they differ from token {at} on, {own[at : at + 3]} for the student and "
                f"{found[at : at + 3]} there. Token-level distillation needs one tokenizer; serve a model of the same "
                "family."
            )

    async def _probe(self, topk: int) -> None:
        """Score two tokens."""
        scores = await self._score([PROBE], topk)
        if not scores.mask.all():
            raise TeacherError(
                f"{self.where} gives no log-probs of a prompt's tokens (`prompt_logprobs`), or fewer of them than it "
                "is asked for. Use a vLLM server."
            )

    async def _version(self) -> str | None:
        """The server's version of vLLM, if it says so."""
        import openai

        client = await self.impatient_client()
        try:
            answer = await client.get(self._beside("version"), cast_to=object)
        except (openai.OpenAIError, ValueError):
            return None
        return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None

    def _beside(self, path: str) -> str:
        """The address of something of vLLM's own, which is not under `/v1`."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/{path}"

    async def _score(self, rows: Sequence[TeacherRow], topk: int) -> TeacherScores:
        known = [self._known(row) for row in rows]
        groups = groups_of([row.length if row.completion_ids else 0 for row in known], self.request_tokens)
        try:
            async with asyncio.timeout(self.score_timeout):
                answers = await _all_or_none(self._ask([known[i] for i in group], topk) for group in groups)
        except TimeoutError as error:
            raise TeacherError(
                f"{self.where} did not score {len(rows)} rows within `score_timeout={self.score_timeout:g}` seconds."
            ) from error
        width = max((len(row.completion_ids) for row in rows), default=0)
        logps = torch.full((len(rows), width), float("nan"))
        ids = torch.zeros((len(rows), width, topk), dtype=torch.long)
        for group, answer in zip(groups, answers, strict=True):
            for i, found in zip(group, answer, strict=True):
                logps[i, : len(found.logps)] = torch.tensor(found.logps)
                if topk:
                    ids[i, : len(found.best)] = torch.tensor(found.best)
        return TeacherScores(logps, logps.isfinite(), ids if topk else None)

    def _known(self, row: TeacherRow) -> TeacherRow:
        """As much of a row as has ids that the server knows: one that it does not would end it."""
        size = self.facts.vocabulary
        if size is None or max([*row.prompt_ids, *row.completion_ids], default=0) < size:
            return row
        prompt = list(takewhile(size.__gt__, row.prompt_ids))
        whole = len(prompt) == len(row.prompt_ids)
        return TeacherRow(prompt, list(takewhile(size.__gt__, row.completion_ids)) if whole else [])

    async def _ask(self, rows: Sequence[TeacherRow], topk: int) -> list[RowScores]:
        """What one request says of the completions of some rows."""
        request = {
            "model": self.adapter or self.model,
            "prompt": [[*row.prompt_ids, *row.completion_ids] for row in rows],
            "prompt_logprobs": topk,
            "max_tokens": _SAMPLED,
            "temperature": 0,
        }
        async with (await self.session()).slots:
            content = await self._post("/completions", request, cast_to=bytes)
        try:
            # In a thread, so that the slot's next request is under way while this answer is read.
            return await asyncio.to_thread(read_answer, content, rows, topk)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TeacherError(
                f"{self.where} answered with something else than one `prompt_logprobs` for each of {len(rows)} rows: "
                f"{error}."
            ) from error

    async def _post(self, path: str, request: dict[str, Any], cast_to: type = object) -> Any:
        """The JSON of an answer, or its `bytes`. `openai`'s own classes have no place for `prompt_logprobs`."""
        import openai

        client = (await self.session()).client
        try:
            return await client.post(path, cast_to=cast_to, body=request)
        except (openai.OpenAIError, ValueError) as error:
            raise TeacherError(f"{self.where} {self._went_wrong(error)}") from error

    def _went_wrong(self, error: Exception) -> str:
        """What happened, and what to do about it."""
        kind, status, said = failure_kind(error), getattr(error, "status_code", None), say(error)
        tries = f"{self.max_retries + 1} tries"
        if status in (401, 403):
            return f"refused the API key (HTTP {status}). Pass `api_key` or set OPENAI_API_KEY."
        if kind == "timeout":
            return (
                f"did not answer within `timeout={self.timeout:g}` seconds, in {tries}. Raise it, or lower "
                f"`request_tokens` ({IN_A_CONFIG})."
            )
        if kind == "unreachable":
            return f"failed {tries}: {said}. Look at its log, start it again, or raise `max_retries` ({IN_A_CONFIG})."
        if kind == "refused" and "logprobs" in said:
            return f"gives fewer log-probs than `topk` asks for: {said}. Start it with a larger `--max-logprobs`."
        answered = "refused" if kind in ("refused", "denied") else "answered with something that is no JSON"
        return f"{answered}: {said}."


async def _all_or_none(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first failure ends the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
