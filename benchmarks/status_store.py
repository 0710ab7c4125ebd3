"""A store filled by hand with everyday questions, to look at the status page with. Its numbers are made up.

The user here wants one short sentence, as in the demo. `fill` writes 7 conversations and 4 versions; `add_turn` and
`add_scores` are what it is made of, for the page's tests.
"""

import math
import re
import uuid
from typing import Any

from trl_openclaw.live.canonical import turn_hashes
from trl_openclaw.live.records import NewTurn, TokenScores
from trl_openclaw.live.store import Store
from trl_openclaw.types import Verdict, Vote

USER = "default"
MODEL = "SmolLM2-135M-Instruct"
SHORTER = "That is too long. Please answer in one short sentence."
HINT = "Answer in one short sentence and leave everything else out."
HOUR = 3600.0


def turn_id(name: str) -> str:
    """A completion's id that is the same in every run."""
    return f"chatcmpl-{uuid.uuid5(uuid.NAMESPACE_URL, name).hex}"


def pieces(text: str) -> list[str]:
    """Text as pieces that look like a tokenizer's, and an end-of-sequence token."""
    return [*re.findall(r"\n+| ?[^\s,.;:!?]{1,9}|[,.;:!?]| ", text), "<|im_end|>"]


def votes(*scores: int | None, hint: str | None = None) -> Verdict:
    """What votes came to; `None` is one that could not be read."""
    found = [Vote(score, failure=None if score is not None else "unparseable") for score in scores]
    return Verdict.from_votes([Vote(vote.score, vote.failure, hint=hint) if vote.score else vote for vote in found])


def add_turn(
    store: Store,
    name: str,
    messages: list[dict[str, Any]],
    reply: str | dict[str, Any],
    *,
    session: str,
    verdict: Verdict | None = None,
    next_state: str | list[dict[str, Any]] | None = None,
    created: float | None = None,
    **more: Any,
) -> str:
    """Record a turn, what followed it, and its verdict.

    Returns:
        Its `turn_id`.
    """
    message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    ids = tuple(range(len(pieces(message.get("content") or "call"))))
    values = {
        "turn_id": turn_id(name),
        "user": USER,
        "session_id": session,
        "parent": None,
        "kind": "main",
        "side_reason": None,
        "messages": messages,
        "tools": None,
        "reply": message,
        "finish_reason": "stop",
        "prompt_ids": (1, 2, 3),
        "completion_ids": ids,
        "logprobs": tuple(-0.5 for _ in ids),
        "sampling": {"temperature": 1.0},
        "model": MODEL,
        "model_version": "base",
        **more,
    }
    store.record_turn(NewTurn(**values), turn_hashes(messages, message), created=created)
    if next_state is not None:
        followed = [{"role": "user", "content": next_state}] if isinstance(next_state, str) else next_state
        store.add_next_state(values["turn_id"], followed)
    if verdict is not None:
        store.add_verdict(values["turn_id"], verdict)
    return values["turn_id"]


def made_up_scores(text: str, score: int) -> TokenScores:
    """Scores that look like a step's: the teacher likes the first sentence and its end, and less what follows."""
    tokens = pieces(text)
    ends = [place for place, token in enumerate(tokens) if token in ".!?"] or [len(tokens)]
    student, teacher = [], []
    for place, token in enumerate(tokens):
        base = -0.15 - 1.6 * abs(math.sin(2.3 * place + len(token)))
        late = place > ends[0]
        lean = -0.85 * abs(math.sin(1.7 * place)) if late else 0.5 * abs(math.cos(1.3 * place))
        if token == "<|im_end|>":
            lean = 1.4
        student.append(base)
        teacher.append(min(-0.01, base + lean))
    gaps = [max(-1.0, min(1.0, t - s)) for s, t in zip(student, teacher, strict=True)]
    prefers = [
        [
            [token, round(math.exp(t), 4), round(math.exp(s), 4)],
            [_other(token), round((1 - math.exp(t)) * 0.6, 4), round((1 - math.exp(s)) * 0.4, 4)],
        ]
        for token, s, t in zip(tokens, student, teacher, strict=True)
    ]
    return TokenScores(student, teacher, [score * 0.35 + gap for gap in gaps], prefers, tokens)


def _other(token: str) -> str:
    return "<|im_end|>" if token in ".,!?;:" else "." if len(token) > 6 else " and"


def add_scores(store: Store, batch_id: str, scores: dict[str, TokenScores], version: str) -> None:
    """Say that a batch was trained, what its tokens earned, and which version came of it."""
    store.add_token_scores(batch_id, scores)
    store.end_batch(batch_id, "trained", version)
    folder = store.path.parent / "adapters" / USER / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")  # enough for an engine that does not read it
    store.add_version(USER, version, store.published_version(USER), str(folder))


SHORT, LONG = "short", "long"

# Question, the long reply of an early version, the short one of a later version.
QUESTIONS = (
    (
        "How do I keep fresh herbs from wilting?",
        "Keeping herbs fresh is easy. First, trim the stems and put them into a glass of water. "
        "Then cover them loosely with a bag, and change the water every two days.\n\nYou can also dry them, or freeze "
        "them in oil, which keeps most of their taste for months.",
        "Trim the stems and stand the herbs in a glass of water in the fridge.",
    ),
    (
        "Why does bread go stale?",
        "Bread goes stale because its starch turns back into crystals as it cools. This pushes water out of the "
        "starch, so that the crumb becomes firm.\n\nIt happens fastest in the fridge, so keep bread in a box or freeze "
        "it.",
        "Its starch slowly turns back into crystals and pushes the water out.",
    ),
    (
        "What is a good way to clean a cast-iron pan?",
        "There are several ways to clean a cast-iron pan. Wipe it while it is warm, and scrub what sticks with coarse "
        "salt. Rinse it briefly, dry it on the stove, and rub in a little oil.",
        "Wipe it while warm, scrub it with coarse salt, dry it, and rub in a little oil.",
    ),
    (
        "How can I fall asleep faster?",
        "Many things help. Go to bed at the same time every day, keep the room cool and dark, and put screens away an "
        "hour before. If you cannot sleep, get up, read something quiet, and come back when you are tired.",
        "Keep the room cool and dark and put screens away an hour before bed.",
    ),
    (
        "Which plants grow well in a dark hallway?",
        "Some plants do well with little light. The snake plant, the cast-iron plant and pothos are good choices. "
        "Water them rarely, and turn them from time to time.",
        "Snake plants, cast-iron plants and pothos all cope with little light.",
    ),
    (
        "How long do boiled eggs keep?",
        "Boiled eggs keep for about a week in the fridge if their shells are whole. Peeled ones should be eaten within "
        "two days.",
        "About a week in the fridge, in their shells.",
    ),
    (
        "What is the difference between baking soda and baking powder?",
        "Baking soda is a base and needs something sour in the dough. Baking powder has its acid with it already, so "
        "that it works with water and heat alone.",
        "Baking powder has its own acid, and baking soda needs something sour in the dough.",
    ),
)


def fill(store: Store, start: float) -> None:
    """Fill an empty store: three updates, of which the second is rejected, and turns in every state.

    Args:
        store: The store. Its `clock` is moved along.
        start: When the first turn was, as a wall clock's seconds.
    """
    moment = start

    def tick(seconds: float) -> float:
        nonlocal moment
        moment += seconds
        return moment

    store.clock = lambda: moment
    update(store, "v000001", 0, 0, tick)
    store.add_version_event(USER, "v000001", "checked", checks(0.021))
    store.publish(USER, "v000001")
    rejected = update(store, "v000002", 16, 6, tick)
    store.add_version_event(USER, "v000002", "checked", checks(-0.143))
    reason = f"held_out: {held_out_note(-0.143)}"
    store.add_version_event(USER, "v000002", "rejected", {"reason": reason})
    store.end_batch(rejected, "rejected", "v000002")
    update(store, "v000003", 32, 12, tick)
    store.add_version_event(USER, "v000003", "checked", checks(0.037))
    store.publish(USER, "v000003")
    for place in range(12):
        converse(store, 48 + place, True, tick, judged=place < 11)
    side = [{"role": "user", "content": "Write a title of at most five words for this conversation."}]
    add_turn(
        store,
        "side",
        side,
        "Keeping Herbs Fresh",
        session="title",
        kind="side",
        side_reason="title",
        model_version="v000003",
        created=tick(60.0),
    )


def held_out_note(moved: float) -> str:
    """What the learner says of held-out turns."""
    return f"{moved:+.3f} nats per token the right way, over 9 turns (accepted -0.1)"


def checks(moved: float) -> dict[str, Any]:
    """What a version's checks say, where held-out turns moved this far the right way."""
    found = {
        "held_out": ("passed" if moved > -0.1 else "failed", held_out_note(moved)),
        "plain_questions": ("passed", "1.482 nats per token over 8 questions, +0.011 in this update (accepted 0.2)"),
        "replays": ("no_data", "no corrections were trained yet"),
        "collapse": ("passed", "31 tokens, entropy 0.94, repetition 0.02"),
    }
    results = {name: {"outcome": outcome, "note": note, "numbers": {}} for name, (outcome, note) in found.items()}
    return {"checks": results, "turns": 16, "seconds": 21.5}


def update(store: Store, version: str, first: int, good: int, tick: Any) -> str:
    """Turns until 16 are ready, `good` of them pleasing, and the version that is trained on them: its batch."""
    place = first
    while store.ready_count(USER, 99) < 16:
        converse(store, place, (place * 7) % 16 < good, tick)
        place += 1
    batch = store.claim(USER, 16, 99)
    scores = {
        turn.turn_id: made_up_scores(turn.reply["content"], turn.verdict.score or 0)
        for turn in batch.turns
        if turn.verdict is not None
    }
    tick(90.0)
    add_scores(store, batch.batch_id, scores, version)
    return batch.batch_id


def converse(store: Store, place: int, pleased: bool, tick: Any, judged: bool = True) -> None:
    """One question with its reply; a user who is not pleased asks for a shorter one and gets it."""
    question, long, short = QUESTIONS[place % len(QUESTIONS)]
    session = f"chat-{place}"
    version = store.published_version(USER)
    asked = [{"role": "user", "content": question}]
    first = short if pleased else long
    verdict = votes(1, 1, 1) if pleased else votes(-1, -1, 0 if place % 3 else -1, hint=HINT)
    add_turn(
        store,
        f"{session}-1",
        asked,
        first,
        session=session,
        model_version=version,
        created=tick(0.4 * HOUR),
        next_state=("Thanks, that is all I needed." if pleased else SHORTER) if judged else None,
        verdict=verdict if judged else None,
    )
    if not pleased:
        more = [*asked, {"role": "assistant", "content": long}, {"role": "user", "content": SHORTER}]
        add_turn(
            store,
            f"{session}-2",
            more,
            short,
            session=session,
            model_version=version,
            created=tick(40.0),
            parent=turn_id(f"{session}-1"),
            next_state="Thanks, that is all I needed.",
            verdict=votes(1, 1, None),
        )
