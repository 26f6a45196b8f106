"""What a failure of the database means for whoever asked: repeat it, mend it, or it is our bug."""

import psycopg
from psycopg import errors as pg
from psycopg_pool import PoolTimeout
from sqlalchemy import exc

from app.errors import Kind, Refusal, unavailable

TRANSIENT = (pg.DeadlockDetected, pg.SerializationFailure)
"""The database's way to say: once more."""

LOCKED = (pg.LockNotAvailable, pg.QueryCanceled)
"""Somebody holds a row for longer than a request may wait."""

_AWAY = (
    PoolTimeout,
    pg.AdminShutdown,
    pg.CrashShutdown,
    pg.CannotConnectNow,
    pg.TooManyConnections,
    pg.ReadOnlySqlTransaction,
    pg.DiskFull,
)


def is_away(error: BaseException) -> bool:
    """The database or the connection is gone: nothing is wrong with what was sent."""
    if isinstance(error, _AWAY):
        return True
    # A failure of the connection itself has no SQLSTATE.
    return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and error.sqlstate is None


def refusal_of(error: BaseException) -> Refusal | None:
    """The refusal that a failure of the database is; None when it is a bug."""
    if isinstance(error, exc.DBAPIError) and error.orig is not None:
        error = error.orig
    match error:
        case exc.TimeoutError():
            return unavailable("No connection to the database was free; nothing was changed.")
        case pg.LockNotAvailable() | pg.QueryCanceled():
            return unavailable(
                "Something else holds the rows that this needs, or it took too long; nothing was changed."
            )
        case pg.DataError() | pg.IntegrityError() | pg.ProgramLimitExceeded():
            return Refusal(Kind.INVALID, "invalid-field", "PostgreSQL can't hold a value of this request.")
        case pg.DeadlockDetected() | pg.SerializationFailure():
            return unavailable("The request met others that changed the same rows; nothing was changed.", 0)
        case psycopg.Error() if is_away(error):
            return unavailable("The database is away; whether the request took effect is not known. Repeat it.")
    return None
