"""The overrides of a run are part of its spec, and a resume with others says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from installed_package import forget_package, install_package
from made_specs import resolved

from megalaunch.engine.train.checkpointer import changed_overrides
from megalaunch.launch.display.event_messages import event_message
from megalaunch.plan import overrides as plan_overrides
from megalaunch.plan.overrides import override_changes
from megalaunch.plan.resume_compatibility import compatible_changes, incompatible_changes
from megalaunch.platform.overrides import installed_overrides
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.spec_file import read_spec

NORM, SWIGLU = "kernels.rms_norm.rms_norm", "kernels.swiglu.swiglu"
PLUGIN = f"""
from megalaunch.platform.overrides import Override
BOTH = (Override("{SWIGLU}", "vendor.kernels:swiglu", "cpu"), Override("{NORM}", "vendor.kernels:rms_norm", "cpu"))
NORM = BOTH[1:]
"""
KERNELS = """
from megalaunch.kernels.rms_norm import rms_norm_reference as rms_norm

def swiglu(gate, up, *, overwrite_up=False):
    return gate * gate.sigmoid() * up
"""
FILES = {"vendor/plugin.py": PLUGIN, "vendor/kernels.py": KERNELS}
RECORDED = (f"{NORM}=vendor.kernels:rms_norm (vendor 1.0)", f"{SWIGLU}=vendor.kernels:swiglu (vendor 1.0)")
WITHOUT_SWIGLU = f"{SWIGLU} by megalaunch in place of vendor.kernels:swiglu (vendor 1.0)"


def test_a_resolved_spec_has_the_overrides_of_its_platform(tmp_path, monkeypatch):
    install_package(tmp_path, FILES, {"megalaunch.overrides": {"vendor": "vendor.plugin:BOTH"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    forget_package()
    installed_overrides.cache_clear()
    try:
        assert resolved("recipe=tiny", "platform=cpu")[0].platform.overrides == RECORDED
        typed, _ = resolved("recipe=tiny", "platform=h100", f"platform.overrides=['{NORM}=mine:norm']")
        assert typed.platform.overrides == ()
    finally:
        monkeypatch.undo()
        forget_package()
        installed_overrides.cache_clear()


def test_changes_are_named_by_target():
    assert override_changes(RECORDED, RECORDED) == []
    assert override_changes(RECORDED[:1], RECORDED) == [WITHOUT_SWIGLU]
    newer = f"{NORM}=vendor.kernels:rms_norm (vendor 1.1)"
    assert override_changes([newer], RECORDED[:1]) == [
        f"{NORM} by vendor.kernels:rms_norm (vendor 1.1) in place of vendor.kernels:rms_norm (vendor 1.0)"
    ]


def test_a_rerun_with_other_overrides_is_warned_of_and_not_refused():
    spec, _ = resolved("recipe=tiny", "platform=cpu")
    stored = replace(spec, platform=replace(spec.platform, overrides=RECORDED[1:]))
    (warning,) = plan_overrides.changed_overrides(spec, stored)
    assert (warning.severity, warning.path) == ("warning", "platform.overrides")
    assert warning.message == (
        f"since the last start: {WITHOUT_SWIGLU}. Install the packages of before, unless this is intended"
    )
    assert incompatible_changes(spec, stored) == compatible_changes(spec, stored) == []
    assert plan_overrides.changed_overrides(spec, spec) == []


def test_a_checkpoint_says_with_which_overrides_it_was_saved(tmp_path):
    spec, _ = resolved("recipe=tiny", "platform=cpu")
    assert changed_overrides(tmp_path, spec) == []  # of an older version
    (tmp_path / "overrides.json").write_text(json.dumps(RECORDED[1:]))
    assert changed_overrides(tmp_path, spec) == [WITHOUT_SWIGLU]
    assert event_message({"event": "overrides_changed", "step": 4, "changes": [WITHOUT_SWIGLU]}) == (
        f"warning: overrides have changed since the checkpoint of step 4: {WITHOUT_SWIGLU}"
    )


@pytest.mark.slow
def test_a_run_records_its_overrides_and_a_resume_reports_others(tmp_path):
    def train(steps: int, entry: str) -> str:
        install_package(tmp_path / "site", FILES, {"megalaunch.overrides": {"vendor": entry}})
        words = ("recipe=tiny", "platform=cpu", "parallel=dp1", "data.mock=true", "run.directory=run")
        done = subprocess.run(
            [sys.executable, "-m", "megalaunch", "train", *words, "train.steps=8", f"train.exit_at_step={steps}"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return " ".join(done.stdout.split())

    run = RunDirectory(tmp_path / "run")
    train(2, "vendor.plugin:BOTH")
    assert read_spec(run.spec).platform.overrides == RECORDED
    said = train(4, "vendor.plugin:NORM")
    assert f"warning: platform.overrides [platform.overrides] since the last start: {WITHOUT_SWIGLU}" in said
    assert f"warning: overrides have changed since the checkpoint of step 2: {WITHOUT_SWIGLU}" in said
    assert "overrides have changed" not in train(6, "vendor.plugin:NORM")
    events = [line for line in read_lines(run.events) if line["event"] == "overrides_changed"]
    assert [(line["step"], line["changes"]) for line in events] == [(2, [WITHOUT_SWIGLU])]
