"""Cases of the rules of a run in pods of Kubernetes."""

from __future__ import annotations

from rule_cases.case import TINY, Case

_PODS = (*TINY, "launcher=kubernetes", "launcher.kubernetes.image=me/image:1")

CASES = {
    "launcher.kubernetes_image": Case(
        "launcher.kubernetes.image=null", "launcher.kubernetes.image=other", (*TINY, "launcher=kubernetes")
    ),
    "launcher.kubernetes_forms": Case(
        "launcher.kubernetes.volumes=['data:here']", "launcher.kubernetes.volumes=['data:/here:ro','/mnt/x:/x']", _PODS
    ),
    "launcher.kubernetes_secrets": Case(
        "launcher.kubernetes.environment=['HF_TOKEN=hf_x']",
        "launcher.kubernetes.environment=['NCCL_DEBUG=INFO']",
        _PODS,
    ),
    "launcher.kubernetes_devices": Case(
        "launcher.kubernetes.device_resource=null",
        "launcher.kubernetes.device_resource=txda.com/device",
        (*_PODS, "platform=txda", "cluster.devices_per_node=1"),
    ),
    "launcher.kubernetes_trainjob": Case(
        "launcher.kubernetes.priority_class=high",
        "launcher.kubernetes.runtime=mine",
        (*_PODS, "launcher.kubernetes.kind=trainjob"),
    ),
}
