"""A model that learns while it is used: a gateway, a learner, and a scripted user who wants one short sentence.

    python -m recipes.live_demo

The user talks to the gateway through the official OpenAI client, one question a session, and says what is wrong with
each reply. Nobody tells the model what is wanted; the learner trains on what was said and publishes new versions, while
the conversations go on, with a break when the next update has all its turns. Before and after, 16 held-out questions
are asked as side traffic, which nobody learns from.
`make live-demo` runs it; `runs/live-demo/summary.json` holds what came of it, and the store beside it all the rest.
"""

import argparse
import asyncio
import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai

from trl_openclaw import PERSONAS
from trl_openclaw.errors import UnknownTurnError
from trl_openclaw.live.learner import LiveConfig
from trl_openclaw.live.records import DEFAULT_USER
from trl_openclaw.live.store import STORE_FILE, Store

from .person import Person, Session
from .services import ROOT, Narrator, Service, gateway, learner

MODEL_NAME = "SmolLM2-135M-Instruct"
IN_A_ROW = 3
_AT_LEAST_ONE = ("updates", "replies", "held_out", "at_once", "max_tokens")
_BREAK_SECONDS = 0.5
_WIDTH = 72  # characters of a reply on the screen
_MUST_BE_NONE = {"lost_turns": "replies are not in the store", "errors": "requests failed"}


def make_parser() -> argparse.ArgumentParser:
    """The parser of the demo."""
    parser = argparse.ArgumentParser(prog="python -m recipes.live_demo", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", type=Path, default=ROOT / "runs" / "models" / MODEL_NAME, help="Folder of the model."
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "live-demo", help="Emptied first, then filled.")
    parser.add_argument("--persona", choices=PERSONAS, default="one-sentence", help="Who talks.")
    parser.add_argument("--updates", type=int, default=7, help="Steps of the learner.")
    parser.add_argument("--replies", type=int, default=1, help="Replies after which the user gives up on a question.")
    parser.add_argument("--held-out", type=int, default=16, help="Questions asked before and after.")
    parser.add_argument("--at-once", type=int, default=2, help="Conversations at a time.")
    parser.add_argument("--max-tokens", type=int, default=32, help="Room for a reply.")
    parser.add_argument("--temperature", type=float, default=0.5, help="Of the replies.")
    parser.add_argument("--seed", type=int, default=7, help="Order of the questions.")
    return parser


def main() -> None:
    """Run the demo and write its summary."""
    parser = make_parser()
    options = parser.parse_args()
    if wrong := [name for name in _AT_LEAST_ONE if getattr(options, name) < 1]:
        parser.error(f"--{wrong[0].replace('_', '-')} must be at least 1")
    if not options.model.is_dir():
        raise SystemExit(f"There is no model at {options.model}. `make model` fetches the demo's.")
    asked = signal.SIGINT

    def on_sigterm(number: int, frame: Any) -> None:
        nonlocal asked
        asked = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)  # which asyncio takes as it should be taken

    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell script's background commands ignore
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        run(options)
    except KeyboardInterrupt:  # by now its two processes have ended, too
        sys.exit(128 + asked)


def run(options: argparse.Namespace) -> None:
    """Let both processes work, talk, and write down what came of it."""
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    started = time.monotonic()
    with (
        gateway(
            options.model, MODEL_NAME, folder, max_tokens=options.max_tokens, temperature=options.temperature
        ) as url,
        learner(options.model, MODEL_NAME, folder, options.updates) as service,
    ):
        print(f"The gateway answers at {url}; the page beside it shows conversations and versions.", flush=True)
        Narrator(service, r"turns ready|[Vv]ersion|v0000")
        client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=300)
        person = Person(client, MODEL_NAME, PERSONAS[options.persona], options.replies)
        before, talked, after = asyncio.run(live(person, service, options))
    summary = summarize(before, talked, after, folder)
    summary["seconds"] = round(time.monotonic() - started)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
    for when in ("before", "after"):
        found = summary[when]
        row = found["sessions_until_three_in_a_row"]
        print(
            f"{when.capitalize()}: {found['satisfied']} of {found['sessions']} first replies satisfied; three in a row "
            + ("never" if row is None else f"after {row} sessions")
            + "."
        )
    print(f"{summary['updates']} versions published in {summary['seconds']} s; {folder / 'summary.json'} has the rest.")
    check(summary)


async def live(
    person: Person, service: Service, options: argparse.Namespace
) -> tuple[list[Session], list[Session], list[Session]]:
    """Sessions before, while, and after the model learns."""
    held_out = read_questions("test")[: options.held_out]
    questions = read_questions("train")
    random.Random(options.seed).shuffle(questions)
    print("Before:", flush=True)
    before = await ask_all(person, held_out, options.at_once)
    print("Now it learns:", flush=True)
    store = Store(options.folder.resolve() / STORE_FILE)
    talked: list[Session] = []
    upcoming = itertools.cycle(questions)
    await asyncio.gather(
        *(talk(person, upcoming, service, lambda: is_enough(store), talked) for _ in range(options.at_once))
    )
    service.check()
    print("After:", flush=True)
    return before, talked, await ask_all(person, held_out, options.at_once)


async def talk(
    person: Person, questions: Iterator[str], service: Service, enough: Callable[[], bool], talked: list[Session]
) -> None:
    """One session after another while the learner runs, with a break while there is enough to learn from."""
    while service.running:
        if enough():
            await asyncio.sleep(_BREAK_SECONDS)
            continue
        session = await person.talk(next(questions))
        talked.append(session)
        show(len(talked), session)


def is_enough(store: Store) -> bool:
    """Whether the next update has all its turns: what is said of an older version teaches less."""
    return store.ready_count(DEFAULT_USER, LiveConfig.max_version_lag) >= LiveConfig.turns_per_step


async def ask_all(person: Person, questions: Sequence[str], at_once: int) -> list[Session]:
    """One session for each question, in their order, a few at a time."""
    gate = asyncio.Semaphore(at_once)

    async def ask(question: str) -> Session:
        async with gate:
            return await person.ask(question)

    sessions = await asyncio.gather(*map(ask, questions))
    for number, session in enumerate(sessions, 1):
        show(number, session)
    return sessions


def show(number: int, session: Session) -> None:
    """Print a session in one line."""
    mark = "satisfied    " if session.first_satisfied else "not satisfied"
    text = " ".join((session.errors or session.replies)[0].split())
    print(f"  {number:4} {mark} {text if len(text) <= _WIDTH else text[: _WIDTH - 1] + '…'}", flush=True)


def summarize(
    before: Sequence[Session], talked: Sequence[Session], after: Sequence[Session], folder: Path
) -> dict[str, Any]:
    """What came of it, from the client's side and, for versions and lost turns, from the store."""
    store = Store(folder / STORE_FILE)
    everything = [*before, *talked, *after]
    published = [
        version for version in store.versions(DEFAULT_USER) if any(e.event == "published" for e in version.events)
    ]
    return {
        "first_replies_satisfied": [int(session.first_satisfied) for session in talked],
        "updates": len(published),
        "lost_turns": sum(_is_lost(store, turn_id) for session in everything for turn_id in session.turn_ids),
        "errors": sum(len(session.errors) for session in everything),
        "before": held_out_numbers(before),
        "after": held_out_numbers(after),
    }


def check(summary: dict[str, Any]) -> None:
    """Raises `SystemExit` where something went wrong, whatever was learned."""
    wrong = [f"{summary[name]} {text}" for name, text in _MUST_BE_NONE.items() if summary[name]]
    if not summary["updates"]:
        wrong.append("no version was published")
    if wrong:
        raise SystemExit(f"Something went wrong: {', '.join(wrong)}.")


def held_out_numbers(sessions: Sequence[Session]) -> dict[str, Any]:
    """How many first replies satisfied, and after how many sessions three in a row had."""
    satisfied = [session.first_satisfied for session in sessions]
    rows = (place + IN_A_ROW for place in range(len(satisfied)) if all(satisfied[place : place + IN_A_ROW]))
    found = next((end for end in rows if end <= len(satisfied)), None)
    return {"sessions": len(satisfied), "satisfied": sum(satisfied), "sessions_until_three_in_a_row": found}


def read_questions(split: str) -> list[str]:
    """The demo's questions."""
    path = ROOT / "recipes" / "demo" / "questions" / f"{split}.jsonl"
    return [json.loads(line)["prompt"][-1]["content"] for line in path.read_text().splitlines()]


def _is_lost(store: Store, turn_id: str) -> bool:
    try:
        store.show(DEFAULT_USER, turn_id)
    except UnknownTurnError:
        return True
    return False


if __name__ == "__main__":
    main()
