"""Create the default policy for other runtimes."""

from __future__ import annotations

from collections.abc import Sequence

from gate.policy.policy import Policy
from gate.runtimes.selection import with_runtime


def default_policy(runtimes: Sequence[str] = ()) -> Policy:
    """Return the default policy with its runtimes replaced by these, each required.

    Each runtime gets the built-in bounds that fit it. Without runtimes, return the default policy
    unchanged. Raises PolicyError for an unknown runtime.
    """
    policy = Policy.default()
    for name in runtimes:
        policy = with_runtime(policy, name)
    selected = {name: policy.runtimes[name] for name in runtimes}
    return policy.model_copy(update={"runtimes": selected}) if selected else policy
