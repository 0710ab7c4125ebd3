"""The store: the one file through which gateway, learner and people share what happened."""

from .store_batches import Batches
from .store_turns import Turns
from .store_versions import Versions

__all__ = ["Store"]


class Store(Turns, Batches, Versions):
    """Turns, what followed them, verdicts, batches and versions. See `Database` for its arguments and errors."""
