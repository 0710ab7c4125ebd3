"""Reading a config file: a mapping, or one line that says what is wrong with which file."""

from pathlib import Path
from typing import Any


def read_config_file(path: str | Path) -> dict[str, Any]:
    """What a YAML file holds.

    Raises:
        ValueError: In one line that names the file, if it is no readable YAML mapping with names as keys.
    """
    import yaml

    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if config is None:
        raise ValueError(f"{path} is empty: it should hold a YAML mapping, one `name: value` a line.")
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ValueError(f"{path} does not hold a YAML mapping with names as keys, one `name: value` a line.")
    return config
