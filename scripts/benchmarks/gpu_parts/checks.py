"""The quickstart as a user types it, and the tests that are marked gpu: each is a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from gpu_parts.setting import ROOT, Setting

_SECONDS = 240
_TEST_PROCESSES = 8
_MEGALAUNCH = "from megalaunch.cli.main import main; main()"


def quickstart(setting: Setting) -> dict[str, Any]:
    """Train the quickstart; return its losses and speed."""
    steps = ["train.steps=4", "data.validation_tokens=512", "train.sample_prompt=null"] if setting.small else []
    platform = "auto" if setting.device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _MEGALAUNCH, "train", "recipe=quickstart", f"platform={platform}"]
        command += ["cluster.devices_per_node=1", *steps, f"run.directory={folder}/bench"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
        directory = Path(folder) / "bench"
        if done.returncode != 0:
            raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        outcome = json.loads((directory / "outcome.json").read_text())
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {"outcome": outcome, "last": [row for row in rows if "loss" in row][-1]}


def gpu_tests(setting: Setting) -> dict[str, Any]:
    """Run the tests marked gpu; in the small mode only collect them. Return counts, and the failures' messages."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        if setting.device != "cuda":
            command.append("--collect-only")
        elif importlib.util.find_spec("xdist") is not None:  # most of their time is compiling
            command += ["-n", str(min(_TEST_PROCESSES, max(2, (os.cpu_count() or 2) // 2)))]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        marked = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8")]
        done = subprocess.run(
            [*command, *sorted(marked)], cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
        if not report.is_file() or setting.device != "cuda":
            collected = [line for line in done.stdout.splitlines() if "::" in line]
            if done.returncode != 0 or not collected:
                raise RuntimeError((done.stdout + done.stderr)[-1500:])
            return {"collected": len(collected)}
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failures": {case.attrib["name"]: _message(case) for case in failed},
    }


def _message(case: ElementTree.Element) -> str:
    problem = case.find("failure") if case.find("failure") is not None else case.find("error")
    return "" if problem is None else (problem.text or problem.attrib.get("message", ""))[-1500:]


CHECKS = {"quickstart": quickstart, "gpu tests": gpu_tests}
