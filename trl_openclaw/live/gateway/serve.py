"""`trl-openclaw serve`: an engine, a judge, the store and the gateway, in one process."""

import gc
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import uvicorn

from ...errors import JudgeUnavailableError, OpenClawError
from ...judges import Judge
from ...judges.named import build_judge
from ..engines import ENGINES, Engine
from ..lock import held
from ..status import status_router
from ..store import Store
from .app import Gateway, create_app
from .auth import Keys, check_bind
from .log_keeper import LOG_PAGES
from .settings import ServeSettings, read_settings

SWITCH_SECONDS = 0.0005
"""How long one of Python's threads may keep the others waiting. A reply waits for the thread that records it, and with
Python's own 5 ms it would do so for longer than recording takes."""

KEEP_SECONDS = 75
"""How long a connection stays open between two requests: longer than clients keep them, which then close first."""

STOP_SECONDS = 10
"""How long replies may go on when the gateway is asked to end."""


def main(args: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it; 2 where a setting is wrong, with one line that says which."""
    with ExitStack() as stack:
        try:
            settings = read_settings(sys.argv[1:] if args is None else args)
            keys = Keys.read(Path(settings.keys)) if settings.keys else Keys()
            check_bind(settings.host, keys)
            judge = build_judge(settings)
            listening = listen(settings.host, settings.port)
            stack.enter_context(only_gateway(settings))
            engine = ENGINES[settings.engine](settings)
            store = Store(settings.store_path, busy_seconds=1.0, log_pages=LOG_PAGES)
        except (ValueError, OSError, OpenClawError) as error:
            sys.stderr.write(f"trl-openclaw serve: error: {' '.join(str(error).split())}\n")
            return 2
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        sys.setswitchinterval(SWITCH_SECONDS)
        app = create_app(
            store, engine, judge=judge, keys=keys, options=settings.options, routers=[status_router(store)]
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=STOP_SECONDS,
            timeout_keep_alive=KEEP_SECONDS,
            lifespan="on",
            server_header=False,
        )
        server = _Server(config, "\n".join(start_lines(settings, engine, judge, keys, listening)))
        try:
            server.run(sockets=[listening])
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        return 0 if server.started else 1


def only_gateway(settings: ServeSettings) -> AbstractContextManager[None]:
    """Hold the lock of the gateway on a store. Two would judge each turn twice and take away each other's adapters."""
    return held(
        settings.lock_path,
        lambda other: OpenClawError(
            f"Another gateway (process {other}) already serves {settings.live_dir}. "
            "Stop it first, or give this one a `--live-dir` of its own."
        ),
    )


class _Server(uvicorn.Server):
    """Says where it listens as soon as it does."""

    def __init__(self, config: uvicorn.Config, hello: str):
        super().__init__(config)
        self._hello = hello

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        gc.collect()
        gc.freeze()  # what is there now stays; to look through it now and then would keep replies waiting for 30 ms
        app: Any = self.config.app
        said = [self._hello, *await _problems(app.state.gateway)]
        sys.stdout.write("\n".join(said) + "\n")
        sys.stdout.flush()


async def _problems(gateway: Gateway) -> list[str]:
    """What does not work yet; neither keeps the gateway from starting. A model in this process is waited for."""
    found = []
    if problem := await gateway.engine_problem():
        found.append(f"The engine cannot reply yet: {problem}")
    check = getattr(gateway.judging.judge, "check", None) if gateway.judging else None
    if check is not None:
        try:
            await check()
        except JudgeUnavailableError as error:
            found.append(f"Nothing is judged yet: {error}")
    return found or ["Ready."]


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address.

    Raises:
        ValueError: In one line, when that cannot be.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small pieces at once on connections that say they are TCP's, and those inherit it from here.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ValueError(f"Cannot listen at {host} port {port}: {error.strerror or error}.") from error
    return listening


def start_lines(
    settings: ServeSettings, engine: Engine, judge: Judge | None, keys: Keys, listening: socket.socket
) -> list[str]:
    """What people want to know when it starts."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    who = f"{len(keys.users)} users, by their keys" if keys else "everybody on this machine, without a key"
    key = "your key" if keys else "any"
    judged = "nobody: only thumbs (POST /v1/feedback) say what was good" if judge is None else _judge_line(settings)
    return [
        f"trl-openclaw serves {engine.model} at {url}",
        f"  engine    {engine.name}: {engine.where}",
        f"  judge     {judged}",
        f"  users     {who}",
        f"  live_dir  {Path(settings.live_dir).resolve()}",
        f"  page      {url}/",
        f"Point a client at it: OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}, model {engine.model}",
    ]


def _judge_line(settings: ServeSettings) -> str:
    where = f" at {settings.judge_base_url}" if settings.judge == "llm" else ""
    model = f": {settings.judge_model}" if settings.judge_model else ""
    return f"{settings.judge}{model}{where}"


if __name__ == "__main__":
    raise SystemExit(main())
