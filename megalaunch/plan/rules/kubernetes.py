"""Rules of a run in pods of Kubernetes. What only the cluster knows, `kubectl create --dry-run=server` checks later."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megalaunch.plan.rules.registry import RuleContext, Violation, rule
from megalaunch.plan.rules.secret_values import is_secret_name
from megalaunch.platform.chips import CHIPS
from megalaunch.platform.kubernetes import device_resource
from megalaunch.schema.kubernetes import KubernetesSpec

_LABEL = r"(?:[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
_OBJECT = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|[kMGTPE]|[KMGTPE]i)?")
_FORMS = {
    "image_pull_secrets": ("the name of a secret", re.compile(_OBJECT)),
    "volumes": ("CLAIM:/PATH[:ro] or /HOST_PATH:/PATH[:ro]", re.compile(rf"(?:{_OBJECT}|/[^:]*):/[^:]*(?::ro)?")),
    "environment": ("NAME=VALUE", re.compile(rf"{_VARIABLE}=.*", re.DOTALL)),
    "secrets": ("NAME=SECRET/KEY", re.compile(rf"{_VARIABLE}={_OBJECT}/[A-Za-z0-9._-]+")),
    "node_selector": ("KEY=VALUE", re.compile(rf"{_LABEL}={_VALUE}")),
    "tolerations": (
        "KEY, KEY=VALUE or either with :EFFECT",
        re.compile(rf"{_LABEL}(?:={_VALUE})?(?::(?:NoSchedule|PreferNoSchedule|NoExecute))?"),
    ),
}
# Lists in which somebody may have typed a secret in place of its name: the message has the place of an entry alone.
_NOT_REPEATED = ("image_pull_secrets", "environment", "secrets")
_QUANTITIES = ("cpu", "memory", "shm")
_NAMES = ("service_account", "priority_class", "queue")


def _kubernetes(at: RuleContext) -> KubernetesSpec | None:
    """Return the section, if the run starts in pods."""
    return at.spec.launcher.kubernetes if at.spec.launcher.name == "kubernetes" else None


@rule("launcher.kubernetes_image", "launcher.kubernetes.image names an image.")
def kubernetes_image(at: RuleContext) -> Iterator[Violation]:
    """Pods have no software but that of their image."""
    settings = _kubernetes(at)
    if settings is not None and not settings.image:
        yield Violation(
            "launcher.kubernetes.image", "a pod needs an image with megalaunch[train]: launcher.kubernetes.image=IMAGE"
        )


@rule("launcher.kubernetes_forms", "Lists and names of launcher.kubernetes have the forms that their keys document.")
def kubernetes_forms(at: RuleContext) -> Iterator[Violation]:
    """The server would name the place in the manifest, not the key."""
    settings = _kubernetes(at)
    if settings is not None:
        yield from wrong_forms(settings)


def wrong_forms(settings: KubernetesSpec) -> Iterator[Violation]:
    """Yield each list, name and quantity of the section that has not the form of its key, and volumes at one path."""
    for key, (form, pattern) in _FORMS.items():
        yield from _wrong(key, getattr(settings, key), form, pattern)
    yield from _same_path(settings.volumes)
    for key in _NAMES:
        value = getattr(settings, key)
        if value is not None and not re.fullmatch(_OBJECT, value):
            yield Violation(
                f"launcher.kubernetes.{key}",
                f"{value!r} is no name of an object: lower-case letters, digits, '-' and '.'",
                fixes=({f"launcher.kubernetes.{key}": None},),
            )
    for key in _QUANTITIES:
        value = getattr(settings, key)
        if value is not None and not _QUANTITY.fullmatch(value):
            yield Violation(
                f"launcher.kubernetes.{key}",
                f"{value!r} is not a quantity of Kubernetes, such as 96, 500m or 64Gi",
                fixes=({f"launcher.kubernetes.{key}": None},),
            )


def _wrong(key: str, items: tuple[str, ...], form: str, pattern: re.Pattern[str]) -> Iterator[Violation]:
    wrong = [(place, item) for place, item in enumerate(items, 1) if not pattern.fullmatch(item)]
    if wrong:
        place, first = wrong[0]
        shown = f"entry {place} of {len(items)}" if key in _NOT_REPEATED else repr(first)
        path, kept = f"launcher.kubernetes.{key}", tuple(item for item in items if pattern.fullmatch(item))
        yield Violation(path, f"{shown} is not {form}", fixes=({path: kept},))


def _same_path(volumes: tuple[str, ...]) -> Iterator[Violation]:
    """Yield the volumes that are mounted where another is. A JobSet with them is accepted, and starts no pod."""
    by_path: dict[str, str] = {}
    for volume in volumes:
        path = volume.split(":")[1].rstrip("/") if ":" in volume else volume
        if path in by_path:
            kept = tuple(other for other in volumes if other != volume)
            yield Violation(
                "launcher.kubernetes.volumes",
                f"{by_path[path]!r} and {volume!r} are mounted at the same path",
                fixes=({"launcher.kubernetes.volumes": kept},) if volume != by_path[path] else (),
            )
            return
        by_path[path] = volume


@rule("launcher.kubernetes_secrets", "No secret is a value of the manifest.")
def kubernetes_secrets(at: RuleContext) -> Iterator[Violation]:
    """Whoever reads the object, job.yaml or spec.yaml would read the value. A reference leaves it in its secret."""
    settings = _kubernetes(at)
    if settings is not None:
        yield from secret_values(settings)


def secret_values(settings: KubernetesSpec) -> Iterator[Violation]:
    """Yield each variable of the section that looks like a secret."""
    for variable in settings.environment:
        name = variable.partition("=")[0]
        if is_secret_name(name) and _FORMS["environment"][1].fullmatch(variable):  # else the name may be the secret
            kept = tuple(other for other in settings.environment if other != variable)
            yield Violation(
                "launcher.kubernetes.environment",
                f"{name} looks like a secret, whose value would be in the manifest: keep it in a secret of the "
                f"namespace, and write \"launcher.kubernetes.secrets=['{name}=SECRET/KEY']\"",
                fixes=({"launcher.kubernetes.environment": kept},),
            )


@rule("launcher.kubernetes_devices", "Kubernetes has a name for the accelerators of the run.")
def kubernetes_devices(at: RuleContext) -> Iterator[Violation]:
    """A pod gets no accelerator that it does not ask for by the name of the cluster's device plug-in."""
    settings, chip = _kubernetes(at), CHIPS.get(at.spec.platform.chip)
    if settings is None or chip is None or chip.device == "cpu" or settings.device_resource:
        return
    if not device_resource(chip):
        yield Violation(
            "launcher.kubernetes.device_resource",
            f"no device plug-in for {chip.name} is known: give its resource, as `kubectl describe node` shows it",
        )


@rule("launcher.kubernetes_trainjob", "A TrainJob has only settings that its kind can hold.")
def kubernetes_trainjob(at: RuleContext) -> Iterator[Violation]:
    """Kubeflow's trainer takes the rest from its runtime; a setting without effect would mislead."""
    settings = _kubernetes(at)
    if settings is not None and settings.kind == "trainjob" and settings.priority_class is not None:
        yield Violation(
            "launcher.kubernetes.priority_class",
            "a TrainJob has no priority class: set it in its runtime",
            fixes=({"launcher.kubernetes.priority_class": None}, {"launcher.kubernetes.kind": "jobset"}),
        )
