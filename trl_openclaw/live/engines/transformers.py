"""A transformers model in this process as engine: for a CPU or a laptop, with nothing else to start."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import chat_template_utils

from ...errors import EngineError
from ...local_chat import end_ids, own_device
from .adapters import Adapters
from .base import Delta, EngineRequest, Feature
from .decoding import Sampling, sampled_tokens
from .messages import as_templates_read
from .reading import ReplyReader

_NO_WINDOW = 2**20


@dataclass(eq=False)
class _Job:
    request: EngineRequest
    loop: asyncio.AbstractEventLoop
    pieces: "asyncio.Queue[Delta | Exception]" = field(default_factory=asyncio.Queue)
    abandoned: bool = False

    def put(self, piece: Delta | Exception) -> None:
        self.call(self.pieces.put_nowait, piece)

    def call(self, function: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(function, *args)


class TransformersEngine:
    """Samples with a transformers model, in a thread of its own, one reply after another.

    Users take turns: whoever sends many requests waits behind those who send one. Adapters change between replies.

    Args:
        model (`str`):
            Path or name of a model. It is loaded in the background; `check` waits for that.
        name (`str`, *optional*):
            The name that clients give. Defaults to `model`.

    Raises:
        ValueError: If there is no tokenizer with a chat template.
    """

    name = "transformers"

    def __init__(self, model: str, *, served_name: str | None = None):
        self.model = served_name or model
        self._path = model
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise ValueError(f"The model {model!r} cannot be used: {' '.join(str(error).split())}") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ValueError(f"The model {model!r} cannot chat: its tokenizer has no chat template.")
        self.features: frozenset[Feature] = frozenset({"tools"} if _reads_calls(self._tokenizer) else ())
        self._jobs: dict[str, deque[_Job]] = {}
        self._calls: deque[tuple[Callable[[Adapters], Any], Future]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._adapters: Future[Adapters] = Future()
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self._thread.start()

    @property
    def where(self) -> str:
        return f"{self._path} in this process, on {own_device()}"

    @property
    def waiting(self) -> int:
        with self._changed:
            return sum(not job.abandoned for jobs in self._jobs.values() for job in jobs)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        job = _Job(request, asyncio.get_running_loop())
        with self._changed:
            self._jobs.setdefault(request.user, deque()).append(job)
            self._changed.notify()
        try:
            while True:
                piece = await job.pieces.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            job.abandoned = True

    async def load(self, adapter: str, path: Path) -> None:
        await self._call(lambda adapters: adapters.load(adapter, path.resolve()))

    async def loaded(self) -> list[str]:
        adapters = await asyncio.shield(asyncio.wrap_future(self._adapters))
        return adapters.names

    async def unload(self, adapter: str) -> None:
        await self._call(lambda adapters: adapters.unload(adapter))

    async def check(self) -> None:
        await asyncio.shield(asyncio.wrap_future(self._adapters))

    async def aclose(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, 30.0)

    async def _call(self, work: Callable[[Adapters], Any]) -> None:
        done: Future = Future()
        with self._changed:
            self._calls.append((work, done))
            self._changed.notify()
        await asyncio.wrap_future(done)

    def _run(self) -> None:
        try:
            model = AutoModelForCausalLM.from_pretrained(self._path, dtype="auto").to(own_device()).eval()
        except Exception as error:  # whatever a file that is no model raises
            self._adapters.set_exception(EngineError("refused", f"The model {self._path!r} cannot be loaded: {error}"))
        else:
            self._adapters.set_result(Adapters(model))
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Callable[[], None] | None:
        """What to do next: changes of adapters first, then replies, users by turns. `None` when all is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._jobs or self._closing)
            if self._closing:
                return None
            if self._calls:
                call, done = self._calls.popleft()
                return lambda: self._do(call, done)
            user = next(iter(self._jobs))
            waiting = self._jobs.pop(user)
            job = waiting.popleft()
            if waiting:
                self._jobs[user] = waiting  # behind all others
            return lambda: self._answer(job)

    def _do(self, call: Callable[[Adapters], Any], done: Future) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call(self._adapters.result()))
        except Exception as error:
            done.set_exception(error)

    def _answer(self, job: _Job) -> None:
        if job.abandoned:
            return
        job.call(job.request.on_turn)
        try:
            self._sample(job, self._adapters.result())
        except EngineError as error:
            job.put(error)
        except Exception as error:
            job.put(EngineError("broken", f"{type(error).__name__}: {error}"))

    def _sample(self, job: _Job, adapters: Adapters) -> None:
        request = job.request
        prompt_ids = self._render(request)
        room = self._room(adapters, len(prompt_ids), request.sampling.get("max_tokens"))
        reader = ReplyReader(self._tokenizer, prompt_ids, request.tools, request.sampling["stop"])
        asked = request.sampling
        sampling = Sampling(asked["temperature"], asked["top_p"], asked.get("seed"))
        ends = end_ids(adapters.base, self._tokenizer)
        first: list[int] | None = prompt_ids
        with adapters.active(request.adapter) as model:
            for count, (token, logprob) in enumerate(sampled_tokens(model, prompt_ids, sampling), start=1):
                ended = token in ends
                piece = Delta() if ended else reader.feed(token)
                piece.token_ids, piece.logprobs, piece.prompt_ids = [token], [logprob], first
                piece.temperature = sampling.logprobs_temperature
                first = None
                finish = "stop" if ended or reader.stopped else "length" if count == room else None
                if finish is not None:
                    _append(piece, reader.end())
                    piece.finish_reason = "tool_calls" if reader.calls and finish == "stop" else finish
                job.put(piece)
                if finish is not None or job.abandoned or self._closing:
                    return

    def _render(self, request: EngineRequest) -> list[int]:
        """The prompt's ids."""
        try:
            rendered = self._tokenizer.apply_chat_template(
                [as_templates_read(message) for message in request.messages],
                tools=request.tools or None,  # some templates have a heading for no tools, too
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                **request.sampling.get("chat_template_kwargs", {}),
            )
        except Exception as error:  # whatever a template raises of messages that it does not take
            raise EngineError("refused", f"The model's chat template does not take these messages: {error}") from error
        return list(rendered["input_ids"])

    def _room(self, adapters: Adapters, prompt: int, most: int | None) -> int:
        window = getattr(adapters.base.config.get_text_config(), "max_position_embeddings", None) or _NO_WINDOW
        if not 0 < prompt < window:
            raise EngineError(
                "refused",
                f"This model's maximum context length is {window} tokens, and the messages have {prompt}.",
            )
        return min(most or window, window - prompt)


def _append(piece: Delta, rest: Delta) -> None:
    piece.content += rest.content
    piece.reasoning += rest.reasoning
    piece.tool_calls += rest.tool_calls


def _reads_calls(tokenizer: Any) -> bool:
    """Whether replies can be read as tool calls. Gives the tokenizer TRL's template for that where it has none."""
    if getattr(tokenizer, "response_template", None) is None:
        with suppress(ValueError):  # a chat template that TRL does not know
            chat_template_utils.add_response_schema(tokenizer)
    template = getattr(tokenizer, "response_template", None) or {}
    return hasattr(tokenizer, "get_response_parser") and "tool_calls" in template.get("fields", {})
