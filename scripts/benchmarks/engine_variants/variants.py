"""Every variant as a function that runs one whole optimizer step and returns its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from engine_variants.plain import PlainDecoder, with_dtensor_styles, with_fsdp2
from engine_variants.regions import region
from engine_variants.shape import (
    CLIP,
    EPSILON,
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    LAYERS,
    THETA,
    VOCABULARY,
    Work,
    adamw,
    weights,
)
from megalaunch.data.samples.sample import Sample
from megalaunch.engine.mesh import make_mesh
from megalaunch.engine.optimizer.optimizer import Optimizer
from megalaunch.engine.parallel.parallelize import build_sharded_model
from megalaunch.engine.train.dataloader import MicroBatch, StepBatch
from megalaunch.engine.train.forward_backward import make_forward_backward
from megalaunch.engine.train.train_step import TrainStep
from megalaunch.engine.worker_setup import tune_malloc
from megalaunch.plan.topology import Topology

OneStep = Callable[[], float]


class _Unread:
    """No one asks where a sample came from while all numbers are finite."""

    def __getitem__(self, index: int) -> Sample:
        raise IndexError(index)

    def describe(self, index: int) -> str:
        """By its number."""
        return f"sample {index}"


def ours(work: Work, **parallel: object) -> OneStep:
    """The engine's own step, with everything that training does in it: counting, agreement, clipping, update."""
    tune_malloc()  # as a worker does
    spec = work.spec(**parallel)
    mesh = make_mesh(Topology.from_spec(spec), torch.device("cpu"), dist.get_rank())
    model = build_sharded_model(spec, mesh)
    optimizer = Optimizer(model, spec.optimizer, spec.precision)
    step = TrainStep(spec, mesh, model, make_forward_backward(spec, mesh, model), optimizer, _Unread())
    inputs, labels = work.batch(mesh.dp_rank)
    batch = StepBatch((range(work.samples),), (MicroBatch(inputs, labels),), labels.numel())
    done = 0

    def one() -> float:
        nonlocal done
        done += 1
        return step.run(done, replace(batch)).loss

    return one


def hugging_face(work: Work) -> OneStep:
    """transformers' Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=work.tokens,
        rms_norm_eps=EPSILON,
        rope_theta=THETA,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    places = {"embedding.": "model.embed_tokens.", "norm.": "model.norm.", "head.": "lm_head."}
    parts = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attention.": "self_attn."}
    renamed = {}
    for name, value in weights():
        for old, new in (places if not name.startswith("layers.") else {"layers.": "model.layers."} | parts).items():
            name = name.replace(old, new, 1)
        renamed[name] = value
    model.load_state_dict(renamed)
    return _plain_step(model, lambda tokens: model(input_ids=tokens, use_cache=False).logits, work)


def litgpt(work: Work) -> OneStep:
    """litgpt's GPT, in its Llama form."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        name="bench",
        block_size=work.tokens,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_head=HEADS,
        n_query_groups=GROUPS,
        n_embd=HIDDEN,
        intermediate_size=FFN,
        rotary_percentage=1.0,
        rope_base=int(THETA),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=EPSILON,
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    theirs, mine = model.state_dict(), dict(weights())
    ends = {"transformer.wte.weight": "embedding.weight", "transformer.ln_f.weight": "norm.weight"}
    for name, value in theirs.items():
        layer = "layers." + name.split(".")[2] + "." if name.startswith("transformer.h.") else ""
        part = name.removeprefix(f"transformer.h.{layer[7:]}").removesuffix(".weight")
        if part == "attn.qkv":
            value.copy_(torch.cat([mine[f"{layer}attention.{p}_proj.weight"] for p in "qkv"]))
        else:
            value.copy_(mine[ends.get(name) or ("head.weight" if not layer else layer + _LITGPT[part] + ".weight")])
    return _plain_step(model, model, work)


_LITGPT = {
    "norm_1": "attention_norm",
    "norm_2": "mlp_norm",
    "attn.proj": "attention.o_proj",
    "mlp.fc_1": "mlp.gate_proj",
    "mlp.fc_2": "mlp.up_proj",
    "mlp.proj": "mlp.down_proj",
}


def dtensor_styles(work: Work) -> OneStep:
    """tp2 with sequence parallelism by torch's DTensor styles, with its divided loss."""
    model = with_dtensor_styles(PlainDecoder(), init_device_mesh("cpu", (dist.get_world_size(),)))
    return _plain_step(model, model, work)


def fsdp2(work: Work) -> OneStep:
    """dp2 by plain FSDP2; every rank has its own samples."""
    model = with_fsdp2(PlainDecoder(), init_device_mesh("cpu", (dist.get_world_size(),)), work.dtype)
    one = _plain_step(model, model, replace(work, precision="fp32"), share=dist.get_rank())

    def averaged() -> float:
        loss = torch.tensor(one())
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    return averaged


def _plain_step(model: nn.Module, logits_of: Callable[[Tensor], Tensor], work: Work, share: int = 0) -> OneStep:
    """The usual loop: autocast for bf16 over fp32 weights, cross-entropy in fp32, clipping, fused AdamW."""
    optimizer = adamw(model)
    inputs, labels = work.batch(share)

    def one() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=work.precision == "bf16"):
            logits = logits_of(inputs)
        if isinstance(logits, DTensor):
            with loss_parallel():
                loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
                loss.backward()
        else:
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if isinstance(norm, DTensor):
            norm.full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item() if not isinstance(loss, DTensor) else loss.full_tensor().item()

    return one


VARIANTS: dict[str, Callable[[Work], OneStep]] = {
    "ours": ours,
    "transformers": hugging_face,
    "litgpt": litgpt,
    "ours tp2": lambda work: ours(work, tp=2, sequence_parallel=True),
    "ours tp2, tp_comm_overlap": lambda work: ours(work, tp=2, sequence_parallel=True, tp_comm_overlap=True),
    "DTensor styles tp2": dtensor_styles,
    "ours dp2": lambda work: ours(work, dp=2, data_sharding="optim_grads_params"),
    "ours dp2, no overlap": lambda work: ours(
        work, dp=2, data_sharding="optim_grads_params", overlap_param_gather=False, overlap_grad_reduce=False
    ),
    "FSDP2 dp2": fsdp2,
    "ours ep2": lambda work: ours(replace(work, samples=work.samples // 2), dp=2, ep=2),
    "beside the matmuls": region,
    "waited for": lambda work: region(work, waits=True),
    "in rings": lambda work: region(work, rings=True),
}
