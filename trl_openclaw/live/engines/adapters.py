"""LoRA adapters of one model in this process, under names that come and go."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peft import PeftConfig, PeftModel
from torch import nn

from ...errors import EngineError


class Adapters:
    """The adapters of a model. Not for several threads.

    Args:
        model: The model. It has places for adapters while there are any.
    """

    def __init__(self, model: nn.Module):
        self.base = model
        self._peft: PeftModel | None = None
        self._loaded: dict[str, tuple[str, Path]] = {}  # our name: PEFT's name, which may hold no dots, and the folder
        self._numbers = itertools.count()

    @property
    def names(self) -> list[str]:
        """Those that are loaded."""
        return list(self._loaded)

    def load(self, name: str, path: Path) -> None:
        """Load an adapter from a folder.

        Raises:
            EngineError: When it does not fit the model. The other adapters, and the model, are as they were.
        """
        if name in self._loaded:
            if self._loaded[name][1] == path:
                return
            self.unload(name)
        inner = f"adapter{next(self._numbers)}"
        try:
            config = PeftConfig.from_pretrained(str(path))
            config.inference_mode = True
            if getattr(config, "modules_to_save", None):
                raise ValueError("it holds whole modules (`modules_to_save`), which cannot be taken out again")
            if self._peft is None:
                self._peft = PeftModel(self.base, config, inner)
            result = self._peft.load_adapter(str(path), inner)
            missing = [key for key in result.missing_keys if inner in key]
            if missing or result.unexpected_keys:
                raise ValueError(f"its weights do not fit the model, such as {[*missing, *result.unexpected_keys][0]}")
        except Exception as error:  # PEFT, safetensors and torch each have their own for a file that does not fit
            self._forget(inner)
            raise EngineError("refused", f"the adapter in {path} cannot be loaded: {error}") from error
        self._loaded[name] = inner, path

    def unload(self, name: str) -> None:
        """Forget an adapter. One that is unknown is forgotten already."""
        inner, _ = self._loaded.pop(name, (None, None))
        if inner is not None:
            self._forget(inner)

    def _forget(self, inner: str) -> None:
        if self._peft is None or inner not in self._peft.peft_config:
            return
        others = [name for name in self._peft.peft_config if name != inner]
        if others:
            self._peft.set_adapter(others[0])
            self._peft.delete_adapter(inner)
        else:
            self.base = self._peft.unload()
            self._peft = None

    @contextmanager
    def active(self, name: str | None) -> Iterator[nn.Module]:
        """The model with one adapter, or with none.

        Raises:
            EngineError: When it is not loaded.
        """
        if name is not None and name not in self._loaded:
            raise EngineError("unloaded", f"the adapter {name!r} is not loaded")
        if self._peft is None:
            yield self.base
        elif name is None:
            with self._peft.disable_adapter():
                yield self._peft
        else:
            self._peft.set_adapter(self._loaded[name][0])
            self._peft.eval()
            yield self._peft
