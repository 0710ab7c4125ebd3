"""The learner: takes turns of the traffic from the store, trains on them, checks what came of it, and publishes it."""

from .config import LiveConfig
from .trainer import LiveTrainer

__all__ = ["LiveConfig", "LiveTrainer"]
