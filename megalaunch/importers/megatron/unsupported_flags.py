"""Megatron flags that set no key, as data: why each can be dropped, or what is lost without it.

A name that ends in * matches all flags with that prefix.
"""

from __future__ import annotations

DROPPED: dict[str, str] = {
    "Megatron itself ignores it": """
        use-flash-attn onnx-safe use-mcore-models rampup-batch-size use-dist-ckpt dist-ckpt-format enable-gpt-oss
        ckpt-fully-parallel-save biencoder-* ict-* retriever-* dino-* swin-* bert-load titles-data-path indexer-*
        query-in-block-prob use-one-sent-docs evidence-data-path block-data-path embedding-path num-classes
        img-h img-w
        num-channels patch-dim classes-fraction data-per-class-fraction head-lr-mult vision-* mask-type mask-factor
        data-impl standalone-embedding-stage no-async-tensor-model-parallel-allreduce no-query-key-layer-scaling
        dump-param-to-param-group-map activation-func-fp8-input-store iter-per-epoch moe-token-dropping
        create-all-gather-group disable-msc checkpoint-activations
    """,
    "an old spelling that Megatron refuses by now": "batch-size warmup model-parallel-size",
    "which kernels run is chosen here by what the device has, and listed by megalaunch doctor": """
        transformer-impl attention-backend flash-attention-version no-masked-softmax-fusion no-bias-gelu-fusion
        no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm memory-efficient-layer-norm
        no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl moe-grouped-gemm
        moe-permute-fusion moe-router-fusion use-transformer-engine-op-fuser moe-use-legacy-grouped-gemm
        moe-use-grouped-tensor moe-single-grouped-* use-grouped-gemm-* disable-jit-fuser
        attention-softmax-in-fp32 apply-query-key-layer-scaling export-* fused-* use-fused-* mla-down-proj-fusion
        use-te-* disable-bf16-reduced-precision-matmul moe-shared-expert-glu-interleave-size
        moe-mlp-glu-interleave-size moe-router-padding-for-* batch-invariant-* flash-decode
        disable-parameter-transpose-cache
        keep-fp8-transpose-cache use-kitchen* kitchen-* spec te-precision-config-file
    """,
    "the same function; only how norm weights are stored differs (minus 1)": "apply-layernorm-1p",
    "the layers have no position matrix to leave out: the kind of positions is one key": "no-position-embedding",
    "softmax and loss are computed in fp32 here": "fp16-lm-cross-entropy output-logit-dtype",
    "the loss is divided by all valid tokens of the step here, always": "calculate-per-token-loss",
    "the vocabulary is the tokenizer's own here: no row is added": """
        make-vocab-size-divisible-by vocab-extra-ids no-pad-vocab-size disable-pad-vocab-size
    """,
    "checkpoints lie in the run directory (run.directory), and the same command continues a run": """
        save load exit-on-missing-checkpoint override-opt_param-scheduler override-opt-param-scheduler
        use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler use-checkpoint-args
        use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args auto-detect-ckpt-format
    """,
    "there is one checkpoint format, which loads under every layout": """
        ckpt-format ckpt-* dist-ckpt-* distrib-optim-* no-ckpt-* async-strategy use-persistent-ckpt-worker
        async-ckpt-*
        fully-parallel-* no-strict-fsdp-dtensor-load verify-integrity no-save-tokenizer-assets
    """,
    "a checkpoint is always whole": "no-save-optim no-save-rng",
    "nothing is sent to a tracker; loss, gradient norm, rate and speed of each step are in the run's metrics.jsonl": """
        tensorboard-* wandb-* one-logger-* no-one-logger enable-one-logger otel-* app-tag-*
        log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
        log-world-size-to-tensorboard log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard
        no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard
    """,
    "megalaunch writes its own metrics (metrics.jsonl, events.jsonl)": """
        log-* no-log-* disable-log-* timing-log-* logging-level
        barrier-with-* no-barrier-* moe-per-layer-logging moe-routing-trace-* config-logger-dir metadata-path
        straggler-* disable-straggler-* run-workload-inspector-server
    """,
    "profiling is asked for by other means here": """
        profile profile-* use-pytorch-profiler pytorch-profiler-* record-* memory-snapshot-path nvtx-ranges
    """,
    "about NCCL, buckets and streams: speed only": """
        ddp-* no-align-param-gather disable-align-* no-align-* align-* use-nccl-ub disable-symmetric-registration
        nccl-* use-sharp sharp-* high-priority-* fsdp-* suggested-communication-unit-size gtp-* tp-comm-*
        defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute overlap-dispatch-* ep-overlap-*
        overlap-p2p-* overlap-param-gather-with-optimizer-step no-gradient-reduce-div-fusion moe-deepep-*
        moe-hybridep-*
        moe-permute-fusion-into-hybridep moe-flex-dispatcher-* moe-ncclep-* moe-enable-deepep
        moe-shared-expert-overlap distributed-backend
        disable-gloo-process-groups torch-fsdp2-* megatron-fsdp-* no-use-layer-wise-param-layout
        init-model-with-meta-device
        pipeline-model-parallel-comm-backend batch-p2p-* use-ring-exchange-p2p enable-gloo-process-groups
        use-precision-aware-optimizer overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload no-pin-cpu-*
        reuse-grad-buf-for-mxfp8-param-ag main-params-dtype clone-scatter-* no-clone-* moe-dispatch-* moe-combine-*
    """,
    "about memory and garbage collection while it runs": """
        manual-gc manual-gc-* no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level
    """,
    "data is read by memory maps and prefetched here": """
        num-workers no-mmap-bin-files no-create-attention-mask-in-dataloader dataloader-type dataloader-*
        num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus allow-ambiguous-pad-tokens
        per-dataset-sequences-path enable-msc no-data-sharding train-sync-interval
    """,
    "a tokenizer is one tokenizer.json here (tokenizer.path)": """
        tokenizer-type tokenizer-metadata tokenizer-special-tokens tokenizer-hf-* tokenizer-sentencepiece-* tiktoken-*
        vocab-file merge-file null-tokenizer-* special-tokens chat-template use-gigatoken sft-tokenizer-prompt-format
    """,
    "no code of a tokenizer's or model's repository is run": "trust-remote-code",
    "validation reads the whole validation data": """
        eval-iters full-validation eval-global-batch-size eval-micro-batch-size
    """,
    "the launcher starts, watches and restarts workers": """
        local-rank lazy-mpu-init inprocess-* enable-ft-package calc-ft-timeouts ft-*
        distributed-timeout-seconds-after-init
        adlr-* exit-signal exit-signal-handler exit-signal-handler-for-* rerun-* error-injection-* fault-*
        flight-recorder-*
        no-flight-recorder-* result-rejected-tracker-filename non-persistent-* replication replication-*
        check-weight-hash-* gpu-sniff-test-interval
    """,
    "a loss or gradient that is not finite always stops a run": """
        no-check-for-nan-in-loss-and-grad check-for-nan-in-loss check-for-large-grads check-for-spiky-loss
    """,
    "weights are a function of the seed and their name, under every layout": """
        use-cpu-initialization no-initialization data-parallel-random-init te-rng-tracker inference-rng-tracker
    """,
    "about another kind of model or use than training a decoder": """
        inference-* no-inference-* max-tokens-to-oom output-bert-embeddings bert-* rl-* no-rl-* grpo-*
        langrl-* perform-rl-step
        refit-method mamba-* hybrid-* gdp-* linear-* no-linear-* enable-chunked-prefill num-speculative-tokens
        decode-only-cuda-graphs use-same-sampling-seed-across-dp-ranks use-legacy-static-engine symmetric-ar-type
        encoder-* decoder-seq-length decoder-num-layers mask-prob short-seq-prob sample-rate cache-mla-latents
        return-log-probs skip-prompt-log-probs use-flashinfer-* disable-mamba-* relative-attention-*
        yarn-correction-* no-yarn-correction-* mlp-chunks-* is-hybrid-model
    """,
    "CUDA graphs are no setting here": """
        cuda-graph-* enable-cuda-graph external-cuda-graph optimizer-cuda-graph no-cuda-graph-*
    """,
    "about the saved form of 8-bit scales": """
        fp8-margin fp8-interval tp-only-amax-red no-fp8-wgrad
    """,
    "experimental features are named one by one": "enable-experimental deterministic-mode test-mode",
    "the weight decay is decoupled, as in AdamW": "decoupled-weight-decay",
    "activations between stages are freed when they were sent": "deallocate-pipeline-outputs variable-seq-lengths",
}

LOST: dict[str, str] = {
    "there is no other norm of queries and keys than by mean square": "qk-l2-norm export-qk-l2-norm qk-clip qk-clip-*",
    "weights are drawn from a normal distribution here": "init-method-xavier-uniform",
    "attention has no output gate here": "attention-output-gate",
    "the halves of a head are rotated, by one position, here": "rotary-interleaved mrope-section",
    "the residual runs around the norm here": "apply-residual-connection-post-layernorm",
    "there is no muP here": "use-mup mup-*",
    "there are no gates on shared experts here": "moe-shared-expert-gate",
    "experts have no latent width here": "moe-latent-size",
    "routing is not limited to devices here": "moe-router-topk-limited-devices",
    "routing follows the router here": """
        moe-router-force-* moe-enable-routing-replay moe-router-quantile-* moe-apply-probs-on-input
        export-moe-apply-probs-on-input
    """,
    "capacity is set by expert here": "moe-expert-rank-capacity-factor moe-paged-stash*",
    "dense checkpoints are not turned into experts here": "moe-use-upcycling moe-upcycling-*",
    "every layer is built alike here": "heterogeneous-layers-* enable-mhc-connections mhc-*",
    "there is no sparse or linear attention here": "experimental-attention-variant dsa-* linear-attention-freq",
    "depths of multi-token prediction are separate here": """
        mtp-use-repeated-layer mtp-detach-heads mtp-hsm mtp-standalone
    """,
    "there is no 4-bit format here": "fp4-*",
    "8-bit attention and heads are not here": """
        fp8-dot-product-attention fp8-multi-head-attention fp8-output-proj fp8-quantizer-factory
    """,
    "the loss scale is dynamic here": "loss-scale",
    "weights are split by tp alone here": """
        tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
    """,
    "pipeline ranks are outermost here": "use-tp-pp-dp-mapping",
    "groups of lengths are not set by hand here": "max-seqlen-per-dp-cp-rank",
    "HSDP shards inside a replica only": "outer-dp-sharding-strategy enable-full-sharding-in-hsdp",
    "saved activations are not divided over tp": "distribute-saved-activations",
    "activations are offloaded by whole layers here": """
        cpu-offloading-* fine-grained-* offload-modules min-offloaded-tensor-size delay-offload-* delta-offload-*
        activation-offload-fraction
    """,
    "the batch always divides among ranks here": "decrease-batch-size-if-needed",
    "the weight decay is constant here": "start-weight-decay end-weight-decay weight-decay-incr-style",
    "norms of queries and keys are not decayed here": "apply-wd-to-qk-layernorm no-weight-decay-cond-type",
    "muon has one form here": "muon-*",
    "the smallest rate is one for all weights here": "decoupled-min-lr",
    "all weights are trained here": "freeze-all-layers",
    "steps are not left out by number here": "iterations-to-skip phase-transition-iterations",
    "a run ends by its steps here": "exit-duration-in-mins",
    "weights come from a converted checkpoint, by another command": """
        finetune pretrained-checkpoint ckpt-step override-ckpt-iteration no-load-optim no-load-rng
        load-main-params-from-ckpt
    """,
    "data from several files of arguments is not read": "data-args-path per-split-data-args-path test-data-path",
    "there is one validation set here": "multiple-validation-sets validation-set-names start-eval-at-iter",
    "this is a training run": "skip-train",
    "fill-in-the-middle cuts whole documents, between the marks of data.fim_tokens": """
        fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token
    """,
    "conversations to tune on are named by data.sft_data here": "sft",
    "teachers' logits are neither saved nor learned from here": "logits-*",
    "another file of settings is not read": "yaml-cfg",
    "weights, gradients and activations are not dumped here": "save-*",
    "no process group is faked here; megalaunch plan predicts memory": "fake-process-group",
}
