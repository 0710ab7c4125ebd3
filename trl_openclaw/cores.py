"""How many cores there are to use."""

import os


def available_cores() -> int:
    """The cores that this process may use, which in a container or under `taskset` are not all that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
