"""Create the default policy for other runtimes."""

from __future__ import annotations

from collections.abc import Sequence

from gate.policy.policy import Policy
from gate.runtimes.selection import with_runtime


def default_policy(runtimes: Sequence[str] = ()) -> Policy:
    """With these in place of its own, each required, within the built-in bounds that fit it;
    without any, as it is. Raises PolicyError where there is no such runtime."""
    policy = Policy.default()
    for name in runtimes:
        policy = with_runtime(policy, name)
    wanted = {name: policy.runtimes[name] for name in runtimes}
    return policy.model_copy(update={"runtimes": wanted}) if wanted else policy
