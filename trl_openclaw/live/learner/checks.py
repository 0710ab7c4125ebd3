"""Whether a new version is fit to be published. Each check says something, whatever there is to look at."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..records import StoredTurn, TokenScores, VersionInfo
from .greedy import Replies, greedy_replies
from .measure import Item, Logps, Measures, Versions, mean
from .probes import load_probes, probe_items, prompt_of
from .snapshot import Snapshot
from .together import on_main
from .token_notes import gains

if TYPE_CHECKING:
    from .trainer import LiveTrainer

CheckOutcome = Literal["passed", "failed", "no_data", "off"]

QUESTIONS_TO_ANSWER = 4
LOOK_BACK = 512
"""Turns to look for evidence among, the newest."""


@dataclass(frozen=True)
class CheckResult:
    """What a check says.

    Args:
        outcome: `"no_data"` where there is nothing to look at yet, `"off"` where the settings switch it off.
        note: One line for people.
        numbers: What it was made of; changes in log-prob are in nats per token.
    """

    outcome: CheckOutcome
    note: str
    numbers: dict[str, float] = field(default_factory=dict)


OFF = CheckResult("off", "switched off in the settings")


@dataclass(frozen=True)
class Evidence:
    """What the store has to check by.

    Args:
        held_out: Turns that are never trained, with a score.
        corrections: Turns that were trained with a bad score and a hint, with what they were trained with.
        lost: How far what corrections have gained is below its best under the published version, in nats per token.
    """

    held_out: Sequence[StoredTurn]
    corrections: Sequence[tuple[StoredTurn, TokenScores]]
    lost: float = 0.0


class Checks:
    """Checks a version that was trained but not published.

    Args:
        trainer: The trainer, between two steps.
    """

    def __init__(self, trainer: "LiveTrainer"):
        self.trainer = trainer
        self.measures = Measures(trainer)
        self.probes = load_probes(trainer.args.check_probe_file)
        self._base_replies: Replies | None = None

    def prepare(self) -> None:
        """Measure the base model, while there is nothing to train yet. A collective."""
        said = "Measuring the base model, which versions are compared with: a minute or so on a CPU."
        self.trainer.accelerator.print(said, flush=True)
        for wordings in (False, True):
            self.measures.of_base(self._questions(wordings=wordings))
        if self._looks_at_replies:
            on_main(self.trainer.accelerator, self._replies_of_base)

    def __call__(self, version: str, before: Snapshot) -> dict[str, CheckResult]:
        """Run all checks. A collective.

        Args:
            version: The name of the new version, whose weights the model has.
            before: The weights of the version that it was trained from.
        """
        published = self.trainer.progress.version
        evidence = on_main(self.trainer.accelerator, self._evidence)
        versions = Versions(self.measures, version, published, before)
        return {name: check(self, versions, evidence) for name, check in CHECKS.items()}

    def _evidence(self) -> Evidence:
        store, args = self.trainer.at_desk.store, self.trainer.args
        held_out = store.turns(args.user, state="held_out", limit=LOOK_BACK)
        scored = [turn for turn in held_out if _score(turn)]
        trained = store.turns(args.user, state="trained", limit=LOOK_BACK)
        corrected = [turn for turn in trained if _score(turn) == -1 and turn.verdict and turn.verdict.hints]
        scores = [(turn, store.token_scores(turn.turn_id)) for turn in corrected[: args.check_replay_turns]]
        published = [one for one in store.versions(args.user) if one.version == self.trainer.progress.version]
        return Evidence(
            scored[: args.check_held_out_turns],
            [(turn, found) for turn, found in scores if found is not None],
            sum(map(_lost, published)),
        )

    # The checks

    def held_out(self, versions: Versions, evidence: Evidence) -> CheckResult:
        """Whether replies that pleased became likelier than before, and others less likely."""
        tolerance, least = self.trainer.args.check_held_out, self.trainer.args.check_held_out_least
        if tolerance is None:
            return OFF
        turns = [turn for turn in evidence.held_out if self._fits(turn)]
        if len(turns) < least:
            many = f"{len(turns)} held-out turns, {least} needed" if turns else "no held-out turns yet"
            return CheckResult("no_data", many, {"turns": len(turns)})
        items = [Item.of(turn) for turn in turns]
        new, old = versions.of_new(items), versions.of_published(items)
        moved = [_score(turn) * (mean(new[turn.turn_id]) - mean(old[turn.turn_id])) for turn in turns]
        found = mean(moved)
        note = f"{found:+.3f} nats per token the right way, over {len(turns)} turns (accepted {-tolerance:g})"
        return _judged(found >= -tolerance, note, {"turns": len(turns), "preference": found})

    def plain_questions(self, versions: Versions, evidence: Evidence) -> CheckResult:
        """Whether good answers to plain questions are as likely as before."""
        return self._answers(versions, wordings=False)

    def other_wordings(self, versions: Versions, evidence: Evidence) -> CheckResult:
        """The same after the same questions in other words."""
        return self._answers(versions, wordings=True)

    def _answers(self, versions: Versions, *, wordings: bool) -> CheckResult:
        args = self.trainer.args
        if args.check_probes is None and args.check_probes_total is None:
            return OFF
        items = self._questions(wordings=wordings)
        if not items:
            return CheckResult("no_data", "no questions", {"questions": 0})
        new, old, base = (
            -mean([mean(row) for row in of(items).values()])
            for of in (versions.of_new, versions.of_published, self.measures.of_base)
        )
        passed = _within(new - old, args.check_probes) and _within(new - base, args.check_probes_total)
        note = (
            f"{new:.3f} nats per token over {len(items)} questions, {new - old:+.3f} in this update (accepted "
            f"{_limit(args.check_probes)}), {new - base:+.3f} in all (accepted {_limit(args.check_probes_total)})"
        )
        return _judged(passed, note, {"questions": len(items), "nll": new, "nll_published": old, "nll_base": base})

    def replays(self, versions: Versions, evidence: Evidence) -> CheckResult:
        """Whether what earlier corrections have gained is still there.

        Which corrections are looked at changes from update to update, so what is lost is added up over updates.
        """
        tolerance, share = self.trainer.args.check_replays, self.trainer.args.check_replays_undone
        if tolerance is None:
            return OFF
        found = [(turn, scores) for turn, scores in evidence.corrections if self._fits(turn)]
        items = [Item.of(turn) for turn, _ in found]
        new, old = versions.of_new(items), versions.of_published(items)
        pairs = [(_gain(one, new), _gain(one, old)) for one in found]
        kept = [(a, b) for a, b in pairs if a is not None and b is not None]
        if not kept:
            return CheckResult("no_data", "no corrections were trained yet", {"corrections": 0})
        now, before = mean([a for a, _ in kept]), mean([b for _, b in kept])
        lost = max(evidence.lost + before - now, 0.0)  # in this order, so that what is no number remains none
        undone = sum(b - a > max(tolerance, b / 2) for a, b in kept)
        passed = lost <= tolerance and now >= -tolerance and undone <= share * len(kept)
        note = (
            f"{len(kept)} corrections have gained {now:+.3f} nats per token so far (accepted {-tolerance:g}), which is "
            f"{lost:.3f} below the best (accepted {tolerance:g}); {undone} lost most of it (accepted {share:.0%})"
        )
        numbers = {"corrections": len(kept), "gain": now, "gain_published": before, "lost": lost, "undone": undone}
        return _judged(passed, note, numbers)

    def collapse(self, versions: Versions, evidence: Evidence) -> CheckResult:
        """Whether greedy replies are still as long, as varied and as open as the base model's, within bands."""
        args = self.trainer.args
        bands = {"length": args.check_length, "entropy": args.check_entropy}
        if not self._looks_at_replies:
            return OFF
        new, base = on_main(self.trainer.accelerator, lambda: (self._replies(), self._replies_of_base()))
        ratios = {
            name: getattr(new, name) / max(getattr(base, name), 1e-6)
            for name, band in bands.items()
            if band is not None
        }
        outside = [
            f"{name} is {ratio:.2f} times the base model's (accepted {bands[name]})"
            for name, ratio in ratios.items()
            if not bands[name][0] <= ratio <= bands[name][1]  # type: ignore[index]
        ]
        rise = new.repetition - base.repetition
        if not _within(rise, args.check_repetition):
            outside.append(f"repetition is {rise:+.2f} above the base model's (accepted {args.check_repetition:g})")
        usual = f"{new.length:.0f} tokens, entropy {new.entropy:.2f}, repetition {new.repetition:.2f}"
        numbers = {**asdict(new), **{f"{name}_base": value for name, value in asdict(base).items()}}
        return _judged(not outside, "; ".join(outside) or usual, numbers)

    def _questions(self, *, wordings: bool) -> list[Item]:
        """Plain questions with their answers, or the same in other words; none where they are switched off."""
        if self.trainer.args.check_probes is None and self.trainer.args.check_probes_total is None:
            return []
        return [item for item in probe_items(self.trainer, self.probes, wordings=wordings) if self._is_short(item)]

    @property
    def _looks_at_replies(self) -> bool:
        args = self.trainer.args
        return bool(args.check_length or args.check_entropy) or args.check_repetition is not None

    def _replies(self) -> Replies:
        """What the model says as it is now."""
        prompts = [prompt_of(self.trainer, probe.question) for probe in self.probes[:QUESTIONS_TO_ANSWER]]
        return greedy_replies(self.trainer, prompts, self.trainer.args.check_reply_tokens)

    def _replies_of_base(self) -> Replies:
        if self._base_replies is None:
            with self.measures.base_weights():
                self._base_replies = self._replies()
        return self._base_replies

    def _fits(self, turn: StoredTurn) -> bool:
        """Whether the model can score a turn, which may be from before its limits were set."""
        reader = self.trainer.read
        ids = (*turn.prompt_ids, *turn.completion_ids)
        return max(ids) < reader.vocabulary and (reader.max_tokens is None or len(ids) <= reader.max_tokens)

    def _is_short(self, item: Item) -> bool:
        most = self.trainer.read.max_tokens
        return most is None or len(item.prompt_ids) + len(item.completion_ids) <= most


CHECKS: dict[str, Callable[[Checks, Versions, Evidence], CheckResult]] = {
    "held_out": Checks.held_out,
    "plain_questions": Checks.plain_questions,
    "other_wordings": Checks.other_wordings,
    "replays": Checks.replays,
    "collapse": Checks.collapse,
}
"""All checks, by the name under which a version's numbers are stored."""


def failures(results: dict[str, CheckResult]) -> str | None:
    """What is wrong with a version, in one line, or `None`."""
    failed = [f"{name}: {result.note}" for name, result in results.items() if result.outcome == "failed"]
    return "; ".join(failed) or None


def as_detail(results: dict[str, CheckResult]) -> dict[str, Any]:
    """The results as the store keeps them, in JSON, which has nothing for what is no number."""
    return {
        name: {**asdict(result), "numbers": {k: v if math.isfinite(v) else None for k, v in result.numbers.items()}}
        for name, result in results.items()
    }


def _judged(passed: bool, note: str, numbers: dict[str, float]) -> CheckResult:
    return CheckResult("passed" if passed else "failed", note, numbers)


def _within(value: float, limit: float | None) -> bool:
    """Whether a value is at most a limit, which may be missing. What is no number is not."""
    return limit is None or value <= limit


def _limit(limit: float | None) -> str:
    return "any" if limit is None else f"{limit:g}"


def _score(turn: StoredTurn) -> int:
    return (turn.verdict.score if turn.verdict else None) or 0


def _lost(version: VersionInfo) -> float:
    """What its check said of a published version."""
    checks = [event.detail.get("checks", {}) for event in version.events if event.event == "checked"]
    return next((found["replays"]["numbers"].get("lost") for found in checks if "replays" in found), None) or 0.0


def _gain(correction: tuple[StoredTurn, TokenScores], logps: Logps) -> float | None:
    turn, scores = correction
    return gains(scores, logps[turn.turn_id])
