"""A sandbox with small limits, once for all tests."""

import os
import sys

import pytest

from trl_openclaw.environments.sandbox import Limits, Sandbox
from trl_openclaw.errors import SandboxError

SMALL = Limits(seconds=10, memory_mb=256, processes=12, file_mb=1, disk_mb=4, files=60, output_chars=2000)


@pytest.fixture(scope="session")
def sandbox():
    try:
        return Sandbox(SMALL)
    except SandboxError as error:
        if sys.platform == "linux" and os.geteuid() == 0:
            raise
        pytest.skip(str(error))
