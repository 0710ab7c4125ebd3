"""What a teacher scores of agents: every turn of a trajectory, each under hints of its own."""

import random

from trl_openclaw.scoring import TeacherRow

TURNS = (9, 1, 4, 14)
"""Tokens of each turn: longer and shorter than the tool's answers, and a single one."""

TOOLS = (2, 8, 6)
"""Tokens of the tool's answer between two turns."""

OPENING = [250, 251]
"""What the template has in front of a turn, after the hint."""


def turns_of(trajectory: int, hints: tuple[int, ...] = (3, 7), prompt: int = 10) -> list[TeacherRow]:
    """The turns of one trajectory, each under one hint of each of these lengths. All start from one prompt."""
    begin, numbers = random.Random(prompt), random.Random(trajectory)

    def ids(length: int, source: random.Random = numbers) -> list[int]:
        return [source.randrange(250) for _ in range(length)]

    history, rows = [258, *ids(prompt - 1, begin)], []
    for turn, tool in zip(TURNS, (*TOOLS, 0), strict=True):
        completion = ids(turn)
        rows += [TeacherRow([*history, *ids(length), *OPENING], completion) for length in hints]
        history += OPENING + completion + ids(tool)
    return rows


def mixed_rows() -> list[TeacherRow]:
    """Turns of two trajectories, a row that stands twice, one that begins another, and two of other prompts."""
    first, second = turns_of(1), turns_of(2)
    longest = first[-1]
    begun = TeacherRow(longest.prompt_ids, longest.completion_ids[:5])
    others = [TeacherRow([258, 7, 7, 7], [1, 2, 3]), TeacherRow([258] * 30, [4] * 12)]
    rows = [*first, *second, first[2], begun, *others]
    random.Random(0).shuffle(rows)
    return rows
