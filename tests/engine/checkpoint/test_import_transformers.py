"""transformers imports packages that warn of what does not concern a conversion; their errors stay."""

from __future__ import annotations

import logging

import pytest

from megalaunch.engine.checkpoint.import_transformers import import_transformers

pytest.importorskip("transformers", reason="transformers (the extra `parity`) is not installed")


@pytest.mark.parametrize("name", ["torchao", "torch.utils._pytree"])
def test_warnings_of_what_it_imports_are_not_printed(name: str, caplog: pytest.LogCaptureFixture):
    before = logging.getLogger(name).level
    try:
        assert import_transformers().__name__ == "transformers"
        logging.getLogger(name).warning("Failed to load _C_cutlass_90a.abi3.so")
        logging.getLogger(name).error("an error")
    finally:
        logging.getLogger(name).setLevel(before)
    assert [record.message for record in caplog.records if record.name == name] == ["an error"]
