"""Static checks of deploy/kubernetes, because no cluster and no Helm are available."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import gate
from gate.commands.service import serve_command
from gate.service import app
from gate.service.settings import SECRETS_VARIABLE

ROOT = Path(__file__).parents[2]
OBJECTS: list[dict[str, Any]] = list(
    YAML(typ="safe").load_all((ROOT / "deploy/kubernetes/parity-gate.yaml").read_text())
)
BY_KIND = {one["kind"]: one for one in OBJECTS}
POD = BY_KIND["Deployment"]["spec"]["template"]["spec"]
(SERVICE,) = POD["containers"]
KINDS = {
    "ServiceAccount": "v1",
    "ConfigMap": "v1",
    "PersistentVolumeClaim": "v1",
    "Deployment": "apps/v1",
    "Service": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
}


CHART = ROOT / "deploy/kubernetes/chart"
ACTION = re.compile(r"\{\{ (?:\.(?P<quoted>[\w.]+) \| quote|toJson \.(?P<json>[\w.]+)) \}\}")
"""The only Helm expressions in the templates."""


def render_chart(**given: Any) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the chart's objects with these values, and the names of the used values."""
    read = YAML(typ="safe")
    values = read.load((CHART / "values.yaml").read_text()) | given
    names = {"Release": {"Name": "parity-gate"}, "Values": values}
    used = set()

    def value(action: re.Match[str]) -> str:
        path = action["quoted"] or action["json"]
        used.add(path)
        result = functools.reduce(lambda place, part: place[part], path.split("."), names)
        assert isinstance(result, str) or action["json"], path
        return json.dumps(result)

    objects = []
    for template in sorted((CHART / "templates").iterdir()):
        text = ACTION.sub(value, template.read_text())
        assert "{{" not in text, template.name
        objects.append(read.load(text))
    return objects, used


def test_chart_renders_the_plain_manifests() -> None:
    objects, used = render_chart()
    assert sorted(objects, key=lambda one: one["kind"]) == sorted(
        OBJECTS, key=lambda one: one["kind"]
    )
    values = YAML(typ="safe").load((CHART / "values.yaml").read_text())
    network = {f"Values.network.{name}" for name in values.pop("network")}
    assert used == {"Release.Name", *network, *(f"Values.{name}" for name in values)}


def test_chart_values_reach_their_objects() -> None:
    objects, _ = render_chart(
        image="registry.example/gate:1.2", models="a,b", secret="mine", memory="9Gi"
    )
    by_kind = {item["kind"]: item for item in objects}
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    images = {item["image"] for item in (*pod["initContainers"], *pod["containers"])}
    assert images == {"registry.example/gate:1.2"}
    assert by_kind["ConfigMap"]["data"]["GATE_MODELS"] == "a,b"
    assert {v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v} == {"mine"}
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "9Gi"


def test_chart_has_the_package_version() -> None:
    chart = YAML(typ="safe").load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "parity-gate")
    assert chart["version"] == chart["appVersion"] == gate.__version__


def test_each_object_exists_once_with_its_api_version() -> None:
    assert {item["kind"]: item["apiVersion"] for item in OBJECTS} == KINDS
    assert len(OBJECTS) == len(KINDS)
    assert {item["metadata"]["name"] for item in OBJECTS} == {"parity-gate"}


@pytest.mark.parametrize("container", [*POD["initContainers"], SERVICE], ids=lambda c: c["name"])
def test_containers_run_with_minimal_privileges(container: dict[str, Any]) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    assert not container["image"].endswith(":latest")
    assert POD["securityContext"]["runAsNonRoot"]
    assert not POD["automountServiceAccountToken"]


def test_each_mount_has_a_volume_and_vice_versa() -> None:
    mounted = {
        mount["name"]
        for container in (*POD["initContainers"], SERVICE)
        for mount in container["volumeMounts"]
    }
    assert mounted == {volume["name"] for volume in POD["volumes"]}


def test_service_accepts_its_arguments_and_variables() -> None:
    program, command, *options = SERVICE["args"]
    assert (program, command) == ("gate", "serve")
    context = serve_command.make_context("serve", list(options), resilient_parsing=True)
    assert context.params["host"] == "0.0.0.0"
    assert context.params["key"] == "/run/gate/key.pem"
    variables = {str(option.envvar) for option in serve_command.params if option.envvar}
    stated = {*BY_KIND["ConfigMap"]["data"], *(each["name"] for each in SERVICE["env"])}
    of_mlflow = {f"MLFLOW_TRACKING_{name}" for name in ("URI", "USERNAME", "PASSWORD")}
    assert stated - variables == {*of_mlflow, "DATABASE", SECRETS_VARIABLE}
    assert context.params["state"] == "env:DATABASE"


def test_probes_use_existing_endpoints() -> None:
    source = Path(app.__file__).read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        requested = SERVICE[probe]["httpGet"]
        assert f'"{requested["path"]}"' in source
        assert requested["port"] in {port["name"] for port in SERVICE["ports"]}
    assert SERVICE["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_ports_and_labels_match() -> None:
    (port,) = SERVICE["ports"]
    (served,) = BY_KIND["Service"]["spec"]["ports"]
    labels = BY_KIND["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert (served["port"], served["targetPort"]) == (port["containerPort"], port["name"])
    assert BY_KIND["Service"]["spec"]["selector"].items() <= labels.items()
    policy = BY_KIND["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule["from"] and rule["ports"] for rule in policy["ingress"])
