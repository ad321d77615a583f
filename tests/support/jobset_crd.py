"""The definition of JobSet (v1alpha2) for an API server: of its published schema, the fields that our manifest has.

The server refuses a wrong type and an unknown action; kubectl refuses a field that is not listed here.
"""

from __future__ import annotations

from typing import Any

GROUP, VERSION = "jobset.x-k8s.io", "v1alpha2"

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
QUANTITY: Schema = {"x-kubernetes-int-or-string": True}


def _number(minimum: int | None = None, bits: int = 32) -> Schema:
    limit = {} if minimum is None else {"minimum": minimum}
    return {"type": "integer", "format": f"int{bits}", **limit}


def _fields(required: str = "", **fields: Schema) -> Schema:
    given = {"required": required.split()} if required else {}
    return {"type": "object", "properties": fields, **given}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _pod() -> Schema:
    secret = _fields("secretKeyRef", secretKeyRef=_fields("key", name=TEXT, key=TEXT))
    volume = _fields(
        "name",
        name=TEXT,
        persistentVolumeClaim=_fields("claimName", claimName=TEXT),
        hostPath=_fields("path", path=TEXT),
        emptyDir=_fields(medium=TEXT, sizeLimit=QUANTITY),
    )
    container = _fields(
        "name",
        name=TEXT,
        image=TEXT,
        command=_list(TEXT),
        workingDir=TEXT,
        env=_list(_fields("name", name=TEXT, value=TEXT, valueFrom=secret)),
        resources=_fields(requests=_map(QUANTITY), limits=_map(QUANTITY)),
        volumeMounts=_list(_fields("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
    )
    return _fields(
        "containers",
        serviceAccountName=TEXT,
        imagePullSecrets=_list(_fields(name=TEXT)),
        nodeSelector=_map(TEXT),
        tolerations=_list(_fields(key=TEXT, operator=TEXT, value=TEXT, effect=TEXT)),
        priorityClassName=TEXT,
        terminationGracePeriodSeconds=_number(bits=64),
        volumes=_list(volume),
        restartPolicy=TEXT,
        subdomain=TEXT,
        containers=_list(container),
    )


def _job() -> Schema:
    rule = _fields(
        "action",
        action=TEXT,
        onPodConditions=_list(_fields("type", type=TEXT, status=TEXT)),
        onExitCodes=_fields("operator values", containerName=TEXT, operator=TEXT, values=_list(_number())),
    )
    return _fields(
        "template",
        completionMode=TEXT,
        completions=_number(),
        parallelism=_number(),
        backoffLimit=_number(),
        podFailurePolicy=_fields("rules", rules=_list(rule)),
        template=_fields(spec=_pod()),
    )


def _jobset() -> Schema:
    actions = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    rule = _fields(
        "action name",
        name=TEXT,
        action={**TEXT, "enum": list(actions)},
        onJobFailureReasons=_list(TEXT),
        onJobFailureMessagePatterns=_list(TEXT),
    )
    return _fields(
        network=_fields(enableDNSHostnames=FLAG, publishNotReadyAddresses=FLAG, subdomain=TEXT),
        failurePolicy=_fields(maxRestarts=_number(), rules=_list(rule)),
        ttlSecondsAfterFinished=_number(0),
        replicatedJobs=_list(
            _fields("name template", name=TEXT, replicas=_number(0), template=_fields(spec=_job())),
        ),
    )


def jobset_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition."""
    condition = _fields("type status", type=TEXT, status=TEXT, reason=TEXT, message=TEXT)
    status = _fields(restarts=_number(), conditions=_list(condition))
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _fields(spec=_jobset(), status=status)},
        "subresources": {"status": {}},
    }
    names = {"kind": "JobSet", "listKind": "JobSetList", "plural": "jobsets", "singular": "jobset"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"jobsets.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }
