"""A sandbox with small limits, once for all tests, and what it keeps programs from."""

import os
import sys
import tempfile
from pathlib import Path

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


@pytest.fixture(params=[True, False], ids=["namespaces", "no-namespaces"])
def either(request, sandbox, monkeypatch):
    """The sandbox with the kernel's help and without; the second needs root."""
    if not request.param and os.geteuid() != 0:
        pytest.skip("needs root")
    monkeypatch.setattr(Sandbox, "_namespaces", request.param)
    return sandbox


@pytest.fixture
def outside():
    """A file, in a folder that is open to all, that only the sandbox keeps a program from."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        secret = Path(os.path.realpath(folder)) / "secret"
        secret.write_text("secret")
        secret.chmod(0o666)
        yield secret
