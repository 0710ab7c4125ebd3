"""One trajectory turn by turn: what each turn was told, what it earned, and the advantage of each of its tokens.

    python benchmarks/draw_trajectory.py --model runs/agent --folder docs/images

A model through `recipes/agent.py` with its config, for `--batches` steps: SmolLM2-135M, or what the recipe has trained,
which repairs more of what it gets wrong; the frozen teacher is then that model. Of all trajectories that were sampled
the one is drawn that tells most: it fails, has an accepted hint, and is repaired, as far as there is one. Colours are
the advantages that went into the loss: reward and distillation together. Tokens of tools have none and are grey.

Writes `agents.png` into the folder. The last line is JSON: the turns with score, reward and hint.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from matplotlib import colormaps, colors, pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from benchmarks.common import fetch_model
from recipes import agent
from trl_openclaw import CombineTrainer
from trl_openclaw.recipe import run_script

ROOT = Path(__file__).parents[1]
WIDTH = 88
"""Characters of a line of the picture."""


@dataclass(frozen=True)
class DrawnTurn:
    """A turn and what followed it.

    Args:
        tokens: Its tokens as text.
        advantages: One for each.
        score: The judge's score.
        reward: Outcome plus score.
        hint: What its teacher was told, if a hint was accepted.
        followed: What followed it.
    """

    tokens: list[str]
    advantages: list[float]
    score: float | None
    reward: float | None
    hint: str | None
    followed: str


def watching(found: list[list[DrawnTurn]]) -> type[CombineTrainer]:
    """The trainer, which adds each trajectory that it trains on to `found`."""

    class Watching(CombineTrainer):
        def on_rewards(self, rollout: Any, rewards_per_func: Any) -> None:
            super().on_rewards(rollout, rewards_per_func)
            said = dict(zip(self.feedback.places, self.feedback.last, strict=True))
            rewards = self.step_rewards(rewards_per_func)
            self.sampled = {
                tuple(ids): (said, row, rewards[row].tolist()) for row, ids in enumerate(rollout.completion_ids)
            }

        def token_advantages(self, inputs: dict[str, Any], old_per_token_logps: Any) -> Any:
            advantages = super().token_advantages(inputs, old_per_token_logps)
            for row, mask in enumerate(inputs["completion_mask"].bool()):
                ids = inputs["completion_ids"][row][mask].tolist()
                steps, values = inputs["turn_index"][row][mask].tolist(), advantages[row][mask].tolist()
                taught = inputs["teacher_mask"][row][mask].tolist()
                found.append(self.turns_of(ids, steps, values, taught))
            return advantages

        def turns_of(self, ids: list, steps: list, values: list, taught: list) -> list[DrawnTurn]:
            said, row, rewards = self.sampled[tuple(ids)]
            turns = []
            for step in range(max(steps) + 1):
                at = [i for i, own in enumerate(steps) if own == step]
                feedback = said[row, step]
                hints = [vote.hint for vote in feedback.verdict.votes if vote.hint] if feedback.verdict else []
                accepted = bool(hints) and any(taught[i] for i in at)
                state = feedback.turn.next_state
                turns.append(
                    DrawnTurn(
                        tokens=[self.processing_class.decode([ids[i]]) for i in at],
                        advantages=[values[i] for i in at],
                        score=feedback.score,
                        reward=rewards[step],
                        hint=hints[0] if accepted else None,
                        followed="" if state is None else state.text,
                    )
                )
            return turns

    return Watching


def telling(turns: list[DrawnTurn]) -> tuple[bool, bool, int, int]:
    """How much a trajectory shows: a hint before a success, several turns with different scores, hints, turns."""
    hinted = [step for step, turn in enumerate(turns) if turn.hint]
    solved = [step for step, turn in enumerate(turns) if turn.score == 1]
    repaired = bool(hinted and solved) and hinted[0] < solved[-1]
    return repaired, len(turns) > 1 and bool(hinted), len({turn.score for turn in turns}), min(len(turns), 3)


def draw(turns: list[DrawnTurn], path: Path) -> None:
    """The trajectory as a picture on white, which is readable on any background."""
    rows = [row for step, turn in enumerate(turns) for row in _rows(step, turn)]
    figure, axes = pyplot.subplots(figsize=(10, 0.2 * len(rows)), facecolor="white")
    bound = max(1.0, *(abs(value) for turn in turns for value in turn.advantages))
    scale, palette = colors.Normalize(-bound, bound), colormaps["RdBu"]
    for y, row in enumerate(rows):
        _draw_row(axes, y, row, lambda value: palette(scale(value)))
    axes.set(xlim=(0, WIDTH), ylim=(len(rows), 0))
    axes.axis("off")
    axes.set_position((0, 0, 1, 1))
    place = figure.add_axes((0.3, -0.6 / figure.get_figheight(), 0.4, 0.15 / figure.get_figheight()))
    bar = figure.colorbar(pyplot.cm.ScalarMappable(scale, palette), cax=place, orientation="horizontal")
    bar.set_label("advantage of a token")
    figure.savefig(path, dpi=110, bbox_inches="tight", facecolor="white")
    pyplot.close(figure)


Piece = tuple[str, float | str | None]
"""Text, and its advantage, or the kind of text it is."""


def _rows(step: int, turn: DrawnTurn) -> list[list[Piece]]:
    """The lines of a turn, each made of pieces: a heading, its tokens, what followed, the hint."""
    numbers = [f"judge {turn.score:+g}" if turn.score is not None else "no score"]
    numbers += [f"reward {turn.reward:+g}"] if turn.reward is not None and turn.reward == turn.reward else []
    rows: list[list[Piece]] = [[(f"turn {step}   {'   '.join(numbers)}", "heading")]]
    rows += _wrapped([(_shown(token), value) for token, value in zip(turn.tokens, turn.advantages, strict=True)])
    for line in turn.followed.splitlines() or [""]:
        rows += _wrapped([(f"  {line}", "followed")])
    rows += _wrapped([(f"hint: {turn.hint}" if turn.hint else "no hint", "hint")])
    return [*rows, []]


def _shown(token: str) -> str:
    """A token as it is drawn; what is not printable has a sign."""
    return token.replace("\n", "⏎").replace("\t", "→").replace("$", "\\$").replace("�", "·")


def _wrapped(pieces: list[Piece]) -> list[list[Piece]]:
    """The pieces in lines of at most `WIDTH` characters; texts are cut, tokens are not."""
    lines: list[list[Piece]] = [[]]
    for text, kind in pieces:
        while text:
            room = WIDTH - sum(len(own) for own, _ in lines[-1])
            if isinstance(kind, float) and len(text) > room and lines[-1]:
                lines.append([])
                continue
            lines[-1].append((text[:room], kind))
            text = text[room:]
            if text:
                lines.append([])
    return lines


STYLES: dict[str, dict[str, Any]] = {
    "heading": {"weight": "bold", "color": "black"},
    "followed": {"color": "dimgrey"},
    "hint": {"color": "darkgreen", "style": "italic"},
}


CENTRED = {"family": "monospace", "ha": "center", "va": "center"}


def _draw_row(axes: Axes, y: int, row: list[Piece], colour: Any) -> None:
    x = 0
    for text, kind in row:
        style: dict[str, Any] = {"color": "black"} if isinstance(kind, float) else STYLES[str(kind)]
        if isinstance(kind, float):
            face = colour(kind)
            axes.add_patch(Rectangle((x, y), len(text), 1, facecolor=face, edgecolor="white", linewidth=0.6))
            style = {"color": "white" if sum(face[:3]) < 1.3 else "black"}
        for place, character in enumerate(text):  # one by one, so that any font stands on the grid
            axes.text(
                x + place + 0.5, y + 0.55, character, family="monospace", size=8.5, ha="center", va="center", **style
            )
        x += len(text)


def sample(model: str, batches: int, rest: list[str]) -> list[list[DrawnTurn]]:
    """All trajectories of this many steps of the recipe."""
    found: list[list[DrawnTurn]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = ROOT / "recipes" / "configs" / "agent.yaml"
        given = ["--config", config, "--model_name_or_path", model, "--output_dir", folder, "--max_steps", batches]
        given += ["--eval_on_start", "false", "--eval_strategy", "no"]
        sys.argv = [str(ROOT / "recipes" / "agent.py"), *map(str, given), *rest]
        run_script(watching(found), agent.make_parser(), complete=agent.complete)
    return found


def main() -> None:
    """Sample, choose, draw, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="where to write agents.png")
    parser.add_argument("--model", help="a model's folder; by default SmolLM2-135M, which is fetched")
    parser.add_argument("--batches", type=int, default=3, help="steps to sample trajectories from")
    args, rest = parser.parse_known_args()
    found = sample(args.model or fetch_model(), args.batches, rest)
    best = max(found, key=telling)
    args.folder.mkdir(parents=True, exist_ok=True)
    draw(best, args.folder / "agents.png")
    print(json.dumps([asdict(turn) for turn in best]))


if __name__ == "__main__":
    main()
