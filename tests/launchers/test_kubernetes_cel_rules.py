"""The rules in CEL of the definitions of TrainJob and JobSet (`x-kubernetes-validations`), each stated in Python.

They are those of trainer.kubeflow.org/v1alpha1 and jobset.x-k8s.io/v1alpha2 as published in August 2026, but for rules
of the status, which the controllers write. The server of `test_real_api_server` is too old to evaluate CEL.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_jobs import FULL, job_of

from megalaunch.launchers import kubernetes
from megalaunch.launchers.kubernetes.manifest import manifest, object_name

MANAGERS = ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue")


def sources_of(spec: dict[str, Any]) -> list[str]:
    """The addresses of the model and the data that an initializer fetches."""
    return [each.get("storageUri", "") for each in spec.get("initializer", {}).values()]


def templates_of(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [template for policy in spec.get("volumeClaimPolicies", ()) for template in policy["templates"]]


def is_ordered_twice(spec: dict[str, Any]) -> bool:
    in_order = spec.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder"
    return in_order and any("dependsOn" in job for job in spec["replicatedJobs"])


RULES: dict[str, dict[str, Callable[[str, dict[str, Any]], bool]]] = {
    "trainjob": {
        "the name is a DNS label of RFC 1035": lambda name, _: bool(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)),
        "the name has at most 63 characters": lambda name, _: len(name) <= 63,
        "a node has a process": lambda _, spec: spec["trainer"].get("numProcPerNode", 1) >= 1,
        "storageUri is empty or a URI": lambda _, spec: all(
            uri == "" or re.search("^[A-Za-z][A-Za-z0-9+.-]*://.+$", uri) for uri in sources_of(spec)
        ),
        "managedBy is a known controller": lambda _, spec: spec.get("managedBy", MANAGERS[0]) in MANAGERS,
    },
    "jobset": {
        "startupPolicy and dependsOn exclude each other": lambda _, spec: not is_ordered_twice(spec),
        "a volume claim has no namespace": lambda _, spec: (
            not any(template.get("metadata", {}).get("namespace") for template in templates_of(spec))
        ),
    },
}
BROKEN = {
    "the name is a DNS label of RFC 1035": ("8b", {}),
    "the name has at most 63 characters": ("a" * 64, {}),
    "a node has a process": ("a", {"trainer": {"numProcPerNode": 0}}),
    "storageUri is empty or a URI": ("a", {"initializer": {"model": {"storageUri": "bucket/model"}}}),
    "managedBy is a known controller": ("a", {"managedBy": "another"}),
    "startupPolicy and dependsOn exclude each other": (
        "a",
        {"startupPolicy": {"startupPolicyOrder": "InOrder"}, "replicatedJobs": [{"dependsOn": []}]},
    ),
    "a volume claim has no namespace": (
        "a",
        {"volumeClaimPolicies": [{"templates": [{"metadata": {"namespace": "team"}}]}]},
    ),
}


@pytest.mark.parametrize("kind", RULES)
def test_every_manifest_keeps_the_rules_of_its_definition(kind):
    for settings in ({}, FULL):
        for run in ("llama", "8B_base.1", "X" * 128):
            for devices in (0, 8):
                job = replace(job_of(devices=devices, **{**settings, "kind": kind}), name=run)
                (made,) = manifest(job, object_name(job, 1000))
                kept = {rule: holds(made["metadata"]["name"], made["spec"]) for rule, holds in RULES[kind].items()}
                assert all(kept.values()), (run, devices, kept)


def test_each_rule_finds_what_breaks_it():
    found = {rule: holds(*BROKEN[rule]) for rules in RULES.values() for rule, holds in rules.items()}
    assert found == dict.fromkeys(BROKEN, False)


def test_no_object_with_immutable_fields_is_changed():
    """Both definitions have `self == oldSelf` on the trainer, the runtime, the pods and the policies of failure."""
    source = "".join(path.read_text() for path in Path(kubernetes.__file__).parent.glob("*.py"))
    changes = re.findall(r'kubectl\([^)]*?"(?:patch|apply|replace|edit|set|scale)"[^)]*\)', source)
    assert len(changes) == 1
    assert '"patch", f"service/' in changes[0]
