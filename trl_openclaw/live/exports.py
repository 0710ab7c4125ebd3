"""Exports of the store's turns, kept in one folder of the live folder so that deleting a turn reaches them."""

import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ..errors import StoreBusyError
from ..trajectories import next_state_of
from .database import to_json
from .records import StoredTurn
from .store_turns import is_held_out

ExportFormat = Literal["jsonl", "dataset"]

FOLDER = "exports"
LINES = "turns.jsonl"
DATASET = "dataset"
_MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished-"
_LOCK_SECONDS = 60.0


@contextmanager
def exclusively(live_dir: Path) -> Iterator[None]:
    """Keep others from writing or removing exports meanwhile.

    Raises:
        StoreBusyError: When another process keeps at it for more than a minute.
    """
    from filelock import FileLock, Timeout

    folder = live_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with FileLock(folder / ".lock", timeout=_LOCK_SECONDS):
            for left in folder.glob(f"{_UNFINISHED}*"):  # of a process that was killed
                shutil.rmtree(left)
            yield
    except Timeout as error:
        raise StoreBusyError(f"Another process has been writing to {folder} for more than a minute.") from error


def write(
    live_dir: Path, turns: Iterable[StoredTurn], form: ExportFormat, opted_out: Collection[str] = ()
) -> tuple[Path, int]:
    """Write an export, which appears when it is whole. Call it within [`exclusively`].

    Args:
        live_dir: The live folder.
        turns: What to write. A dataset is for training: it leaves out side traffic and what is kept for checks.
        form: `"jsonl"`, or `"dataset"` for a folder that `datasets.load_from_disk` reads.
        opted_out: Users who are left out of a dataset, also with what was trained before.

    Returns:
        The file or folder, and how many turns are in it.
    """
    folder = live_dir / FOLDER
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    ids: list[str] = []
    with open(unfinished / LINES, "w", encoding="utf-8") as lines:
        for turn in turns:
            for_training = turn.kind == "main" and turn.user not in opted_out and not is_held_out(turn.turn_id)
            if form == "jsonl" or for_training:
                lines.write(to_json(export_row(turn)) + "\n")
                ids.append(turn.turn_id)
    if form == "dataset" and ids:  # of no rows there is no dataset
        _write_dataset(unfinished)
    (unfinished / _MANIFEST).write_text(json.dumps({"turns": ids}), encoding="utf-8")
    taken = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
    final = folder / f"{max(taken, default=0) + 1:06d}"
    os.rename(unfinished, final)
    return final / (LINES if form == "jsonl" else DATASET), len(ids)


def remove(live_dir: Path, turn_ids: Collection[str]) -> list[str]:
    """Remove the exports that hold one of these turns. Call it within [`exclusively`].

    Returns:
        The folders that were removed.
    """
    wanted = set(turn_ids)
    removed = []
    for manifest in sorted((live_dir / FOLDER).glob(f"*/{_MANIFEST}")):
        if not wanted.isdisjoint(json.loads(manifest.read_text(encoding="utf-8"))["turns"]):
            shutil.rmtree(manifest.parent)
            removed.append(str(manifest.parent))
    return removed


def export_row(turn: StoredTurn) -> dict[str, Any]:
    """A turn as a row: `prompt`, `completion`, `next_state` as our trainers take them, and all else that is known."""
    verdict = turn.verdict
    state = next_state_of(turn.next_state) if turn.next_state else None
    return {
        "prompt": turn.messages,
        "completion": [turn.reply],
        "next_state": None if state is None else {"role": state.role, "content": state.content},
        "judge_score": verdict.score if verdict else None,
        "outcome": verdict.outcome if verdict else None,
        "hints": list(verdict.hints) if verdict else [],
        "model_version": turn.model_version,
        "model": turn.model,
        "turn_id": turn.turn_id,
        "user": turn.user,
        "session_id": turn.session_id,
        "parent": turn.parent,
        "kind": turn.kind,
        "side_reason": turn.side_reason,
        "state": turn.state,
        "created": turn.created,
        "finish_reason": turn.finish_reason,
        "tools": turn.tools,
        "sampling": turn.sampling,
        "prompt_ids": turn.prompt_ids,
        "completion_ids": turn.completion_ids,
        "logprobs": turn.logprobs,
        "next_state_messages": turn.next_state,
        "next_state_source": turn.next_state_source,
        "next_state_told_by": turn.next_state_told_by,
        "votes": [vars(vote) for vote in verdict.votes] if verdict else [],
        "verdict_source": verdict.source if verdict else None,
        "hint_source": verdict.hint_source if verdict else None,
    }


def _write_dataset(folder: Path) -> None:
    """Turn the lines of a folder into a dataset. Nothing of it goes into a cache elsewhere."""
    from datasets import Dataset, Features, Json, List, Value

    texts = [
        *("outcome", "model_version", "model", "turn_id", "user", "session_id", "parent", "kind", "side_reason"),
        *("state", "finish_reason", "next_state_source", "next_state_told_by", "verdict_source", "hint_source"),
    ]
    # Messages differ in their keys, which a table would make all the same.
    values = ("prompt", "completion", "next_state", "tools", "sampling", "next_state_messages", "votes")
    features = Features(
        {name: Json() for name in values}
        | {name: Value("string") for name in texts}
        | {"judge_score": Value("int64"), "created": Value("float64"), "hints": List(Value("string"))}
        | {name: List(Value("int32")) for name in ("prompt_ids", "completion_ids")}
        | {"logprobs": List(Value("float32"))}
    )
    cache = folder / "cache"
    lines = {"path": str(folder / LINES)}
    Dataset.from_generator(_rows, features=features, cache_dir=str(cache), gen_kwargs=lines).save_to_disk(
        str(folder / DATASET)
    )
    shutil.rmtree(cache)
    (folder / LINES).unlink()


def _rows(path: str) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        yield from map(json.loads, lines)
