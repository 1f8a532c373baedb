"""The book: a durable, append-only log of what agents and learners did, and the tables computed from it."""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .directory import DirectoryLog, Repair
from .errors import (
    BadEvent,
    BadSelection,
    BookBusy,
    BookNotFound,
    BookTooNew,
    LogClosed,
    LogCorrupt,
    LogWriteFailed,
    PackageMissing,
    PayloadPruned,
    QueriesBusy,
    QueryRefused,
    StoreError,
    TablesDamaged,
)
from .events import (
    SCHEMA,
    BatchRow,
    BatchTaken,
    BatchTrained,
    EpisodeClosed,
    EpisodeOpened,
    Event,
    EventLost,
    Fact,
    InteractionFailed,
    InteractionRecorded,
    InteractionsPruned,
    Messages,
    PolicyPublished,
    RewardGiven,
    RunStarted,
    TokensScored,
    new_id,
)
from .log import START, Cursor, Log
from .losses import Loss, accept_loss
from .memory import MemoryLog
from .prune import Pruned, PrunePlan, plan_prune, prune
from .verify import Report, verify

if TYPE_CHECKING:
    from .book import Book, open_book
    from .connection import Connection, connect

__all__ = [
    "SCHEMA",
    "START",
    "BadEvent",
    "BadSelection",
    "BatchRow",
    "BatchTaken",
    "BatchTrained",
    "Book",
    "BookBusy",
    "BookNotFound",
    "BookTooNew",
    "Connection",
    "Cursor",
    "DirectoryLog",
    "EpisodeClosed",
    "EpisodeOpened",
    "Event",
    "EventLost",
    "Fact",
    "InteractionFailed",
    "InteractionRecorded",
    "InteractionsPruned",
    "Log",
    "LogClosed",
    "LogCorrupt",
    "LogWriteFailed",
    "Loss",
    "MemoryLog",
    "Messages",
    "PackageMissing",
    "PayloadPruned",
    "PolicyPublished",
    "PrunePlan",
    "Pruned",
    "QueriesBusy",
    "QueryRefused",
    "Repair",
    "Report",
    "RewardGiven",
    "RunStarted",
    "StoreError",
    "TablesDamaged",
    "TokensScored",
    "__version__",
    "accept_loss",
    "connect",
    "new_id",
    "open_book",
    "plan_prune",
    "prune",
    "verify",
]


def __getattr__(name: str) -> Any:
    # DuckDB and SQLAlchemy come with the book, half a second of imports that a writer of events does without.
    if name in ("Book", "open_book"):
        from . import book

        return getattr(book, name)
    if name in ("Connection", "connect"):
        from .connection import Connection, connect

        return {"Connection": Connection, "connect": connect}[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
