"""A store that is asked again while another process holds it."""

import functools
import logging
from typing import Any, cast

from ...errors import StoreBusyError
from ..store import Store

logger = logging.getLogger(__name__)

TRIES = 24
"""With the five seconds that the store itself waits: two minutes."""


class _PatientStore:
    def __init__(self, store: Store):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        @functools.wraps(method)
        def patient(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(TRIES):
                try:
                    return method(*args, **kwargs)
                except StoreBusyError as error:  # nothing was changed
                    if attempt == TRIES - 1:
                        raise
                    logger.warning("%s The learner waits.", error)
            raise AssertionError("the last try returns or raises")

        return patient


def patient(store: Store) -> Store:
    """The store, each method of which is tried again when another process holds the store for too long.

    A step that was trained is not lost to a slow export.
    """
    return cast(Store, _PatientStore(store))
