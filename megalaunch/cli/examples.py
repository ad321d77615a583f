"""One example for the help page of every command, by its path."""

from __future__ import annotations

from typing import Any

EXAMPLES = {
    "train": "train recipe=quickstart train.steps=200",
    "watch": "watch runs/quickstart",
    "status": "status runs/quickstart",
    "logs": "logs runs/quickstart",
    "stop": "stop runs/quickstart",
    "list": "list runs",
    "runs list": "runs list runs",
    "runs compare": "runs compare runs/first runs/second",
    "runs clean": "runs clean runs",
    "report": "report runs/quickstart",
    "generate": 'generate runs/quickstart --prompt "def " --max-new-tokens 50',
    "serve": "serve runs/quickstart --port 8000",
    "evaluate": "evaluate runs/quickstart --data text/",
    "checkpoint list": "checkpoint list runs/quickstart",
    "checkpoint inspect": "checkpoint inspect runs/quickstart",
    "checkpoint verify": "checkpoint verify runs/quickstart",
    "convert import": "convert import hf://HuggingFaceTB/SmolLM2-135M --output checkpoint",
    "convert export": "convert export runs/quickstart --output hf",
    "convert import-megatron": "convert import-megatron megatron_run --output checkpoint --allow-pickle",
    "convert upcycle": "convert upcycle runs/quickstart --output experts --experts 8",
    "preprocess": "preprocess text.jsonl --output-prefix tokens --tokenizer tokenizer.json --append-eod",
    "data inspect": "data inspect tokens_text_document",
    "data verify": "data verify tokens_text_document",
    "data merge": "data merge first second --output-prefix both",
    "data split": "data split tokens_text_document --output-prefix parts",
    "data cache": "data cache recipe=quickstart",
    "tokenizer train": "tokenizer train text.jsonl --output tokenizer.json --vocab-size 32000",
    "tokenizer inspect": "tokenizer inspect tokenizer.json",
    "validate-config": "validate-config recipe=llama3_8b parallel=tp4pp4",
    "explain": "explain parallel.world",
    "plan": "plan recipe=llama3_8b parallel=tp4pp4",
    "sweep": "sweep recipe=tiny optimizer.lr=1e-3,3e-3",
    "recipes list": "recipes list",
    "recipes show": "recipes show quickstart",
    "recipes diff": "recipes diff quickstart tiny",
    "import-megatron": "import-megatron pretrain_gpt.sh",
    "platform check": "platform check",
    "doctor": "doctor",
}


def add_examples(command: Any, path: str) -> None:
    """Set the example of a command as the last line of its help page; a group shows that of its first command."""
    subcommands = getattr(command, "commands", {})
    for name, subcommand in subcommands.items():
        add_examples(subcommand, f"{path} {name}")
    shown = next(iter(subcommands), None)
    command.epilog = f"Example: megalaunch {EXAMPLES[f'{path} {shown}' if shown else path]}"
