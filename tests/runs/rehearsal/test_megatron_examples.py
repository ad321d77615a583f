"""Megatron-LM's two dense example scripts after `import-megatron`: nothing is refused, and they rehearse.

The arguments are those of examples/gpt3 (175B) and examples/llama (Llama 3 8B), written down without their scripts.
"""

from __future__ import annotations

import pytest
from forked_training import train_forked
from made_specs import resolved
from megatron_scripts import LLAMA3_8B

from megalaunch.runs.import_megatron.importer import import_script
from megalaunch.runs.rehearsal.phases import Rehearsal
from megalaunch.runs.rehearsal.shrink import shrink

GPT3_175B = """
torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py \\
  --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 \\
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \\
  --micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 \\
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction .001 --lr-decay-iters 430000 \\
  --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 \\
  --data-path tokens/gpt3_text_document --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 \\
  --save ckpt --load ckpt --save-interval 10000 --eval-interval 1000 --eval-iters 10 --log-interval 100
"""
SCRIPTS = {"gpt3": GPT3_175B, "llama3": LLAMA3_8B}
RELEASE = pytest.mark.release
TOKENIZER = "tokenizer.path=/none/tokenizer.json"


@pytest.fixture
def recipe(name, tmp_path):
    """The override that selects the recipe of a script."""
    imported = import_script(SCRIPTS[name], name, f"{name}.sh").recipe
    for file, text in {f"{name}.yaml": imported.text, **imported.option_files}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return f"recipe={tmp_path / name}.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param("gpt3", (TOKENIZER, "parallel.tp=2", "parallel.pp=2"), id="gpt3 on four workers", marks=RELEASE),
        pytest.param("gpt3", (TOKENIZER,), id="gpt3", marks=RELEASE),  # on sixteen
        pytest.param("llama3", (), id="llama3"),
    ],
)
def test_they_rehearse(name, recipe, overrides, tmp_path):
    spec, _ = resolved(recipe, *overrides)
    small = shrink(spec).spec
    assert small.model.position_embedding == spec.model.position_embedding
    rehearsal = Rehearsal(small, tmp_path / "rehearsal", train_forked)
    rehearsal.play()
    assert len(rehearsal.passed) == 6
