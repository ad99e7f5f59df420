"""Which optimiser of ONNX Runtime is to blame, found by switching them off.

First the level, then the optimisers that changed the graph, the fewest of which must be off, those
of that level first; of a set of rules, the rule. What is named was tried: with it off the session
answers what the model computes, as it does with all optimisations off.
"""

from __future__ import annotations

from collections.abc import Sequence

from gate.errors import describe_failure
from gate.localisation.optimisers.log import LEVELS, changing
from gate.localisation.optimisers.nodes import MOST_BYTES, exchanged
from gate.localisation.optimisers.rules import RULES
from gate.localisation.optimisers.search import fewest
from gate.localisation.optimisers.trials import OptimiserTrials, Spent
from gate.policy.ort_options import OPTIMISATIONS_OFF
from gate.records.localisation import OptimiserBlame

_ROUNDS = 4
"""How often those are added that only then change the graph."""


class _Clear(Exception):
    """No optimiser is to blame, or none can be told: the reason."""


def blame(trials: OptimiserTrials, *, size_bytes: int) -> OptimiserBlame:
    """Find them. Never raises: what breaks is the reason why none is named.

    `size_bytes`: of the file; of large ones the nodes are not compared.
    """
    level = below = raises = None
    try:
        log: list[str] = []
        raises = _doubt(trials, log)
        below, level = _levels(trials)
        names, reason = _names(trials, changing(log, at=level), level)
    except _Clear as clear:
        names, reason = (), str(clear)
    except Exception as error:
        names, reason = (), describe_failure(error)
    found = OptimiserBlame(
        names=names, raises=raises, level=level, below=below, reason=reason,
        sessions=trials.sessions,
    )  # fmt: skip
    return _with_nodes(found, trials, size_bytes) if names else found


def _doubt(trials: OptimiserTrials, log: list[str]) -> str | None:
    """What ONNX Runtime raises with all on, if it does; `log` gets what it says. Raises _Clear
    where they change nothing."""
    off = trials.outcome(level=OPTIMISATIONS_OFF)
    if not off.agrees:
        why = "the file is off by more than rounding"
        raise _Clear(f"with optimisations off {off.failure or why}, too")
    on = trials.outcome(log=log)
    if on.agrees:
        raise _Clear("the file as it is served agrees with them on")
    return on.failure


def _levels(trials: OptimiserTrials) -> tuple[str, str]:
    """Two levels, one above the other: at the lower one the answer is right."""
    own = trials.setup.optimization
    levels = [OPTIMISATIONS_OFF, *LEVELS[: LEVELS.index(own)], own]
    right, wrong = 0, len(levels) - 1
    while wrong - right > 1:
        middle = (right + wrong) // 2
        if trials.outcome(level=levels[middle]).agrees:
            right = middle
        else:
            wrong = middle
    return levels[right], levels[wrong]


def _names(
    trials: OptimiserTrials, first: Sequence[str], level: str
) -> tuple[tuple[str, ...], str | None]:
    """The optimisers, and what else is to be said of them. `first`: those that change the graph.
    Raises _Clear."""
    try:
        suspects = _suspects(trials, first, level)
        names = fewest(suspects, trials.heals)
        for name in names:
            if name in RULES:
                names = _by_rule(trials, names, name)
        if trials.heals(frozenset(names)):
            return names, None
        # With more off it was right: they do not add up.
        return suspects, "with fewer of them off it is not right each time"
    except Spent as spent:
        if trials.healing is None:
            raise _Clear(str(spent)) from spent
        return tuple(sorted(trials.healing)), f"{spent} whether fewer would do"


def _suspects(trials: OptimiserTrials, first: Sequence[str], level: str) -> tuple[str, ...]:
    """Optimisers that change the graph, enough of them for the answer to be right without them:
    where one is off, another one may do its work. Raises _Clear, Spent."""
    if not first:
        raise _Clear(f"ONNX Runtime logs none that changes the graph, from {level} on")
    off = dict.fromkeys(first)
    for _ in range(_ROUNDS):
        log: list[str] = []
        if trials.outcome(off=off.keys(), log=log).agrees:
            return tuple(off)
        new = [name for name in changing(log) if name not in off]
        if not new:
            break
        off.update(dict.fromkeys(new))
    raise _Clear(
        f"with all {len(off)} that change the graph switched off by name it is still not right; "
        f"what level {level} does beside them is to blame"
    )


def _by_rule(trials: OptimiserTrials, names: Sequence[str], of: str) -> tuple[str, ...]:
    """The same with the rules that are to blame in the place of their set, where they have names
    that ONNX Runtime takes."""
    rest = frozenset(names) - {of}
    rules = [rule for rule in RULES[of] if rule not in rest]
    if not trials.heals(rest.union(rules)):
        return tuple(names)
    needed = fewest(rules, lambda some: trials.heals(rest | some))
    return tuple(name for name in names if name != of) + needed


def _with_nodes(found: OptimiserBlame, trials: OptimiserTrials, size_bytes: int) -> OptimiserBlame:
    """The same with the nodes that they exchanged, or why these are not known."""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    unread: str | None = None
    if size_bytes > MOST_BYTES:
        unread = f"the file is larger than {MOST_BYTES >> 20} MiB"
    else:
        try:
            before, after = exchanged(trials, frozenset(found.names))
        except Exception as error:
            unread = describe_failure(error)
    return found.model_copy(
        update={
            "before": before,
            "after": after,
            "nodes_unread": unread,
            "sessions": trials.sessions,
        }
    )
