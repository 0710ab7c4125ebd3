"""A real HTTP server on the loopback that speaks the OpenAI chat protocol, answers from a script and counts."""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Reply:
    """One answer of the server, or one way of failing.

    Args:
        text: Content of the answer; `None` sends a null content.
        finish_reason: `"stop"`, `"length"` or another of the protocol's reasons.
        status: HTTP status; from 400 on, the body is an error object.
        delay: Seconds to wait before answering.
        drop: Whether to close the connection without a word.
        choices: Whether to send any choice at all.
        extra: More fields of the message, `reasoning_content` for example.
        error: Text of an error answer.
        body: Sent as it is in place of a completion.
    """

    text: str | None = ""
    finish_reason: str = "stop"
    status: int = 200
    delay: float = 0.0
    drop: bool = False
    choices: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    error: str = "scripted failure"
    body: str | None = None


Script = str | Reply | Sequence[str | Reply] | Callable[[list[dict[str, Any]]], str | Reply]
"""What to answer: always the same, one after the other (the last is repeated), or a function of the messages."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that give up early are part of the tests."""


class StubChatServer:
    """Serves `/v1/models` and `/v1/chat/completions` on `127.0.0.1` at a free port.

    `script`, `models`, `models_reply` and `hold_until` may be changed while it runs.

    Args:
        script: What to answer.
        models: The models it lists.
        hold_until: Hold every answer until this many requests are in flight, or `hold_seconds` have passed.
        hold_seconds: See `hold_until`.
    """

    def __init__(
        self,
        script: Script = "ok",
        *,
        models: Sequence[str] = ("stub-model",),
        hold_until: int = 0,
        hold_seconds: float = 20.0,
    ):
        self.script = script
        self.models = list(models)
        self.models_reply: Reply | None = None
        self.hold_until = hold_until
        self.hold_seconds = hold_seconds
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.max_in_flight = 0
        self._in_flight = 0
        self._released = False
        self._changed = threading.Condition()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def base_url(self) -> str:
        """Address for an OpenAI client."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def count(self) -> int:
        """How many completions were asked for."""
        return len(self.requests)

    def start(self) -> "StubChatServer":
        """Start serving in a thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "StubChatServer":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def get(self, path: str) -> tuple[Reply, dict[str, Any]]:
        """The reply to a GET request, and its payload."""
        if self.models_reply is not None:
            return self.models_reply, {}
        if path != "/v1/models":
            return Reply(status=404), {}
        return Reply(), {"object": "list", "data": [{"id": model, "object": "model"} for model in self.models]}

    def post(self, path: str, request: dict[str, Any], headers: Mapping[str, str]) -> tuple[Reply, dict[str, Any]]:
        """The reply to a POST request, and its payload."""
        if path != "/v1/chat/completions":
            return Reply(status=404), {}
        reply = self.answer(request, headers)
        message = {"role": "assistant", "content": reply.text, **reply.extra}
        choices = [{"index": 0, "message": message, "finish_reason": reply.finish_reason}]
        return reply, {
            "id": "stub",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": choices if reply.choices else [],
        }

    def answer(self, request: dict[str, Any], headers: Mapping[str, str]) -> Reply:
        """The reply to one completion request, after counting it."""
        with self._changed:
            index = len(self.requests)
            self.requests.append(request)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self._in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._in_flight)
            if self._in_flight >= self.hold_until:
                self._released = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._released, timeout=self.hold_seconds):
                self._released = True
        try:
            reply = self._scripted(index, request.get("messages", []))
            reply = Reply(reply) if isinstance(reply, str) else reply
            time.sleep(reply.delay)
            return reply
        finally:
            with self._changed:
                self._in_flight -= 1

    def _scripted(self, index: int, messages: list[dict[str, Any]]) -> str | Reply:
        script = self.script
        if callable(script):
            return script(messages)
        if isinstance(script, str | Reply):
            return script
        return script[min(index, len(script) - 1)]


def _handler(stub: StubChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(*stub.get(self.path))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(*stub.post(self.path, request, dict(self.headers)))

        def _send(self, reply: Reply, payload: dict[str, Any]) -> None:
            if reply.drop:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if reply.status >= 400:
                payload = {"error": {"message": reply.error, "type": "stub"}}
            body = (reply.body if reply.body is not None else json.dumps(payload)).encode()
            self.send_response(reply.status)
            self.send_header("Content-Type", "application/json" if reply.body is None else "text/html")
            self.send_header("Content-Length", str(len(body)))
            # Keeps the client's pauses between tries short.
            self.send_header("retry-after-ms", "20")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    return Handler
