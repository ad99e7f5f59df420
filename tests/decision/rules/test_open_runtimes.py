"""Mismatches of plug-in runtimes fail, and no record changes the rules of built-in runtimes."""

from __future__ import annotations

import pytest

from gate import Decision, Evidence, Policy, Verdict, decide
from gate.policy.sections import RuntimePolicy
from gate.records.runtime import CPU_PROVIDER, PROVIDERS, RuntimeIdentity
from tests import builders

ACME = RuntimeIdentity(
    kind="acme", package="acme-parity 1.2", provider="ACME", precision="float32",
    options={"hint": "f32"},
)  # fmt: skip
NODES = {"providers_active": (CPU_PROVIDER,), "nodes_per_provider": {CPU_PROVIDER: 4}}


def policy(name: str = "acme", **settings) -> Policy:
    plain = builders.policy()
    bounds = plain.runtimes["ort-cpu"].bounds
    runtime = RuntimePolicy(**{"required": "always", "bounds": bounds, **settings})
    return plain.model_copy(update={"runtimes": {**plain.runtimes, name: runtime}})


def evidence(name: str = "acme", **fields) -> Evidence:
    good = builders.evidence()
    changed = good.runtime("ort-cpu").model_copy(update={"runtime": name, **fields})
    other_runtimes = [runtime for runtime in good.runtimes if runtime.runtime != name]
    return good.model_copy(update={"runtimes": (*other_runtimes, changed)})


def acme_evidence(**fields) -> Evidence:
    identity = fields.pop("identity", ACME)
    active = {"providers_active": ("ACME",), "nodes_per_provider": {}, "session_options": {}}
    return evidence(identity=identity, **{**active, **fields})


def decide_stored(policy: Policy, evidence: Evidence) -> Decision:
    return decide(policy, Evidence.from_json(evidence.to_json()), decided_at="now")


def failed_checks(decision: Decision, name: str = "acme") -> set[str]:
    return {check.name for check in decision.problems if check.runtime == name}


ACME_SETTINGS = {"options": {"hint": "f32"}}


def test_plugin_runtime_matching_its_identity_passes():
    decision = decide_stored(policy(**ACME_SETTINGS), acme_evidence())
    assert decision.verdict is Verdict.PASS
    assert decision.runtimes[-1] == "acme"
    # after the built-in runtimes, whatever the order of the records
    assert decision.checks[-1].runtime == "acme"


MISMATCHES = {
    "no identity": ({"identity": None}, {"session", "provider", "precision"}),
    "another kind": ({"identity": ACME.model_copy(update={"kind": "other"})}, {"session"}),
    "other options": ({"identity": ACME.model_copy(update={"options": {}})}, {"session"}),
    "no promise": ({"identity": ACME.model_copy(update={"provider": ""})}, {"provider"}),
    "elsewhere": ({"providers_active": ("CPU", "ACME")}, {"provider"}),
    "nowhere": ({"providers_active": ()}, {"provider"}),
    "fallback": ({"fallback_nodes": ("Conv:a",)}, {"provider"}),
    "no precision": ({"identity": ACME.model_copy(update={"precision": None})}, {"precision"}),
    "bfloat16": ({"identity": ACME.model_copy(update={"precision": "bfloat16"})}, {"precision"}),
    "no numbers": ({"outputs": ()}, {"runtime"}),
    "failed": ({"outputs": (), "failure": "it hung"}, {"runtime"}),
}


@pytest.mark.parametrize(("spoiled", "checks"), MISMATCHES.values(), ids=MISMATCHES)
def test_mismatched_plugin_record_fails(spoiled, checks):
    decision = decide_stored(policy(**ACME_SETTINGS), acme_evidence(**spoiled))
    assert failed_checks(decision) == checks
    assert decision.verdict is not Verdict.PASS


def test_reduced_policy_accepts_any_precision():
    custom_policy = policy(**ACME_SETTINGS).model_copy(update={"precision": "reduced"})
    observed = acme_evidence(identity=ACME.model_copy(update={"precision": "bfloat16"}))
    assert "precision" not in failed_checks(decide_stored(custom_policy, observed))


FORGED = {
    "a promise of its own": {"provider": "ACME"},
    "another kind": {"kind": "acme"},
    "looser bounds": {"bounds": "cuda", "provider": "ACME"},
}


@pytest.mark.parametrize("promise", FORGED.values(), ids=FORGED)
def test_identity_does_not_change_rules_of_built_in_runtimes(promise):
    identity = RuntimeIdentity(**{"kind": "ort-cpu", "provider": CPU_PROVIDER, **promise})
    plain = evidence("ort-cpu", identity=identity, providers_active=("ACME",))
    assert "provider" in failed_checks(decide_stored(builders.policy(), plain), "ort-cpu")
    level = builders.evidence().runtime("ort-cpu").session_options | {
        "graph_optimization_level": "ORT_ENABLE_ALL"
    }
    plain = evidence("ort-cpu", identity=identity, session_options=level)
    assert "session" in failed_checks(decide_stored(builders.policy(), plain), "ort-cpu")


def test_options_of_built_in_runtime_must_match_the_policy():
    bounds = builders.policy().runtimes["ort-cpu"].bounds
    custom_policy = policy(
        "ort-cpu", bounds=bounds, options={"disabled_optimizers": ["GeluFusion"]}
    )
    decision = decide_stored(custom_policy, builders.evidence())
    assert "session" in failed_checks(decision, "ort-cpu")
    identity = RuntimeIdentity(kind="ort-cpu", options={"disabled_optimizers": ["GeluFusion"]})
    unset = decide_stored(builders.policy(), evidence("ort-cpu", identity=identity))
    assert failed_checks(unset, "ort-cpu") == {"session"}


def test_registered_provider_overrides_the_identity(monkeypatch):
    monkeypatch.setitem(PROVIDERS, "acme", "CHIP")
    assert failed_checks(decide_stored(policy(**ACME_SETTINGS), acme_evidence())) == {"provider"}
    chip = acme_evidence(providers_active=("CHIP",))
    assert decide_stored(policy(**ACME_SETTINGS), chip).verdict is Verdict.PASS
    custom_settings = {"kind": "acme", **ACME_SETTINGS}
    observed = evidence("mine", identity=ACME, providers_active=("ACME",), nodes_per_provider={})
    assert failed_checks(decide_stored(policy("mine", **custom_settings), observed), "mine") == {
        "provider"
    }


@pytest.mark.parametrize("name", sorted(PROVIDERS))
@pytest.mark.parametrize("kind", ["ort", "acme"])
def test_built_in_name_with_another_kind_fails(name, kind):
    """Fail a policy built in code; the validation of policies rejects it."""
    options = {"providers": [CPU_PROVIDER], "graph_optimization_level": "ORT_DISABLE_ALL"}
    identity = RuntimeIdentity(
        kind=kind, options=options, provider=CPU_PROVIDER, precision="float32"
    )
    custom_policy = policy(name, kind=kind, options=options)
    assert "session" in failed_checks(
        decide_stored(custom_policy, evidence(name, identity=identity, **NODES)), name
    )


XNN = {"providers": ["XnnpackExecutionProvider"]}
MIXED = {"providers": ["XnnpackExecutionProvider", CPU_PROVIDER]}


@pytest.mark.parametrize(
    ("options", "fields", "checks"),
    [
        (XNN, {"nodes_per_provider": {"XnnpackExecutionProvider": 4}}, set()),
        (XNN, {"nodes_per_provider": {"XnnpackExecutionProvider": 4, CPU_PROVIDER: 1}}, set()),
        (XNN, {"nodes_per_provider": {"XnnpackExecutionProvider": 4, CPU_PROVIDER: 1}, "fallback_nodes": ("Conv:a",)}, {"provider"}),
        (XNN, {"nodes_per_provider": {"XnnpackExecutionProvider": 4, "CUDAExecutionProvider": 1}}, {"provider"}),
        (XNN, {"nodes_per_provider": {CPU_PROVIDER: 4}}, {"provider"}),
        (XNN, {"nodes_per_provider": {}}, {"provider"}),
        (MIXED, {"nodes_per_provider": {"XnnpackExecutionProvider": 1, CPU_PROVIDER: 3}}, set()),
        (MIXED, {"nodes_per_provider": {CPU_PROVIDER: 4}}, {"provider"}),
        (MIXED, {"nodes_per_provider": {"XnnpackExecutionProvider": 4}, "providers_active": (CPU_PROVIDER,)}, {"provider"}),
    ],
)  # fmt: skip
def test_ort_nodes_run_on_listed_providers(options, fields, checks):
    options = {**options, "graph_optimization_level": "ORT_DISABLE_ALL"}
    identity = RuntimeIdentity(kind="ort", options=options, provider=options["providers"][0])
    active = {"providers_active": tuple(options["providers"]), "identity": identity}
    observed = evidence("xnn", **{**active, **fields})
    decision = decide_stored(policy("xnn", kind="ort", options=options), observed)
    assert failed_checks(decision, "xnn") == checks
