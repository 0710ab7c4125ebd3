"""Prints what the device check measured, below the results, when it is run by itself (`make test-gpu`)."""

import pytest
from device_check import table

MEASURED = "device check"
"""The name of a test's property that holds what it measured."""


@pytest.fixture
def show(record_property):
    """Takes what a case measured, for the table."""
    return lambda row: record_property(MEASURED, row)


def pytest_terminal_summary(terminalreporter):
    """One table for all cases of a device."""
    reports = terminalreporter.stats.get("passed", [])
    rows = [row for report in reports for name, row in report.user_properties if name == MEASURED]
    for device in sorted({row["device"] for row in rows}):
        terminalreporter.section(f"bfloat16 on {device}")
        for line in table([row for row in rows if row["device"] == device]):
            terminalreporter.write_line(line)
