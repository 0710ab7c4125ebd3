"""Runs unit tests against an agent's code, in two processes inside a sandbox; its files are copied there.

The tests run here; the code runs in a second process that only answers calls. What comes back is read as plain data, so
the code can decide what it answers, and nothing else: it shares no memory, no file and no output with the one who
counts. An object of the code's own stays over there, behind a `Remote` that forwards attributes and calls, and is
equal to no plain value whatever its `__eq__` says.
"""
