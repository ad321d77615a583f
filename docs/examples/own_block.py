"""A transformer block of one's own, which trains under every layout.

    torchrun --nproc-per-node 4 own_block.py recipe=tiny parallel=tp2pp2 train.steps=5

The block scales what it adds to the residual stream by a learned gain (LayerScale, Touvron et al. 2021), and its
feed-forward part has a learned scale for each feature. Nothing here says how many ranks there are: each parameter
declares its layout, and the region communicates.
"""

import sys

import torch
from torch import Tensor

import megalaunch as ml
from megalaunch import nn


class ScaledMLP(torch.nn.Module):
    """down(scale * relu(up(x))^2), with the features F sharded over tensor-parallel ranks."""

    scale_layout = nn.COLUMN_PARALLEL  # a value for each feature: sharded as the outputs of `up` are
    scale_init = nn.ParamInit(mean=1.0, std=0.02)

    def __init__(self, config: nn.DecoderConfig, layer: nn.LayerConfig, tp_region: nn.TPRegion) -> None:
        super().__init__()
        self.tp_region, width = tp_region, config.mlp.width
        self.save_policy: nn.SavePolicy = nn.save_activations
        self.up = nn.Linear(config.hidden_size, width, nn.COLUMN_PARALLEL)
        self.scale = torch.nn.Parameter(torch.empty(width))
        self.down = nn.Linear(width, config.hidden_size, nn.ROW_PARALLEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.save_policy(self.transform, x)

    def transform(self, x: Tensor) -> Tensor:
        (up,) = self.tp_region.column_parallel_linear(x, self.up)
        scale = self.tp_region.local_param(self.scale, self.scale_layout)
        return self.tp_region.row_parallel_linear(scale * up.relu().square(), self.down)


class GainBlock(nn.TransformerBlock):
    """x + gain * attention(norm(x)), then the same with the feed-forward part."""

    attention_gain_layout = mlp_gain_layout = nn.REPLICATED
    attention_gain_init = mlp_gain_init = nn.ParamInit(mean=0.1)

    def __init__(self, config: nn.DecoderConfig, layer: nn.LayerConfig, tp_region: nn.TPRegion) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm, self.mlp_norm = nn.Norm(width, config.norm), nn.Norm(width, config.norm)
        self.attention = nn.Attention(width, config.attention, config.norm, tp_region)
        self.mlp = ScaledMLP(config, layer, tp_region)
        self.attention_gain = torch.nn.Parameter(torch.empty(width))
        self.mlp_gain = torch.nn.Parameter(torch.empty(width))

    def transform(
        self,
        x_BSH: Tensor,
        rotation: nn.RopeCache | None,
        attend: nn.AttentionFn,
        layer_cache: object,
        dropout_masks: nn.LayerDropoutMasks,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(x_BSH), rotation, attend, None, dropout_masks.attention_seeds)
        x_BSH = x_BSH + nn.local_param(self.attention_gain) * attended
        fed: Tensor = self.mlp(self.mlp_norm(x_BSH))
        return x_BSH + nn.local_param(self.mlp_gain) * fed


MODULES = nn.LayerModules(block=GainBlock)


def main() -> None:
    """Train a few steps."""
    spec = ml.prepare_data(ml.compose(sys.argv[1:]))
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh, MODULES)
        passes = ml.make_forward_backward(spec, mesh, model)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        dataset = ml.build_train_dataset(spec)
        loader = ml.make_data_loader(spec, mesh, dataset)
        step = ml.TrainStep(spec, mesh, model, passes, optimizer, dataset)
        for number in range(1, spec.train.steps + 1):
            result = step.run(number, loader.get(number, last=spec.train.steps))
            if mesh.rank == 0:
                print(f"step {number:3}  loss {result.loss:.4f}  gradient norm {result.grad_norm:.3f}", flush=True)
        loader.close()


if __name__ == "__main__":
    main()
