"""The evaluator's process: questions on standard input, answers on standard output, until the input ends."""

import resource
import struct
import sys

import msgspec

from app.callbacks.evaluator import MEMORY_BYTES, Question, Reply
from app.callbacks.policy import BadExpression, PolicyError, compiled, decide, value_of

_LENGTH = struct.Struct(">I")
_QUESTION = msgspec.json.Decoder(Question)


def answer(question: Question) -> Reply:
    """The reply to one question; what can't be evaluated is a reply, too."""
    for text in question.check:
        try:
            compiled(text.text, condition=text.condition)
        except BadExpression as error:
            return Reply(expression=text.name, reason=str(error))
    try:
        if question.policy and question.arrived:
            return Reply(decision=decide(question.policy, question.arrived))
        values = []
        for text in question.values:
            assert question.arrived
            values.append(value_of(text.name, text.text, question.arrived, condition=text.condition))
            if text.condition and not values[-1]:
                break
        return Reply(values=values)
    except PolicyError as error:
        return Reply(expression=error.expression, reason=error.reason)
    except (MemoryError, RecursionError, BadExpression):
        return Reply(reason="takes too long or too much")


def main() -> None:
    """Answer until the service is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    compiled("true", condition=True)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(b"\n")
    sink.flush()
    while head := source.read(_LENGTH.size):
        message = source.read(_LENGTH.unpack(head)[0])
        reply = msgspec.json.encode(answer(_QUESTION.decode(message)))
        sink.write(_LENGTH.pack(len(reply)) + reply)
        sink.flush()


if __name__ == "__main__":
    main()
