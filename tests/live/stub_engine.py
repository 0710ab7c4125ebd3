"""A real HTTP server on the loopback that speaks vLLM's protocol, with adapters, token ids, and ways of failing.

    python tests/live/stub_engine.py --delay 0.02 --pieces 8

prints its address and serves until it is killed.
"""

import argparse
import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

CALL = "call the tool"
"""A last message with these words is answered with a call of the first tool."""


def ids_of(text: str) -> list[int]:
    """The stub's tokens: bytes."""
    return list(text.encode())


def plain(adapter: str) -> str:
    """An adapter's name without what tells it from those of other stores."""
    return adapter.partition("@")[0]


def prompt_of(messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """The ids that the stub makes of messages."""
    return ids_of(json.dumps([messages, tools or []], sort_keys=True))


class StubEngine:
    """Answers with the plain name of the adapter and the last message, word by word.

    Attributes may be changed while it runs.

    Args:
        model: The base model it lists.
        delay: Seconds before the first piece.
        pause: Seconds between two pieces.
        pieces: How many words a reply has at least; `0` for those of the last message alone.
        trouble: Called with each chat request; returns the name of what goes wrong with it (see `_reply`), or `None`.
    """

    def __init__(
        self,
        model: str = "stub",
        *,
        delay: float = 0.0,
        pause: float = 0.0,
        pieces: int = 0,
        trouble: Callable[[dict], str | None] = lambda request: None,
    ):
        self.model, self.delay, self.pause, self.pieces, self.trouble = model, delay, pause, pieces, trouble
        self.adapters: dict[str, str] = {}
        self.refuses: set[str] = set()
        self.takes_adapters = True
        self.sick = False
        self.load_delay = 0.0
        self.thought = ""
        """What it thinks before each reply, where the server tells it from the reply."""
        self.requests: list[dict[str, Any]] = []
        self.in_use: Counter[str] = Counter()
        self.log: list[str] = []
        """Loads, unloads, and what should never happen."""
        self.aborted = 0
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: web.AppRunner | None = None
        self._thread: threading.Thread | None = None

    @property
    def base_url(self) -> str:
        """Address of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def loaded(self) -> list[str]:
        """The adapters that are loaded, by their plain names."""
        return [plain(name) for name in self.adapters]

    def start(self) -> "StubEngine":
        """Serve in a thread, at the same port as before where it was started before."""
        ready = threading.Event()

        def run() -> None:
            self._loop = asyncio.new_event_loop()
            self._loop.run_until_complete(self._serve())
            ready.set()
            self._loop.run_forever()
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def stop(self) -> None:
        """Stop at once, in the middle of what is being answered."""
        assert self._loop is not None

        async def end() -> None:
            await self._runner.cleanup()
            asyncio.get_running_loop().stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(20)

    def __enter__(self) -> "StubEngine":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        if self._thread.is_alive():
            self.stop()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/load_lora_adapter", self._load)
        app.router.add_post("/v1/unload_lora_adapter", self._unload)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _models(self, request: web.Request) -> web.Response:
        cards = [{"id": self.model, "object": "model", "root": self.model}]
        cards += [{"id": name, "object": "model", "root": path} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if not self.takes_adapters:
            return web.json_response({"detail": "Not Found"}, status=404)
        await asyncio.sleep(self.load_delay)
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if self.sick:
            self.log.append(f"did not load {plain(name)}")
            return _error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        if plain(name) in self.refuses:
            return _error(500, "Call to add_lora method failed: LoRA rank 64 is greater than max_lora_rank 16.")
        if not (Path(path) / "adapter_config.json").is_file():
            return _error(404, f"Loading lora {name} failed: No adapter found for {path}")
        self.adapters[name] = path
        self.log.append(f"load {plain(name)}")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        self.log.append(f"unload {plain(name)}")
        if self.in_use[name]:
            self.log.append(f"unloaded {plain(name)} in mid-reply")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        model = body["model"]
        if model != self.model and model not in self.adapters:
            return _error(404, f"The model `{model}` does not exist.")
        self.in_use[model] += 1
        try:
            return await self._reply(request, body, self.trouble(body))
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.in_use[model] -= 1

    async def _reply(self, request: web.Request, body: dict, trouble: str | None) -> web.StreamResponse:
        await asyncio.sleep(self.delay if trouble != "hangs" else 3600)
        if trouble == "refuses":
            return _error(400, "This model's maximum context length is 10 tokens.")
        if trouble == "fails":
            return _error(500, "EngineCore died")
        if trouble == "is full":
            return _error(503, "overloaded")
        if trouble == "html":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        if trouble == "drops":
            request.transport.abort()
        message, prompt, words = self._said(body)
        finish = "tool_calls" if "tool_calls" in message else "stop"
        if trouble == "cut short":
            finish = "length"
        frame = {"id": "chatcmpl-of-the-stub", "created": int(time.time()), "model": body["model"]}
        if not body.get("stream"):
            await asyncio.sleep(self.pause * len(words))
            ids = [token for word in words for token in ids_of(word)]
            choice = {"index": 0, "message": message, "finish_reason": finish, **_scores(body, ids)}
            return web.json_response(
                _spoiled(
                    {**frame, "object": "chat.completion", "choices": [choice], **_prompt_ids(body, prompt)}, trouble
                )
            )
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        first = {**frame, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        await _send(answer, _spoiled({**first, **_prompt_ids(body, prompt)}, trouble))
        for word in self.thought.split():
            choice = {"index": 0, "delta": {"reasoning": word}, **_scores(body, ids_of(word))}
            await _send(answer, {**frame, "choices": [choice]})
        for place, word in enumerate(words):
            await asyncio.sleep(self.pause)
            if place == 1 and trouble == "dies":
                await asyncio.sleep(0.1)  # what was sent before has arrived
                request.transport.abort()
            if place == 1 and trouble in ("errors", "refuses late"):
                code = 500 if trouble == "errors" else 400
                await _send(answer, {"error": {"message": "EngineCore died", "code": code}})
                break
            if place == 1 and trouble == "stalls":
                await asyncio.sleep(3600)
            if place == 1 and trouble == "ends":
                break
            delta = {"content": word} if "tool_calls" not in message else _call_piece(message, place, word)
            last = {"finish_reason": finish} if place == len(words) - 1 else {"finish_reason": None}
            choice = {"index": 0, "delta": delta, **last, **_scores(body, ids_of(word))}
            await _send(answer, _spoiled({**frame, "choices": [choice]}, trouble))
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _said(self, body: dict) -> tuple[dict, list[int], list[str]]:
        """The reply, the prompt's ids, and the pieces of what was sampled."""
        asked = str(body["messages"][-1].get("content"))
        prompt = prompt_of(body["messages"], body.get("tools"))
        if CALL in asked and body.get("tools"):
            name, arguments = body["tools"][0]["function"]["name"], json.dumps({"word": asked.split()[-1]})
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}, prompt, [arguments[:5], arguments[5:]]
        words = [f"{plain(body['model'])}:", *asked.split()]
        words += [f"w{place}" for place in range(self.pieces - len(words))]
        words = [word if place == 0 else f" {word}" for place, word in enumerate(words)]
        return {"role": "assistant", "content": "".join(words)}, prompt, words


def _call_piece(message: dict, place: int, text: str) -> dict:
    call = message["tool_calls"][0]
    if place == 0:
        function = {"name": call["function"]["name"], "arguments": text}
        return {"tool_calls": [{"index": 0, "id": call["id"], "type": "function", "function": function}]}
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


def _scores(body: dict, ids: list[int]) -> dict:
    found: dict[str, Any] = {"token_ids": ids} if body.get("return_token_ids") else {}
    if body.get("logprobs"):
        content = [{"token": chr(token), "logprob": -token / 256, "top_logprobs": []} for token in ids]
        found["logprobs"] = {"content": content}
    return found


def _prompt_ids(body: dict, prompt: list[int]) -> dict:
    return {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}


def _spoiled(event: dict, trouble: str | None) -> dict:
    """An event with what is wrong in it."""
    choice = event["choices"][0]
    said = choice.get("delta") or choice.get("message") or {}
    if trouble == "text in parts":
        said["content"] = [{"type": "text", "text": "hi"}]
    if trouble == "half an emoji" and "content" in said:
        said["content"] = "a\ud83d"
    if trouble == "call without function" and said.get("tool_calls"):
        said["tool_calls"][0]["function"] = "look"
    if trouble == "end in parts":
        choice["finish_reason"] = ["stop"]
    if trouble == "prompt of one" and event.get("prompt_token_ids"):
        event["prompt_token_ids"] = 5
    if trouble == "no prompt ids":
        event.pop("prompt_token_ids", None)
    if trouble == "no ids":
        choice.pop("token_ids", None)
    if trouble == "missing log-probs" and choice.get("logprobs"):
        choice["logprobs"]["content"] = choice["logprobs"]["content"][:-1]
    if trouble == "no number" and choice.get("logprobs"):
        choice["logprobs"]["content"][0]["logprob"] = -9999.0
    if trouble == "wrong ids" and choice.get("token_ids"):
        choice["token_ids"][0] = -1
    if trouble == "wrong log-probs" and choice.get("logprobs"):
        choice["logprobs"]["content"][0]["logprob"] = 3.5
    return event


async def _send(answer: web.StreamResponse, event: dict) -> None:
    await answer.write(f"data: {json.dumps(event)}\n\n".encode())


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "stub", "code": status}}, status=status)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--pieces", type=int, default=0)
    args = parser.parse_args()
    with StubEngine(**vars(args)) as stub:
        print(stub.base_url, flush=True)
        sys.stdin.read()  # until whoever started it has gone


if __name__ == "__main__":
    main()
