"""Dead letters on the wire."""

from app.http.wire import Page
from app.jobs.schemas import Job


class DeadLetterPage(Page, kw_only=True):
    """Failed jobs that their queue keeps, newest first; `dead_letter_reason` says why each gave up."""

    dead_letters: list[Job]
