"""Evaluates expressions in a process of its own, which is killed when it takes too long or too much.

What is evaluated comes from two sides that we do not know: the expression from a worker, the values from an
outsider. The process has a limit on its memory, and each question a limit on its time; so the service goes on,
whatever the two do to each other.
"""

import asyncio
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog

from app.callbacks.policy import CONDITIONS, Arrived, Decision, Policy, PolicyError
from app.errors import FieldError, invalid

log = structlog.get_logger(__name__)

MEMORY_BYTES = 1 << 30
_ROOT = Path(__file__).parents[2]
_LENGTH = struct.Struct(">I")
_LARGEST_ANSWER = 32 << 20
_REFUSED_SECONDS = 60.0
_MOST_REFUSED = 1000


class Text(msgspec.Struct, frozen=True):
    """An expression, where it is in the body that brought it, and whether it must be true or false."""

    name: str
    text: str
    condition: bool


class Question(msgspec.Struct, omit_defaults=True):
    """To the process: check that texts compile, or decide by a policy, or give the values of texts."""

    check: list[Text] = []
    policy: Policy | None = None
    values: list[Text] = []
    arrived: Arrived | None = None


class Reply(msgspec.Struct, omit_defaults=True):
    """From the process. `expression` and `reason` tell what failed."""

    decision: Decision | None = None
    values: list[Any] = []
    expression: str | None = None
    reason: str | None = None


_REPLY = msgspec.json.Decoder(Reply)
_TOO_MUCH = Reply(reason="takes too long or too much")


class Evaluator:
    """The process, started when it is first needed, and again after it was killed. One question at a time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._refused_until: dict[bytes, float] = {}

    async def check(self, texts: list[Text]) -> None:
        """Raises Refusal: an expression does not compile, with where it is and what is wrong there."""
        reply = await self._ask(Question(check=texts))
        if reply.reason:
            raise invalid(FieldError(reply.expression or "", reply.reason))

    async def decide(self, policy: Policy, arrived: Arrived) -> Decision:
        """What the policy decides. Raises PolicyError."""
        reply = await self._ask(Question(policy=policy, arrived=arrived))
        if reply.decision is None:
            raise PolicyError(reply.expression or "policy", reply.reason or "could not be evaluated")
        return reply.decision

    async def values(self, texts: list[Text], arrived: Arrived) -> list[Any]:
        """What each text gives; after a condition that is false, the rest is not evaluated. Raises PolicyError."""
        reply = await self._ask(Question(values=texts, arrived=arrived))
        if reply.reason:
            raise PolicyError(reply.expression or "expression", reply.reason)
        return reply.values

    async def _ask(self, question: Question) -> Reply:
        message = msgspec.json.encode(question)
        texts = msgspec.json.encode([question.check, question.policy, question.values])
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if self._refused_until.get(texts, 0) > now:
                return _TOO_MUCH
            try:
                return await self._answered(message)
            except (OSError, EOFError, TimeoutError) as error:
                await self.stop()
                log.warning("evaluator killed", error=type(error).__name__)
                # Not tried again at once: others wait for their turn, some in the same flush.
                if len(self._refused_until) >= _MOST_REFUSED:
                    self._refused_until.clear()
                self._refused_until[texts] = now + self._seconds + _REFUSED_SECONDS
                return _TOO_MUCH
            except asyncio.CancelledError:
                # Its answer would be taken for that of the next question.
                await self.stop()
                raise

    async def _answered(self, message: bytes) -> Reply:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "app.callbacks.evaluator_process",
                stdin=PIPE, stdout=PIPE, cwd=_ROOT,
                start_new_session=True,  # an interrupt from the terminal is not for it: it ends with its input
            )  # fmt: skip
            assert self._process.stdout
            await self._process.stdout.readexactly(1)  # it is ready: the time of a question is its own
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        async with asyncio.timeout(self._seconds):
            stdin.write(_LENGTH.pack(len(message)) + message)
            await stdin.drain()
            (length,) = _LENGTH.unpack(await stdout.readexactly(_LENGTH.size))
            if length > _LARGEST_ANSWER:
                raise EOFError
            return _REPLY.decode(await stdout.readexactly(length))

    async def stop(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@asynccontextmanager
async def evaluating(seconds: float) -> AsyncIterator[Evaluator]:
    """An evaluator whose process ends with the block."""
    evaluator = Evaluator(seconds)
    try:
        yield evaluator
    finally:
        await evaluator.stop()


def texts_of(policy: Policy, pointer: str) -> list[Text]:
    """A policy's expressions, named by where they are."""
    names = (*CONDITIONS, "transform")
    texts = ((name, getattr(policy, name)) for name in names)
    return [Text(f"{pointer}/{name}", text, name in CONDITIONS) for name, text in texts if text is not None]
