"""Megatron flags that set no key, as data, each with the reason: without effect on training, or unsupported.

A name that ends in * matches all flags with that prefix.
"""

from __future__ import annotations

IGNORED: dict[str, str] = {
    "Megatron itself ignores it": """
        use-flash-attn onnx-safe use-mcore-models use-dist-ckpt dist-ckpt-format enable-gpt-oss
        ckpt-fully-parallel-save biencoder-* ict-* retriever-* dino-* swin-* bert-load titles-data-path indexer-*
        query-in-block-prob use-one-sent-docs evidence-data-path block-data-path embedding-path num-classes
        img-h img-w
        num-channels patch-dim classes-fraction data-per-class-fraction head-lr-mult vision-* mask-type mask-factor
        data-impl standalone-embedding-stage no-async-tensor-model-parallel-allreduce no-query-key-layer-scaling
        dump-param-to-param-group-map activation-func-fp8-input-store iter-per-epoch moe-token-dropping
        create-all-gather-group disable-msc checkpoint-activations
    """,
    "an old spelling that Megatron rejects": "batch-size warmup model-parallel-size",
    "kernels are selected by device; megalaunch doctor --all lists them": """
        transformer-impl flash-attention-version no-masked-softmax-fusion
        no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion no-persist-layer-norm memory-efficient-layer-norm
        no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl moe-grouped-gemm
        moe-permute-fusion moe-router-fusion use-transformer-engine-op-fuser moe-use-legacy-grouped-gemm
        moe-use-grouped-tensor moe-single-grouped-* use-grouped-gemm-* disable-jit-fuser
        attention-softmax-in-fp32 apply-query-key-layer-scaling export-* fused-* use-fused-* mla-down-proj-fusion
        use-te-* disable-bf16-reduced-precision-matmul moe-shared-expert-glu-interleave-size
        moe-mlp-glu-interleave-size moe-router-padding-for-* batch-invariant-* flash-decode
        disable-parameter-transpose-cache
        keep-fp8-transpose-cache use-kitchen* kitchen-* te-precision-config-file
    """,
    "precision.exp_avg_dtype, precision.main_params_dtype and their like take effect by themselves": """
        use-precision-aware-optimizer
    """,
    "the same function: only the order of the rows of query and key weights differs": "rotary-interleaved",
    "--position-embedding-type alone selects the position embedding": "no-position-embedding",
    "megalaunch computes softmax and loss in fp32": "fp16-lm-cross-entropy output-logit-dtype",
    "megalaunch always divides the loss by all valid tokens of the step": "calculate-per-token-loss",
    "megalaunch adds no rows to the vocabulary of the tokenizer": """
        make-vocab-size-divisible-by vocab-extra-ids no-pad-vocab-size disable-pad-vocab-size
    """,
    "checkpoints are in the run directory (run.directory); the same command resumes a run": """
        save load exit-on-missing-checkpoint override-opt_param-scheduler override-opt-param-scheduler
        use-checkpoint-opt_param-scheduler use-checkpoint-opt-param-scheduler use-checkpoint-args
        use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args auto-detect-ckpt-format
    """,
    "megalaunch has one checkpoint format, which loads under every layout": """
        ckpt-format ckpt-* dist-ckpt-* distrib-optim-* no-ckpt-* async-strategy use-persistent-ckpt-worker
        async-ckpt-*
        fully-parallel-* no-strict-fsdp-dtensor-load verify-integrity no-save-tokenizer-assets
    """,
    "checkpoints always contain optimizer and RNG state": "no-save-optim no-save-rng",
    "wandb takes WANDB_ENTITY from the environment": "wandb-entity",
    "a tracker gets the figures of every step, under the name of the run (logging.trackers)": """
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
    "profiling is requested at the launch, by logging.profile": """
        profile profile-* use-pytorch-profiler pytorch-profiler-* record-* memory-snapshot-path nvtx-ranges
    """,
    "NCCL, buckets and streams: affects speed only": """
        ddp-* no-align-param-gather disable-align-* no-align-* align-* use-nccl-ub disable-symmetric-registration
        nccl-* use-sharp sharp-* high-priority-* fsdp-* suggested-communication-unit-size gtp-* tp-comm-*
        defer-embedding-wgrad-compute wgrad-deferral-limit delay-wgrad-compute overlap-dispatch-* ep-overlap-*
        overlap-p2p-* overlap-param-gather-with-optimizer-step no-gradient-reduce-div-fusion moe-deepep-*
        moe-hybridep-*
        moe-permute-fusion-into-hybridep moe-flex-dispatcher-* moe-ncclep-*
        moe-shared-expert-overlap distributed-backend
        disable-gloo-process-groups torch-fsdp2-* megatron-fsdp-* no-use-layer-wise-param-layout
        init-model-with-meta-device
        pipeline-model-parallel-comm-backend batch-p2p-* use-ring-exchange-p2p enable-gloo-process-groups
        overlap-cpu-optimizer-d2h-h2d use-torch-optimizer-for-cpu-offload no-pin-cpu-*
        reuse-grad-buf-for-mxfp8-param-ag clone-scatter-* no-clone-* moe-dispatch-* moe-combine-*
    """,
    "the order of ranks affects speed only: pp is always the outermost axis": "use-tp-pp-dp-mapping",
    "memory management and garbage collection: affects speed only": """
        manual-gc manual-gc-* no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level
    """,
    "megalaunch reads data through memory maps and prefetches it": """
        num-workers no-mmap-bin-files no-create-attention-mask-in-dataloader dataloader-type dataloader-*
        num-dataset-builder-threads object-storage-cache-path mid-level-dataset-surplus allow-ambiguous-pad-tokens
        per-dataset-sequences-path enable-msc no-data-sharding train-sync-interval
    """,
    "a tokenizer is one tokenizer.json (tokenizer.path)": """
        tokenizer-type tokenizer-metadata tokenizer-special-tokens tokenizer-hf-* tokenizer-sentencepiece-* tiktoken-*
        vocab-file merge-file null-tokenizer-* special-tokens chat-template use-gigatoken sft-tokenizer-prompt-format
    """,
    "megalaunch runs no code of tokenizer or model repositories": "trust-remote-code",
    "validation always uses the full validation set": """
        eval-iters full-validation eval-global-batch-size eval-micro-batch-size
    """,
    "the launcher starts, monitors and restarts workers": """
        local-rank lazy-mpu-init inprocess-* enable-ft-package calc-ft-timeouts ft-*
        distributed-timeout-seconds-after-init
        adlr-* exit-signal exit-signal-handler exit-signal-handler-for-* rerun-* error-injection-* fault-*
        flight-recorder-*
        no-flight-recorder-* result-rejected-tracker-filename
        gpu-sniff-test-interval
    """,
    "a local checkpoint has one file for each rank, and its copy is on the next node": """
        non-persistent-local-ckpt-algo replication-jump
    """,
    "silent corruption is train.check_weight_hash_across_dp_replicas_interval": "check-weight-hash-*",
    "bad steps are handled by train.bad_step_action and train.check_for_spiky_loss": """
        no-check-for-nan-in-loss-and-grad check-for-nan-in-loss check-for-large-grads check-for-spiky-loss
    """,
    "initial weights depend only on the seed and their names": """
        use-cpu-initialization no-initialization data-parallel-random-init te-rng-tracker inference-rng-tracker
    """,
    "for other models or uses than training a decoder": """
        inference-* no-inference-* max-tokens-to-oom output-bert-embeddings bert-* rl-* no-rl-* grpo-*
        langrl-* perform-rl-step
        refit-method mamba-* gdp-* linear-* no-linear-* enable-chunked-prefill num-speculative-tokens
        decode-only-cuda-graphs use-same-sampling-seed-across-dp-ranks use-legacy-static-engine symmetric-ar-type
        encoder-* decoder-seq-length decoder-num-layers mask-prob short-seq-prob sample-rate cache-mla-latents
        return-log-probs skip-prompt-log-probs use-flashinfer-* disable-mamba-* relative-attention-*
        yarn-correction-* no-yarn-correction-* mlp-chunks-*
    """,
    "graphs of the layers are train.cuda_graphs": """
        cuda-graph-* enable-cuda-graph external-cuda-graph optimizer-cuda-graph no-cuda-graph-*
    """,
    "storage of FP8 scales": """
        fp8-interval tp-only-amax-red
    """,
    "each experimental feature has its own key": "enable-experimental test-mode",
    "weight decay is decoupled, as in AdamW": "decoupled-weight-decay",
    "activations between stages are freed after the send": "deallocate-pipeline-outputs variable-seq-lengths",
}

UNSUPPORTED: dict[str, str] = {
    "non-persistent checkpoints are those of type local (checkpoint.local)": "non-persistent-global-ckpt-dir",
    "the only QK norm is RMSNorm": "qk-l2-norm export-qk-l2-norm qk-clip qk-clip-*",
    "initial weights have a normal distribution": "init-method-xavier-uniform",
    "only RoPE with one position per token is supported": "mrope-section",
    "only residuals from before the norm are supported": "apply-residual-connection-post-layernorm",
    "muP is not supported": "use-mup mup-*",
    "latent dimensions of experts are not supported": "moe-latent-size",
    "device-limited routing is not supported": "moe-router-topk-limited-devices",
    "forced or replayed routing and scores applied to inputs are not supported": """
        moe-router-force-* moe-enable-routing-replay moe-router-quantile-* moe-apply-probs-on-input
        export-moe-apply-probs-on-input
    """,
    "capacity is set per expert (--moe-expert-capacity-factor)": "moe-expert-rank-capacity-factor moe-paged-stash*",
    "a dense checkpoint is upcycled by megalaunch convert upcycle": "moe-use-upcycling moe-upcycling-*",
    "heterogeneous layers are not supported": """
        heterogeneous-layers-* enable-mhc-connections mhc-* hybrid-* is-hybrid-model
    """,
    "layers named by their code are not supported": "spec",
    "sparse and linear attention are not supported": "experimental-attention-variant dsa-* linear-attention-freq",
    "each depth of multi-token prediction has its own layer": """
        mtp-use-repeated-layer mtp-detach-heads mtp-hsm mtp-standalone
    """,
    "FP4 is not supported": "fp4-*",
    "the output head is not computed in FP8, and there are no custom quantizers": """
        fp8-output-proj fp8-quantizer-factory
    """,
    "projections and attention exchange bf16, in which heads are normed and rotated": "fp8-multi-head-attention",
    "weights are sharded by tp only": """
        tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
    """,
    "the token limit per dp-cp rank cannot be set": "max-seqlen-per-dp-cp-rank",
    "HSDP shards inside a replica only": "enable-full-sharding-in-hsdp",
    "saved activations are not sharded over tp": "distribute-saved-activations",
    "activations are offloaded by layer, not by module or tensor": """
        cpu-offloading-* fine-grained-* offload-modules min-offloaded-tensor-size delay-offload-* delta-offload-*
        activation-offload-fraction
    """,
    "the batch size must be divisible among the ranks; it is never decreased": "decrease-batch-size-if-needed",
    "this variant of muon is not supported": "muon-*",
    "freezing weights is not supported": "freeze-all-layers",
    "phase transitions are not supported, and steps to skip are train.iterations_to_skip": """
        iterations-to-skip phase-transition-iterations
    """,
    "load weights with checkpoint.load_pretrained after megalaunch convert": """
        finetune pretrained-checkpoint ckpt-step override-ckpt-iteration no-load-optim no-load-rng
        load-main-params-from-ckpt
    """,
    "test data and files of data arguments are not supported": "data-args-path per-split-data-args-path test-data-path",
    "further validation sets are named in data.validation_sets": "multiple-validation-sets validation-set-names",
    "the first validation is after train.validation_interval steps": "start-eval-at-iter",
    "train always trains; megalaunch evaluate measures a checkpoint": "skip-train",
    "FIM splits entire documents and uses the tokens of data.fim_tokens": """
        fim-split-sample fim-fragment-rate fim-no-prefix fim-pad-token fim-eod-token
    """,
    "set conversations for fine-tuning with data.sft_data": "sft",
    "distillation from saved logits is not supported": "logits-*",
    "a YAML file of arguments is not read": "yaml-cfg",
    "dumps of weights, gradients, activations and expert loads are not supported": """
        save-params-interval save-wgrads-interval save-dgrads-interval save-activations-interval
        save-tokens-per-expert-interval
    """,
    "use megalaunch plan to predict memory without devices": "fake-process-group",
}
