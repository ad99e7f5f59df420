"""The table of forgeries: what whoever has CI's password can hand in, and what is said of it."""

from __future__ import annotations

from gate.records.layout import DECISION, DECISION_STATEMENT, EVIDENCE, EVIDENCE_STATEMENT, RECORDS
from tests.end_to_end.alterations import (
    by_a_weaker_policy,
    changed,
    decoy,
    edited,
    embellished,
    exchanged_array,
    exchanged_data,
    from_another,
    replaced,
    said_otherwise,
    signed_by,
    under_a_trusted_id,
    without,
)
from tests.end_to_end.forging import (
    STATEMENTS,
    TWINNED,
    Forgery,
    at,
    with_data,
    with_golden,
    with_spec,
    with_twin,
)
from tests.end_to_end.impostures import (
    all_aliases,
    another_model_s,
    champion_alone,
    champion_of_a_candidate,
    foreign_version,
    replayed,
    rolled_back,
    signed_anew,
    statements_of_nobody,
    stays,
    tags_of_the_champion,
)

FORGERIES: dict[str, Forgery] = {
    # records
    "evidence edited": Forgery(embellished(EVIDENCE, DECISION), "has digest"),
    "one number of the evidence edited": Forgery(
        changed(edited(f"{RECORDS}/{EVIDENCE}", measured_at=at(days=1))), "has digest"
    ),
    "decision edited": Forgery(embellished(DECISION), "is about decision"),
    "failure signed, as it is": Forgery(embellished(), "its decision is FAIL"),
    "policy weakened": Forgery(by_a_weaker_policy, "it was judged by another policy"),
    # statements
    "statement edited": Forgery(said_otherwise, "is signed by 0"),
    "statements of another file": Forgery(from_another(*STATEMENTS), "has digest"),
    "all records of another file": Forgery(from_another(RECORDS), "has digest"),
    "statement on the evidence of another file": Forgery(
        from_another(STATEMENTS[0]), "is about evidence"
    ),
    "statement of another model name": Forgery(another_model_s, "letters"),
    "statement of another registry": Forgery(
        changed(registry="https://elsewhere"), "https://elsewhere"
    ),
    "statement of a file for no registry": Forgery(changed(registry="sqlite:///m.db"), "sqlite:"),
    "expired": Forgery(changed(at=at(days=91)), "days old"),
    "of the future": Forgery(changed(at=at(days=-2)), "is of the future"),
    "key of last year": Forgery(signed_by("lapsed"), "was valid until"),
    "key of last year, backdated": Forgery(
        signed_by("lapsed", at=at(days=30)),
        "was valid until",
    ),
    "revoked key": Forgery(signed_by("revoked"), "is revoked"),
    "unknown key": Forgery(signed_by("stranger"), "is signed by 0"),
    "unknown key under a trusted key's id": Forgery(
        under_a_trusted_id,
        "is signed by 0",
    ),
    "reviewer's key": Forgery(signed_by("alice"), "is signed by 0"),
    "writer's key": Forgery(signed_by("writer"), "is signed by 0"),
    "signatures stripped": Forgery(changed(edited(STATEMENTS[1], signatures=[])), "signatures"),
    "signature exchanged": Forgery(
        changed(edited(STATEMENTS[1], signatures=[{"keyid": "0" * 64, "sig": "AAAA"}])), "signed"
    ),
    "payload type changed": Forgery(
        changed(edited(STATEMENTS[1], payloadType="application/json")), "its payload is"
    ),
    "payload type of the evidence changed": Forgery(
        changed(edited(STATEMENTS[0], payloadType="text/plain")), "its payload is"
    ),
    "statements removed": Forgery(statements_of_nobody, "there are no statements"),
    "statement on the evidence removed": Forgery(
        changed(without(STATEMENTS[0])), EVIDENCE_STATEMENT
    ),
    "statement on the decision removed": Forgery(
        changed(without(STATEMENTS[1])), DECISION_STATEMENT
    ),
    # replays
    "older version again": Forgery(
        replayed(1), "its verdict brought version 1 into service before", before=stays
    ),
    "rolled-back version again": Forgery(
        replayed(2), "these bytes were rolled back as version 2", before=rolled_back
    ),
    "rolled-back bytes signed anew": Forgery(
        signed_anew, "these bytes were rolled back as version 2", before=rolled_back
    ),
    # bytes
    "model exchanged": Forgery(from_another("model.onnx"), "has digest"),
    "another model is loaded": Forgery(changed(decoy), "MLmodel"),
    "external data exchanged": Forgery(changed(exchanged_data), "has digest", make=with_data),
    "golden vectors exchanged": Forgery(
        from_another("golden"), "golden vectors", make=with_golden
    ),
    "array of golden vectors exchanged": Forgery(changed(exchanged_array), "golden", make=with_golden),
    "golden vectors removed": Forgery(
        changed(without("golden")), "golden vectors", make=with_golden
    ),
    "preprocessing exchanged": Forgery(
        changed(replaced("preprocessing/spec.json", b"0.485", b"0.486")),
        "preprocessing", make=with_spec,
    ),
    "preprocessing removed": Forgery(
        changed(without("preprocessing")), "preprocessing", make=with_spec
    ),
    # tags and aliases
    "tags of the champion": Forgery(tags_of_the_champion, "is signed by 0"),
    "champion pointed at the candidate": Forgery(champion_of_a_candidate, "is signed by 0"),
    "champion pointed at another version": Forgery(
        champion_alone, "no line of the ledger says", action="reverted"
    ),
    "all aliases pointed at it": Forgery(all_aliases, "is signed by 0"),
    "candidate pointed at a foreign version": Forgery(foreign_version, "expected victim-"),
    # the twin
    "twin exchanged": Forgery(
        from_another("quantized"), "names no quantized twin", make=with_twin, policy=TWINNED
    ),
    "twin's bytes exchanged": Forgery(
        from_another("quantized/model.onnx"), "has digest", make=with_twin, policy=TWINNED
    ),
    "twin's evidence edited": Forgery(
        changed(edited(f"quantized/{RECORDS}/{EVIDENCE}", measured_at=at(days=1))),
        "has digest", make=with_twin, policy=TWINNED,
    ),
    "twin's statements removed": Forgery(
        changed(without(*(f"quantized/{name}" for name in STATEMENTS))),
        "the quantized twin: there are no statements", make=with_twin, policy=TWINNED,
    ),
    "twin removed": Forgery(changed(without("quantized")), "twin", make=with_twin, policy=TWINNED),
}  # fmt: skip
