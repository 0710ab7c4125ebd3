"""The SQLite file under the store: connections, transactions, values that are not SQL's, and errors one can act on."""

import hashlib
import json
import os
import sqlite3
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from ..errors import StoreBusyError, StoreError, StoreFullError
from .canonical import reply_hash

SCHEMA_VERSION = 5
BUSY_SECONDS = 5.0

SQLITE_LOG_PAGES = 1000
"""SQLite's own setting, 4 MB."""

_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
# Where a disk is full, or files may not grow, SQLite says the first; its shared index and its log say the others.
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_FSYNC)


class Database:
    """One SQLite file in WAL mode, for any number of threads and processes.

    Each thread has a connection of its own, opened when it first needs one. Every public method of the classes that
    build on this one is one transaction: it happens as a whole or not at all.

    Args:
        path: The file. It is made, readable by its owner only, if it does not exist.
        clock: What `created` is taken from.
        busy_seconds: How long to wait for another process that is writing.
        durable: Whether what a method has changed is on the disk when it returns, so that it outlives the machine's
            power, too. Otherwise it outlives this process.
        log_pages: At so many pages in SQLite's log a writer moves them into the file before it goes on.

    Raises:
        StoreBusyError: When another process holds the store for longer than that. So does every other method.
        StoreFullError: When there is no room. So does every other method that writes.
        StoreError: When the file is no store, or a newer one.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        clock: Callable[[], float] = time.time,
        busy_seconds: float = BUSY_SECONDS,
        durable: bool = False,
        log_pages: int = SQLITE_LOG_PAGES,
    ):
        self.path = Path(path)
        self.clock = clock
        self._busy_seconds = busy_seconds
        self._settings = {"synchronous": "FULL" if durable else "NORMAL", "wal_autocheckpoint": str(log_pages)}
        self._local = threading.local()
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            self._create()

    def close(self) -> None:
        """Close this thread's connection. Those of other threads close when their threads end."""
        connection = self._local.__dict__.pop("connection", None)
        if connection is not None:
            connection.close()

    def identity(self) -> str:
        """What tells this store from every other one, also from one that is made in its place later."""
        with self._errors():
            return self._connection.execute("SELECT id FROM identity").fetchone()[0]

    def data_version(self) -> int:
        """A number that changes when another connection has changed anything. Cheap. It belongs to this thread."""
        with self._errors():
            return self._connection.execute("PRAGMA data_version").fetchone()[0]

    def shorten_log(self) -> None:
        """Move what is in SQLite's log into its file, as far as nobody is in the way. Writers go on meanwhile."""
        with self._errors():
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    @property
    def _connection(self) -> sqlite3.Connection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connect()
        return connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=self._busy_seconds, isolation_level=None)
        connection.row_factory = sqlite3.Row
        for name, value in {**self._settings, "foreign_keys": "ON", "secure_delete": "ON"}.items():
            connection.execute(f"PRAGMA {name} = {value}")
        return connection

    def _create(self) -> None:
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                found = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
                break
            except sqlite3.OperationalError as error:  # SQLite does not wait here when two processes begin at once
                if error.sqlite_errorcode not in _BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if found != "wal":
            raise StoreError(f"{self.path} cannot be used by several processes here (journal mode {found!r}).")
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreError(f"{self.path} was made by a newer version of trl-openclaw: update this one.")
        if version < SCHEMA_VERSION:
            self._connection.create_function("hashed", 1, hashed, deterministic=True)
            self._connection.create_function("reply_hashed", 1, lambda reply: reply_hash(from_json(reply)))
            schema = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
            try:
                self._connection.executescript(
                    f"BEGIN IMMEDIATE; {schema} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
                )
            except sqlite3.Error:
                self._roll_back()
                raise

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        """A transaction that changes something. It waits for other writers, and is undone when anything goes wrong."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        """A transaction that sees one state of the store however many queries it makes."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self._errors():
            connection = self._connection
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def _roll_back(self) -> None:
        if self._connection.in_transaction:  # some errors end the transaction by themselves
            self._connection.execute("ROLLBACK")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is not None and code & 0xFF in _BUSY:
                waited = f"for more than {self._busy_seconds:g} s"
                raise StoreBusyError(f"{self.path} is in use by another process {waited} ({error}).") from error
            if code in _FULL:
                raise StoreFullError(f"{self.path} cannot grow: no room is left for it ({error}).") from error
            raise StoreError(f"{self.path}: {error}.") from error
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened: {error.strerror}.") from error

    def _scrub(self) -> None:
        """Leave nothing of what was deleted, neither in the file nor in its log.

        Freed pages are overwritten at once (`secure_delete`), but where rows have moved, pages in use keep copies of
        them in their gaps. So the file is written anew.

        Raises:
            StoreBusyError: When another process is writing, or a reader keeps the log in use.
            StoreFullError: When there is no room for the new file.
        """
        with self._errors():
            self._connection.execute("VACUUM")
        with self._errors(), closing(self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")) as cursor:
            busy, _, _ = cursor.fetchone()
        if busy:
            raise StoreBusyError(f"{self.path} is being read, so its log cannot be emptied now.")


def hashed(text: str) -> str:
    """What is kept of an id that may be text of a person's."""
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def to_json(value: Any) -> str:
    """JSON that comes back as it was, also half an emoji, which no encoding takes; but Infinity and NaN, which JSON has
    not, are null."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return to_json(from_json(json.dumps(value)))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def from_json(text: str | None) -> Any:
    """What `to_json` wrote; `None` for nothing."""
    return None if text is None else json.loads(text, parse_constant=lambda name: None)


def pack(code: str, values: Sequence[float]) -> bytes:
    """Numbers as bytes: `"i"` for 32-bit integers, `"f"` for 32-bit floats, the least significant byte first."""
    numbers = array(code, values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack(code: str, data: bytes) -> tuple[Any, ...]:
    """What `pack` wrote."""
    numbers = array(code)
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
