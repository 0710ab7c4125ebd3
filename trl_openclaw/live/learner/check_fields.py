"""Settings of the checks that a new version must pass."""

from dataclasses import dataclass, field
from typing import ClassVar

from ...trainer.settings import Number


@dataclass
class CheckFields:
    r"""
    What a new version is checked for before it is published, against the published one and against the base model.

    Args:
        check_held_out (`float`, *optional*, defaults to `0.1`):
            How far held-out turns may go the wrong way: the mean of score times change in log-prob per token, in nats,
            may fall this far below 0. `None` switches the check off, as it does for all that follow.
        check_held_out_turns (`int`, *optional*, defaults to `64`):
            Held-out turns to look at, the newest.
        check_held_out_least (`int`, *optional*, defaults to `4`):
            With fewer of them nothing is said.
        check_probes (`float`, *optional*, defaults to `0.2`):
            How far the negative log-likelihood of the answers to plain questions may rise in one update, in nats per
            token. The same for the questions in other words.
        check_probes_total (`float`, *optional*, defaults to `1.0`):
            How far it may rise above the base model's.
        check_probe_file (`str`, *optional*):
            A JSONL file of questions with `question`, `answer` and `wordings`, in place of the ones that ship.
        check_replays (`float`, *optional*, defaults to `0.1`):
            How far the mean gain of earlier corrections may fall below its best, in nats per token, over however many
            updates.
        check_replays_undone (`float`, *optional*, defaults to `0.1`):
            Share of them that may lose more than that in one update, and more than half of what they had gained.
        check_replay_turns (`int`, *optional*, defaults to `32`):
            Corrections to look at, the newest.
        check_length (`list[float]`, *optional*, defaults to `[0.05, 4.0]`):
            Band of the length of greedy replies, relative to the base model's.
        check_entropy (`list[float]`, *optional*, defaults to `[0.1, 4.0]`):
            Band of their entropy, relative to the base model's.
        check_repetition (`float`, *optional*, defaults to `0.3`):
            How much larger their share of repeated word groups may be than the base model's.
        check_reply_tokens (`int`, *optional*, defaults to `48`):
            Tokens of such a reply.
    """

    _CHECK_NUMBERS: ClassVar[dict[str, Number]] = {
        "check_held_out": Number(at_least=0, optional=True),
        "check_held_out_turns": Number(whole=True, at_least=1),
        "check_held_out_least": Number(whole=True, at_least=1),
        "check_probes": Number(at_least=0, optional=True),
        "check_probes_total": Number(at_least=0, optional=True),
        "check_replays": Number(at_least=0, optional=True),
        "check_replays_undone": Number(at_least=0, at_most=1),
        "check_replay_turns": Number(whole=True, at_least=1),
        "check_repetition": Number(at_least=0, optional=True),
        "check_reply_tokens": Number(whole=True, at_least=1),
    }

    check_held_out: float | None = field(
        default=0.1, metadata={"help": "How far held-out turns may go the wrong way, in nats per token."}
    )
    check_held_out_turns: int = field(default=64, metadata={"help": "Held-out turns to look at."})
    check_held_out_least: int = field(default=4, metadata={"help": "With fewer held-out turns nothing is said."})
    check_probes: float | None = field(
        default=0.2,
        metadata={"help": "How far the answers to plain questions may lose in one update, in nats per token."},
    )
    check_probes_total: float | None = field(
        default=1.0, metadata={"help": "How far they may lose against the base model."}
    )
    check_probe_file: str | None = field(default=None, metadata={"help": "A JSONL file of questions of your own."})
    check_replays: float | None = field(
        default=0.1, metadata={"help": "How far earlier corrections may fall below their best, in nats per token."}
    )
    check_replays_undone: float = field(
        default=0.1, metadata={"help": "Share of them that may lose more than that, and than half, in one update."}
    )
    check_replay_turns: int = field(default=32, metadata={"help": "Earlier corrections to look at."})
    check_length: list[float] | None = field(
        default_factory=lambda: [0.05, 4.0], metadata={"help": "Band of the length of greedy replies, base = 1."}
    )
    check_entropy: list[float] | None = field(
        default_factory=lambda: [0.1, 4.0], metadata={"help": "Band of their entropy, base = 1."}
    )
    check_repetition: float | None = field(
        default=0.3, metadata={"help": "How much more than the base model's they may repeat themselves."}
    )
    check_reply_tokens: int = field(default=48, metadata={"help": "Tokens of such a reply."})

    def _check_bands(self) -> None:
        """Refuse bands that nothing could be in."""
        for name in ("check_length", "check_entropy"):
            band = getattr(self, name)
            if band is not None and not (len(band) == 2 and 0 <= band[0] < band[1]):
                raise ValueError(f"`{name}` must be two rising numbers, or empty; got {band!r}.")
