"""Trainers: `OPDTrainer` and `CombineTrainer` on top of TRL's `GRPOTrainer`."""

from .combine_config import CombineConfig
from .combine_trainer import CombineTrainer
from .opd_config import OPDConfig
from .opd_trainer import OPDTrainer

__all__ = ["CombineConfig", "CombineTrainer", "OPDConfig", "OPDTrainer"]
