"""TXDA as a platform, through torch_txda."""

from __future__ import annotations

from megalaunch.engine.platform.platform import Platform


class TxdaPlatform(Platform):
    """TXDA. torch does not load torch_txda by itself: `module` imports it."""
