"""What can go wrong in a book, one tree.

    StoreError
    ├── BadEvent        an event that may not enter the log: wrong lengths, unknown kind
    ├── BookNotFound    no book at that path
    ├── BookTooNew      written by a newer Rollbook than this one
    ├── BookBusy        somebody else owns what was asked for
    ├── LogCorrupt      a bad checksum that is not a torn tail, or acknowledged events that are gone; names the place
    ├── TablesDamaged   the tables of a book cannot be read; they are computed again when it is opened next
    ├── PayloadPruned   tokens or messages that `prune` removed for good
    ├── LogClosed       appended after close, or after a failed write stopped the log
    ├── LogWriteFailed  the disk refused a write or a sync; nothing of it was acknowledged
    ├── QueryRefused    SQL that the read-only surface does not allow, or that went over its limits
    │   └── QueriesBusy     too many queries at once; the same query may be answered later
    ├── PackageMissing  an optional package that is asked for and not installed
    └── BadSelection    a selection, credit scheme or reward expression that cannot be read

Every message says what was expected, what came and what to do.
"""


class StoreError(Exception):
    """Root of everything the store raises on purpose."""


class BadEvent(StoreError, ValueError):
    """An event that may not enter the log."""


class BookNotFound(StoreError, FileNotFoundError):
    """No book at that path."""


class BookTooNew(StoreError):
    """The book was written by a newer version."""


class BookBusy(StoreError):
    """Somebody else owns what was asked for."""


class LogCorrupt(StoreError):
    """A bad checksum that is not a torn tail, or acknowledged events that are gone."""


class TablesDamaged(StoreError):
    """The tables cannot be read; opening the book again computes them from the log."""


class PayloadPruned(StoreError, LookupError):
    """Tokens or messages that `prune` removed for good."""


class LogClosed(StoreError):
    """The log takes no more events."""


class LogWriteFailed(StoreError, OSError):
    """The disk refused; nothing of that write was acknowledged."""


class QueryRefused(StoreError):
    """SQL that the read-only surface does not allow, or that went over its limits."""


class QueriesBusy(QueryRefused):
    """Too many queries ran at once; the same query may be answered later."""


class PackageMissing(StoreError, ImportError):
    """An optional package that is asked for and not installed."""


class BadSelection(StoreError, ValueError):
    """A selection, credit scheme or reward expression that cannot be read."""
