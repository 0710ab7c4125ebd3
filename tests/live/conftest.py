"""Fixtures of the live tests."""

import pytest
from live.gateway_harness import serving_stub
from live.stub_engine import StubEngine


@pytest.fixture
def stub():
    """The stub engine, up."""
    with StubEngine() as running:
        yield running


@pytest.fixture
def gateway(stub, tmp_path):
    """A gateway over the stub engine, without keys and without a judge."""
    with serving_stub(tmp_path, stub) as running:
        yield running
