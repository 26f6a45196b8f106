"""The protocol of parking, in every order: no rule is broken; and each safeguard, taken away, is missed at once."""

import pytest

from tests.model.explorer import Exploration, Violation
from tests.model.parking import Flaw, Parking, Setting

DETACHED, ATTACHED, ANY, BOTH = "two verbs, detached", "two verbs, attached", "any of two", "both of two"
MOVING = "a deadline that moves"
SETTINGS = {
    DETACHED: Setting(1, 1, ((0, "resume"), (0, "complete")), cancels=True),
    ATTACHED: Setting(1, 1, ((0, "resume"), (0, "fail")), attached=True),
    "retry against complete": Setting(1, 1, ((0, "retry"), (0, "complete")), crashes=2),
    MOVING: Setting(1, 1, ((0, "resume"),), heartbeats=True),
    ANY: Setting(2, 1, ((0, "resume"), (1, "fail")), crashes=0),
    "any of two, attached": Setting(2, 1, ((0, "resume"), (1, "resume")), attached=True, max_attempts=1),
    BOTH: Setting(2, 2, ((0, "resume"), (1, "resume")), attached=True, crashes=0),
    "both of two, one fails": Setting(2, 2, ((0, "resume"), (1, "fail")), max_attempts=1),
    "three callers": Setting(2, 1, ((0, "fail"), (1, "fail"), (1, "resume")), max_attempts=1, crashes=0),
}

CAUGHT = {
    Flaw.PARK_DOES_NOT_LOCK: (ATTACHED, "a job is parked though its waits have decided"),
    Flaw.CALLBACK_DOES_NOT_LOCK: (ANY, "a job is parked though its waits have decided"),
    Flaw.CALLBACK_GUARDS_BY_ATTEMPT: (ANY, "a wait of an old lease was resolved"),
    Flaw.SWEEP_DOES_NOT_LOCK: (DETACHED, "a resolved wait expired"),
    Flaw.SWEEP_READS_BEFORE_IT_LOCKS: (MOVING, "a wait expired before its deadline"),
    Flaw.RESOLVES_WHAT_IS_NOT_OPEN: (ATTACHED, "a wait was resolved twice"),
    Flaw.PARK_OVERLOOKS_EARLY_CALLBACKS: (ATTACHED, "a job is parked though its waits have decided"),
    Flaw.PARK_DOES_NOT_CHECK_THE_LEASE: (DETACHED, "an old lease changed the job"),
    Flaw.RESUME_FORGETS_THE_PAYLOAD: (DETACHED, "the payload of a callback that won is lost"),
    Flaw.RESUME_USES_AN_ATTEMPT: (DETACHED, "an attempt was used, or given back, that should not have been"),
    Flaw.RESCUE_TAKES_PARKED_JOBS: (ATTACHED, "lose_lease is no step for a job that is waiting_external"),
    Flaw.CANCEL_LEAVES_THE_WAITS_OF_USE: (DETACHED, "a callback moved a job that does not wait"),
    Flaw.ONE_FAIL_ENDS_A_PARK_ON_ANY: (ANY, "given up though enough answers could still come"),
    Flaw.ONE_DEADLINE_ENDS_A_PARK_ON_ANY: (ANY, "given up though enough answers could still come"),
    Flaw.ANSWERS_BEFORE_THE_COMMIT: (DETACHED, "told that it won before that was so"),
    Flaw.REPEATS_ARE_TOLD_THAT_THEY_ARE_LATE: (DETACHED, "whose callback counted was told that it came too late"),
    Flaw.RESUME_DOES_NOT_COUNT: (BOTH, "went on with too few answers"),
    Flaw.RESUME_TO_A_DEAD_HANDLER: (ATTACHED, "given back to a handler that was gone"),
}


def explored(setting: Setting, flaw: Flaw | None = None) -> int:
    """How many states there are, if none of them breaks a rule."""
    model = Parking(setting, flaw)
    exploration = Exploration(model.initial, model.steps, model.broken)
    exploration.require_way_out(model.settled)
    return len(exploration.leads_to)


def test_no_order_of_steps_breaks_a_rule() -> None:
    states = {name: explored(setting) for name, setting in SETTINGS.items()}
    print(f"{sum(states.values())} states: {states}")
    assert sum(states.values()) >= 100_000


@pytest.mark.parametrize("flaw", Flaw, ids=lambda flaw: flaw.name.lower())
def test_a_safeguard_that_is_taken_away_is_missed(flaw: Flaw) -> None:
    setting, rule = CAUGHT[flaw]
    with pytest.raises(Violation, match=rule):
        explored(SETTINGS[setting], flaw)
