"""The definition of Kubeflow's TrainJob (v1alpha1) for an API server: the schema of the models that Kubeflow publishes.

The server refuses a wrong type and a missing field; kubectl refuses a field that the models lack. Rules that only the
published definition has, in CEL, are newer than the server.
"""

from __future__ import annotations

from typing import Any

GROUP, VERSION = "trainer.kubeflow.org", "v1alpha1"

Schema = dict[str, Any]
_EITHER: Schema = {"x-kubernetes-int-or-string": True}
_EITHER_NAMES = ("Quantity", "IntOrString")  # the models wrap the text or number
_KEPT = ("type", "required", "enum")


def trainjob_definition(models: Any) -> Schema:
    """Return the CustomResourceDefinition, made of `kubeflow_trainer_api.models`."""
    document = models.TrainerV1alpha1TrainJob.model_json_schema(by_alias=True)
    whole = _structural(document, document["$defs"])
    whole["properties"]["metadata"] = {"type": "object"}  # the server knows it
    version = {"name": VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": whole}}
    names = {"kind": "TrainJob", "listKind": "TrainJobList", "plural": "trainjobs", "singular": "trainjob"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"trainjobs.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _structural(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return a JSON schema as the server takes it: without references, and without alternatives to null."""
    if schema.get("$ref", "").endswith(_EITHER_NAMES):
        return dict(_EITHER)
    if "$ref" in schema:
        return _structural(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    choices = [choice for choice in schema.get("anyOf", ()) if choice != {"type": "null"}]
    if choices:
        return _structural(choices[0], definitions) if len(choices) == 1 else dict(_EITHER)
    made = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in schema:
        made["properties"] = {name: _structural(value, definitions) for name, value in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            made[key] = _structural(schema[key], definitions)
    if "type" not in made or (made["type"] == "object" and not made.keys() & {"properties", "additionalProperties"}):
        return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return made
