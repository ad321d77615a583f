"""`megalaunch doctor`: report the devices of this machine, missing packages and the operators of the engine."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megalaunch.format.numbers import format_memory
from megalaunch.format.table import table_lines
from megalaunch.installation import install_command

if TYPE_CHECKING:
    from megalaunch.platform.detect import Machine
    from megalaunch.platform.packages import Package, PackageState

_WIDTH = 100  # columns of running text
_WHERE_THE_REST_IS = """\
`megalaunch doctor --all` also prints what optional packages are for and how they are installed,
and the operators' implementations here."""


def doctor(
    everything: Annotated[bool, typer.Option("--all", help="Also print what packages are for, and operators.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", metavar="FILE.tar.gz", help="Collect this report, versions and records of --run."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN_DIR", help="With --bundle: the run that failed.")
    ] = None,
) -> None:
    """Report the devices of this machine and missing packages; with --all, also its operators.

    --bundle writes an archive for a bug report: spec, logs, events and metrics of a run, versions, settings of the
    environment. Values that look like secrets are replaced; weights, data and generated text are left out.

    Example: megalaunch doctor --bundle report.tar.gz --run runs/quickstart
    """
    from megalaunch.platform.detect import detect_machine
    from megalaunch.platform.packages import OPTIONAL, PACKAGES, inspect_packages, installed_version

    _check_bundle(bundle, run)
    machine = detect_machine()
    useful = [package for package in OPTIONAL if machine.devices or not package.only_gpu]
    optional = {package: installed_version(package.name) for package in useful}
    probed = (package for package, version in optional.items() if package.probe and version is not None)
    report = build_report(machine, inspect_packages((*PACKAGES, *probed)), optional)
    if bundle is not None:
        _write_bundle(bundle, report, run)
    elif as_json:
        import json

        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(report_text(report, everything))


def _check_bundle(target: Path | None, run: Path | None) -> None:
    """Refuse a wrong use of --bundle and --run, before the machine is inspected."""
    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.errors import fail

    if run is not None and target is None:
        fail("--run is for --bundle: megalaunch doctor --bundle FILE.tar.gz --run RUN_DIR")
    if run is not None and not RunDirectory(run).spec.is_file():
        fail(f"{run} is not a run directory: it has no spec.yaml. `megalaunch runs list` prints the runs.")
    if target is not None and target.exists():
        fail(f"{target} exists: give another name to --bundle")
    if target is not None and not target.parent.is_dir():
        fail(f"{target.parent} is no directory: give another name to --bundle")


def _write_bundle(target: Path, report: dict[str, Any], run: Path | None) -> None:
    """Write the archive of a bug report and print what is in it."""
    import os

    from megalaunch.rundir.paths import RunDirectory
    from megalaunch.runs.bundle.archive import write_bundle
    from megalaunch.runs.errors import fail

    try:
        names = write_bundle(target, report, RunDirectory(run) if run is not None else None, os.environ)
    except OSError as error:
        fail(f"{target} cannot be written ({error.strerror}): give another name to --bundle")
    typer.echo("\n".join([f"{target}: {len(names)} files", *(f"  {name}" for name in names)]))
    typer.echo("Secrets were replaced where their form or name shows them; read the files before you send them.")


def build_report(
    machine: Machine, packages: list[PackageState], optional: Mapping[Package, str | None] | None = None
) -> dict[str, Any]:
    """Return the report as plain data; sizes in bytes, peaks in FLOP/s.

    Args:
        optional: versions of the optional packages; None for a package that is not installed.
    """
    import platform
    import shutil

    from megalaunch.plan.attention_backends import serving_backends
    from megalaunch.plan.attention_choice import describe_auto
    from megalaunch.platform.packages import missing_attention_package
    from megalaunch.version import __version__

    chip = machine.chip
    operators, plugin_problems = _implementations(chip.device)
    lacking = {name: missing_attention_package(name) for name in serving_backends(chip.device)}
    return {
        "megalaunch": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": {
            "chip": chip.name,
            "devices": machine.devices,
            "device_memory_bytes": chip.memory_bytes,
            "peak_flops": dict(chip.peak_flops),
            "native_bf16": chip.native_bf16,
            "cores": machine.cores,
            "memory_bytes": machine.memory_bytes,
            "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
            "notes": list(machine.notes),
        },
        "platforms": list(_platforms(machine)),
        "packages": [
            {"name": state.package.name, "version": state.version, "purpose": state.package.purpose}
            for state in packages
        ],
        "optional": [
            {"name": package.name, "version": version, "purpose": package.purpose, "install": package.install_command}
            for package, version in (optional or {}).items()
        ],
        "operators": operators,
        "attention_backends": [name for name, package in lacking.items() if package is None],
        "attention_auto": describe_auto(chip.device),
        "attention_missing": {name: package.install_command for name, package in lacking.items() if package},
        "problems": _merged(
            [
                *_platform_problem(machine),
                *plugin_problems,
                *_package_problems(packages),
                *_device_problems(machine, packages),
            ]
        ),
    }


def _platforms(machine: Machine) -> Iterator[dict[str, str]]:
    """Yield the platforms of this machine with their state, without those whose package is not installed."""
    from megalaunch.platform.overrides import installed_overrides
    from megalaunch.platform.platforms import PLATFORMS
    from megalaunch.platform.plugins import PlatformError, all_platforms
    from megalaunch.platform.selection import missing_devices, missing_package

    try:
        platforms, overrides = all_platforms().values(), installed_overrides()
    except PlatformError:  # a problem of its own
        return
    for facts in platforms:
        if facts.device == machine.chip.device:
            state = f"used: {machine.devices} x {machine.chip.name}" if machine.devices else "used"
        elif missing_package(facts) is not None or (facts.package is None and facts.device in PLATFORMS):
            continue
        else:
            state = missing_devices(facts) if machine.chip.device == "cpu" else "not used"
        replaced = sum(1 for row in overrides if row.platform == facts.device)
        state += f"; overrides: {replaced}" if replaced else ""
        yield {"platform": facts.device, "implementation": facts.implementation, "state": state}


def _implementations(device: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the operators of a device type, and the problem of a platform or override that cannot be loaded."""
    from megalaunch.platform.operators import implementations
    from megalaunch.platform.overrides import active_overrides
    from megalaunch.platform.platforms import PLATFORMS
    from megalaunch.platform.plugins import PlatformError

    try:
        rows = list(implementations(device))
    except PlatformError as error:
        return [], [{"problem": error.cause, "needed_for": "training", "fix": error.fix}]
    problem = _load_problem(device) if active_overrides(device) or device not in PLATFORMS else None
    shown = [{"operator": row.operator, "implementation": row.implementation} for row in rows]
    return shown, [{**problem, "needed_for": "training"}] if problem else []


def _load_problem(device: str) -> dict[str, str] | None:
    """Import what other packages bring for a device type, in a process of its own; None if that works."""
    import importlib.util
    import json
    import subprocess
    import sys

    from megalaunch.platform.packages import IMPORT_TIMEOUT
    from megalaunch.platform.torch_backends import broken_backend

    if importlib.util.find_spec("torch") is None:  # a problem of its own
        return None
    command = [sys.executable, "-m", "megalaunch.engine.platform.load_plugins", device]
    fix = "repair or uninstall that package"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return {"problem": f"what packages add on {device} is not imported in {IMPORT_TIMEOUT:g} s", "fix": fix}
    if (broken := broken_backend(done.stderr)) is not None:
        return {"problem": broken.cause, "fix": broken.fix}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"problem": f"what packages add on {device} cannot be imported: {last}", "fix": fix}
    found: dict[str, str] | None = json.loads(done.stdout.splitlines()[-1])
    return found


def _merged(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return each problem once, with all that needs its repair: a broken package fails in every import of torch."""
    needs: dict[tuple[str, str], list[str]] = {}
    for row in problems:
        needs.setdefault((row["problem"], row["fix"]), []).append(row["needed_for"])
    return [
        {"problem": problem, "needed_for": "; ".join(dict.fromkeys(needed)), "fix": fix}
        for (problem, fix), needed in needs.items()
    ]


def _package_problems(packages: list[PackageState]) -> list[dict[str, str]]:
    problems = []
    for state in packages:
        if state.problem is None:
            continue
        package = state.package
        if state.cause is not None:
            problems.append({"problem": state.cause.cause, "needed_for": package.purpose, "fix": state.cause.fix})
            continue
        target = f"megalaunch[{package.extra}]" if package.extra else "megalaunch"
        again = f"pip install --upgrade --force-reinstall {package.name} {shlex.quote(target)}"
        problems.append(
            {
                "problem": f"{package.name} {state.problem}",
                "needed_for": package.purpose,
                "fix": install_command(target) if state.version is None else again,
            }
        )
    return problems


def _platform_problem(machine: Machine) -> list[dict[str, str]]:
    """Return the problem of the platform that the environment asks for, or of another package's platform."""
    from megalaunch.platform.plugins import PlatformError, plugins

    if machine.problem is None:
        return []
    try:
        plugins()
    except PlatformError as error:
        fix, needed = error.fix, "every command that looks for devices"
    else:
        fix, needed = "install it, or unset it", "training on that platform"
    return [{"problem": machine.problem, "needed_for": needed, "fix": fix}]


def _device_problems(machine: Machine, packages: list[PackageState]) -> list[dict[str, str]]:
    """Return a problem if the installed torch does not find the devices of this machine."""
    torch = next((state for state in packages if state.package.name == "torch"), None)
    if torch is None or torch.problem is not None or machine.devices == 0:
        return []
    found, with_package = _devices_of_torch(machine, torch)
    if found == str(machine.devices):
        return []
    return [
        {
            "problem": f"torch {torch.version}{with_package} sees {found or 'no'} of {machine.devices} "
            f"{machine.chip.name}",
            "needed_for": "training on them",
            "fix": _device_fix(torch.version or "", with_package),
        }
    ]


def _devices_of_torch(machine: Machine, torch: PackageState) -> tuple[str, str]:
    """Return how many devices torch finds ("": it cannot say), and " with PACKAGE" if one adds them."""
    from megalaunch.platform.plugins import find_platform
    from megalaunch.platform.selection import count_devices_of_torch

    facts = find_platform(machine.chip.device)
    if facts is None or facts.package is None:
        return torch.output, ""  # the check of torch counted them
    count = count_devices_of_torch(facts.package, facts.device)
    return "" if count is None else str(count), f" with {facts.package}"


def _device_fix(version: str, with_package: str) -> str:
    from megalaunch.platform.packages import torch_build_fix

    if with_package:
        return f"install the {with_package.removeprefix(' with ')} that was built for torch {version} and the driver"
    return torch_build_fix(version)


def report_text(report: dict[str, Any], everything: bool = False) -> str:
    """Format the report as aligned lines: one screen, unless everything is wanted."""
    lines = [f"megalaunch {report['megalaunch']}, Python {report['python']}, {report['system']}"]
    lines += ["", "machine", *_machine(report["machine"])]
    lines += ["", "platforms"]
    lines += table_lines([(row["platform"], row["implementation"], row["state"]) for row in report["platforms"]])
    lines += ["", "packages"]
    lines += table_lines([(entry["name"], entry["version"] or "-", entry["purpose"]) for entry in report["packages"]])
    if report["optional"]:
        lines += ["", "optional packages"]
        lines += _optional_rows(report["optional"]) if everything else _optional_versions(report["optional"])
    if everything:
        lines += ["", "operators and their implementations here", *table_lines(_operators(report["operators"]))]
        lines += table_lines(
            [
                ("model.attention_backend", " | ".join(report["attention_backends"])),
                ("  auto", report["attention_auto"]),
                *((f"  {name}", f"not installed: {fix}") for name, fix in report["attention_missing"].items()),
            ]
        )
    lines += ["", "missing" if report["problems"] else _has_all_packages(report["optional"])]
    for problem in report["problems"]:
        lines += [f"  {problem['problem']} (for: {problem['needed_for']})", f"    fix: {problem['fix']}"]
    return "\n".join(lines if everything else [*lines, "", _WHERE_THE_REST_IS])


def _machine(machine: dict[str, Any]) -> list[str]:
    return table_lines(
        [
            ("chip", _chip_text(machine)),
            ("cores", str(machine["cores"])),
            ("memory", format_memory(machine["memory_bytes"])),
            ("disk", f"{format_memory(machine['free_disk_bytes'])} free in this folder"),
            *(("note", note) for note in machine["notes"]),
        ]
    )


def _operators(rows: list[dict[str, str]]) -> list[tuple[str, ...]]:
    return [(row["operator"], row["implementation"]) for row in rows]


def _optional_versions(rows: list[dict[str, Any]]) -> list[str]:
    """Return the optional packages as running text; those that are not installed are named at the end of the report."""
    joined = ", ".join(f"{row['name']}\0{row['version']}" for row in rows if row["version"])  # kept on one line
    lines = textwrap.wrap(joined or "none", _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _optional_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of the optional packages with what they are for and how they are installed."""
    shown = [(row["name"], row["version"] or "not installed", row["purpose"], "" if row["version"] else row["install"])
             for row in rows]  # fmt: skip
    return table_lines(shown)


def _has_all_packages(optional: list[dict[str, Any]]) -> str:
    absent = [row["name"] for row in optional if row["version"] is None]
    if not absent:
        return "nothing is missing"
    text = f"nothing required for training is missing; optional and not installed: {', '.join(absent)}"
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _chip_text(machine: dict[str, Any]) -> str:
    if machine["devices"] == 0:
        unit = machine["native_bf16"]
        return "cpu; " + (f"bf16 by {unit}" if unit else "no bf16 matrix unit: auto computes in fp32")
    memory = machine["device_memory_bytes"]
    dtype = "bf16" if machine["native_bf16"] else "fp16"
    peak = machine["peak_flops"].get(dtype)
    parts = [f"{machine['devices']} x {machine['chip']}"]
    parts += [f"{format_memory(memory)} each"] if memory else []
    parts += [f"{peak / 1e12:g} TFLOP/s in {dtype}"] if peak else []
    return ", ".join(parts)
