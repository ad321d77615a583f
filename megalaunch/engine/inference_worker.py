"""Entry point of a torchrun worker of `generate` and `evaluate`: reads spec and job.json, writes answers.jsonl."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megalaunch.engine.worker import main

if TYPE_CHECKING:
    from megalaunch.engine.run_rank import RankEntrypoint


def load_inference_entrypoint() -> RankEntrypoint:
    """Return the entrypoint of an inference rank; imports torch."""
    from megalaunch.engine.inference_rank import answer_job

    return answer_job


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], load_inference_entrypoint))
