"""A vLLM server as engine, over its HTTP API."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...errors import EngineError
from .base import GREEDY_BELOW, Delta, EngineRequest, Feature

if TYPE_CHECKING:
    import aiohttp

CHECK_SECONDS = 5.0
LOAD_SECONDS = 120.0
CONNECT_SECONDS = 5.0

Logprobs = Literal["raw", "processed"]

_NO_LOGPROB = -9999.0  # what vLLM writes for a log-prob that JSON cannot hold, or that it does not know
_PLAIN_SAMPLING = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
_LOOKED_AT = "Call to add_lora method failed"
"""What vLLM says, with HTTP 500 as for everything that happens to itself, where it found fault with an adapter."""
_MANY = 2**22  # bytes that one line of a stream may have: a prompt's ids come in one


class VllmEngine:
    """Asks a vLLM server for replies with their token ids and log-probs, and has it load adapters while it runs.

    Start the server with `--enable-lora --max-loras 2` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, so that a new version
    can be loaded while the old one still answers, and with `--enable-auto-tool-choice --tool-call-parser ...` where
    clients have tools, which it refuses otherwise. By itself vLLM reports log-probs at temperature 1, whatever it
    samples at; with `--logprobs-mode processed_logprobs` at that of sampling, over the tokens that `top_p` leaves. What
    the model's `generation_config.json` says of sampling is switched off, so that the settings recorded with a turn are
    those it was sampled with.

    Args:
        model (`str`):
            Name of the base model as the server lists it.
        base_url (`str`):
            Address of the API, `/v1` included.
        api_key (`str`, *optional*):
            Key, where the server wants one.
        logprobs (`str`, *optional*, defaults to `"raw"`):
            `"processed"` where the server was started so.
        max_connections (`int`, *optional*, defaults to `512`):
            Requests in flight at once.
    """

    name = "vllm"
    features: frozenset[Feature] = frozenset({"tools", "tool_choice", "response_format"})

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        api_key: str | None = None,
        logprobs: Logprobs = "raw",
        max_connections: int = 512,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"The engine's address must start with http:// or https://, got {base_url!r}.")
        self.model = model
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._processed = logprobs == "processed"
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    @property
    def where(self) -> str:
        return self.base_url

    @property
    def waiting(self) -> None:
        return None

    async def stream(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        import aiohttp

        url, timeout = f"{self.base_url}/chat/completions", aiohttp.ClientTimeout(sock_connect=CONNECT_SECONDS)
        sampled_at = request.sampling["temperature"]
        temperature = sampled_at if self._processed and sampled_at >= GREEDY_BELOW else 1.0
        try:
            async with self._client().post(url, data=json.dumps(self._body(request)), timeout=timeout) as answer:
                if answer.status != 200:
                    raise _refusal(answer.status, await answer.text(), request.adapter)
                async for line in answer.content:
                    if (event := _event(line)) is not None:
                        yield _piece(event, temperature)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # aiohttp's ValueError: a line that is too long
            raise self._failure(error) from error

    def _body(self, request: EngineRequest) -> dict[str, Any]:
        body = {
            "model": request.adapter or self.model,
            "messages": request.messages,
            **_PLAIN_SAMPLING,
            **request.sampling,
            "stream": True,  # also for clients that want the whole: a long reply must not look like silence
            "logprobs": True,
            "top_logprobs": 0,
            "return_token_ids": True,
        }
        return body if request.tools is None else {**body, "tools": request.tools}

    async def load(self, adapter: str, path: Path) -> None:
        folder = str(path.resolve())
        known = (await self._served()).get(adapter)
        if known is not None and known.get("root") == folder:
            return
        if known is not None:
            await self.unload(adapter)
        status, text = await self._post("load_lora_adapter", {"lora_name": adapter, "lora_path": folder})
        if status == 404 and "Not Found" in text:
            raise EngineError(
                "broken",
                f"The vLLM server at {self.base_url} loads no adapters while it runs. Start it with `--enable-lora` "
                "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.",
            )
        if status != 200:
            own_fault = status in (400, 404, 422) or (_LOOKED_AT in text and "out of memory" not in text)
            raise EngineError("refused" if own_fault else "broken", _said(text, status))

    async def loaded(self) -> list[str]:
        return list(await self._served())

    async def unload(self, adapter: str) -> None:
        status, text = await self._post("unload_lora_adapter", {"lora_name": adapter})
        if status not in (200, 404):
            raise EngineError("broken", _said(text, status))

    async def check(self) -> None:
        served = await self._served()
        if self.model not in served:
            raise EngineError(
                "refused",
                f"The vLLM server at {self.base_url} does not serve {self.model!r}. It serves: "
                f"{', '.join([*served][:20]) or 'nothing'}.",
            )

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> "aiohttp.ClientSession":
        """The connections; made at the first request, since they belong to the running event loop."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                headers={"Content-Type": "application/json", **self._headers},
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=_MANY,
            )
        return self._session

    async def _served(self) -> dict[str, dict[str, Any]]:
        """What the server lists, by name."""
        status, text = await self._send("GET", "models", None, CHECK_SECONDS)
        if status in (401, 403):
            raise EngineError("broken", f"The vLLM server at {self.base_url} refused the key (HTTP {status}).")
        if status != 200:
            raise EngineError("down", _said(text, status))
        cards = _parsed(text).get("data")
        if not isinstance(cards, list):
            raise EngineError("broken", f"{self.base_url} answers, but lists no models: it should end in /v1.")
        return {str(card.get("id")): card for card in cards if isinstance(card, dict)}

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return await self._send("POST", path, body, LOAD_SECONDS)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, str]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._client().request(method, f"{self.base_url}/{path}", json=body, timeout=timeout) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> EngineError:
        # Some of aiohttp's errors are timeouts of the standard library as well, and say nothing.
        said = str(error) or type(error).__name__
        if isinstance(error, asyncio.TimeoutError) and "connect" not in said.lower():
            return EngineError("slow", f"The vLLM server at {self.base_url} did not answer in time.")
        return EngineError("down", f"The vLLM server at {self.base_url} cannot be reached: {said}.")


def _event(line: bytes) -> dict[str, Any] | None:
    """What a line of a stream says; `None` for the lines in between and the end. An error may come as a line, too."""
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return None
    event = _parsed(data)
    if error := event.get("error"):
        status = error.get("code") if isinstance(error, dict) else None
        status = status if isinstance(status, int) and 400 <= status < 600 else 500
        raise _refusal(status, data.decode(), None)
    return event


def _parsed(data: bytes | str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise EngineError("broken", f"vLLM sent something that is no JSON: {data[:80]!r}.") from error
    if not isinstance(value, dict):
        raise EngineError("broken", f"vLLM sent something that is no object: {data[:80]!r}.")
    return value


def _piece(event: Mapping[str, Any], temperature: float) -> Delta:
    """A chunk as a piece."""
    try:
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        said = choice.get("delta") or {}
        scores = (choice.get("logprobs") or {}).get("content") or ()
        piece = Delta(
            content=said.get("content") or "",
            reasoning=said.get("reasoning") or said.get("reasoning_content") or "",
            tool_calls=_tool_calls(said.get("tool_calls")),
            token_ids=list(choice.get("token_ids") or ()),
            logprobs=[score["logprob"] for score in scores if score["logprob"] > _NO_LOGPROB],
            temperature=temperature,
            prompt_ids=choice.get("prompt_token_ids") or event.get("prompt_token_ids"),
            finish_reason=choice.get("finish_reason"),
        )
        _check_kinds(piece)
        return piece
    except (AttributeError, KeyError, TypeError) as error:
        raise EngineError("broken", f"vLLM sent something that is no reply: {str(event)[:80]}.") from error


def _check_kinds(piece: Delta) -> None:
    if not isinstance(piece.content, str) or not isinstance(piece.reasoning, str):
        raise TypeError("its text is none")
    if not isinstance(piece.finish_reason, str | None) or not isinstance(piece.prompt_ids, list | None):
        raise TypeError("its end or its prompt's ids are none")


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Pieces of calls with their places, and without fields that are empty."""
    return [
        {"index": index, **{name: value for name, value in call.items() if value is not None}}
        for index, call in enumerate(calls or ())
    ]


def _refusal(status: int, text: str, adapter: str | None) -> EngineError:
    if status == 404 and adapter is not None:
        return EngineError("unloaded", _said(text, status))
    kind = {408: "slow", 502: "down", 503: "down", 504: "slow"}.get(status)
    return EngineError(kind or ("refused" if status in (400, 413, 422) else "broken"), _said(text, status))


def _said(text: str, status: int) -> str:
    """An error's own words."""
    try:
        error = json.loads(text)
        error = error.get("error", error)
        said = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        said = text
    return f"vLLM answered with HTTP {status}: {' '.join(str(said).split())[:500]}"
