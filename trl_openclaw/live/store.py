"""The store: the one file through which gateway, learner and people share what happened."""

from .store_batches import Batches
from .store_data import People
from .store_pages import Pages
from .store_turns import Turns
from .store_versions import Versions

__all__ = ["STORE_FILE", "Store"]

STORE_FILE = "store.db"
"""Its name in the live folder."""


class Store(Turns, Batches, Versions, People, Pages):
    """Turns, what followed them, verdicts, batches, versions, and what people see and say of it. See `Database`."""
