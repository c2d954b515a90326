"""Runs of the parity tests, in the quick suite and in the long suite."""

# The quick suite contains every valid pair of techniques (test_layout_pairs.py).
# More layouts: python benchmarks/parity.py, with --layouts '*+shard?', '*pp*', '*cp*' and '*ep*'
QUICK = """
    sgd/dp2mp2-interleaved2@2x2+rows+sp+shard1+recompute
    causal.used/mp2m2-interleaved2@2x1+rows+sp+recompute
    deep_causal.used/pp2m2-interleaved2@2x1+recompute
    deep_causal/pp2m2-zb_v2@2x1+recompute+gpu
    causal/dp2mp2@4x1+rows+sp+whole2+recompute bert/mp2pp2m2-gpipe@4x1+rows+sp
    lamb/dp2pp2m2-zb_h1@4x1+whole1 causal/dp2pp2m2-1f1b@4x1+shard2+reduce
    causal/dp2pp2m2-1f1b@4x1+shard3
    llama_lora/dp2@2x1+shard3+recompute llama_qlora/mp2@1x2+recompute
    long/dp2cp2m2@2x2+ulysses+shard1+recompute
    long_causal/cp2mp2@2x2+rows+ring long_causal/dp2cp2m2-interleaved2@2x2+all_gather+shard3
    long_causal/cp2pp2m2-1f1b@2x2+ring long_moe/dp2cp2ep2-interleaved2@1x4+ring
    moe/dp4ep2@2x2+shard2 moe/dp2mp2ep2m2@2x2+rows+sp+shard3+recompute
    moe/dp2ep2pp2m2-1f1b@2x2 muon/mp2@1x2+rows+whole1
    dropout/dp2m2@2x1+shard3
""".split()
LONG = """
    moe/dp2ep2@2x1 adamw/dp2m2@2x1+shard2+recompute long.used/dp2cp2@2x2+all_gather
    moe.used/dp4ep2@4x1 llama_lora.used/mp2@1x2+rows+sp untied.used/dp2mp2@1x4+rows+sp
    sgd/dp2@1x2 sgd/dp2mp2@2x2+sp adamw/dp2@2x1+shard1 tied.used/dp2@2x1+shard3
    muon/dp2@2x1+whole1 llama_lora/dp2@2x1 deep_llama_frozen/pp2m4-1f1b@2x1
    bert.used/mp2@1x2+rows+sp long.used/cp2@1x2 untied.used/dp2mp4@1x8+rows+sp
    tied/dp4mp2@1x8+sp untied/dp8@1x8 untied/mp8@1x8+rows tied/mp2@1x2 tied/mp4@1x4+sp
    sgd/dp4@1x4 untied/mp2@2x1 tied/mp4@2x2+rows untied/dp2mp2@2x2+sp tied/dp4@4x1
    adamw/dp4@4x1+shard3 untied/dp2mp2@4x1+rows tied/dp2mp2@4x1+rows+sp sgd/dp2@2x1+shard2
    lion/dp2@2x1+shard1 adamw/dp2mp2@2x2+shard1 adamw/dp4mp2@4x2+shard3 sgd/dp2mp2@2x2+shard3
    adamw/dp2@2x1+shard3 tied.used/mp2pp2m2-1f1b@2x2 dropout/pp2m4-zb_h1@2x1
    deep_dropout/pp4m4-1f1b@4x1 deep_dropout/pp4m4-zb_h1@4x1 packed/mp2@1x2+sp
    packed/dp2mp2@2x2+rows packed/pp2m4-1f1b@2x1 packed/dp2@2x1+shard3
    llama.used/dp2mp2@2x2+rows llama.used/mp2@1x2+sp llama/mp4@1x4 llama/dp2@2x1+shard1
    llama/dp2@2x1+shard2 llama.used/dp2@2x1+shard3 llama.used/pp2m4-1f1b@2x1
    llama/pp2m4-zb_h1@2x1 llama.used/mp2pp2m2-1f1b@2x2+rows llama_lora.used/dp2mp2@2x2+rows
    llama_lora/mp2@2x1+sp llama_lora/mp2pp2m2-1f1b@2x2+rows llama_lora/dp2@2x1+shard1
    llama_lora/dp2@2x1+shard2 llama_lora/pp2m4-zb_h1@2x1 tied.used/dp2@2x1+shard3+recompute
    llama_lora.used/dp2@2x1+shard3 llama_lora.used/pp2m4-1f1b@2x1 llama_lora/dp2mp2@2x2+shard3
    llama_qlora/dp2@2x1 llama_qlora/dp2@2x1+shard1 llama_qlora/dp2@2x1+shard2
    llama_qlora.used/dp2@2x1+shard3 llama_qlora.used/mp2@1x2+rows+sp
    llama_qlora/dp2mp2@2x2+shard3 llama_qlora.used/pp2m4-1f1b@2x1 llama_qlora/pp2m4-zb_h1@2x1
    llama_lora/dp2@2x1+whole2 deep_llama_frozen.used/dp2mp2@2x2+rows
    deep_llama_frozen/dp2@2x1+shard3 deep_llama_frozen/dp2@2x1+shard1
    deep_llama_frozen/dp2mp2@2x2+shard2 deep_llama_frozen/pp2m4-zb_h1@2x1
    deep_llama_frozen.used/mp2pp2m2-1f1b@2x2+rows deep_llama_frozen/pp2m4-zb_v2@2x1
    deep_llama_frozen.used/pp2m2-interleaved2@2x1 bert.used/dp2mp2@2x2+rows
    bert.used/dp2@2x1+shard3 bert/dp2@2x1+shard1 bert.used/pp2m4-1f1b@2x1 bert/pp2m4-zb_h1@2x1
    bert/mp2pp2m2-1f1b@2x2+rows moe/dp2@2x1 moe/dp2@2x1+shard1 moe/dp2@2x1+shard2
    moe.used/dp2@2x1+shard3 moe/dp2@1x2 moe/dp2mp2@1x4+sp moe.used/mp2@2x1+rows+sp
    moe.used/dp2ep2@1x2 moe_global/dp2@2x1 moe.used/dp2mp2ep2@2x2+rows+sp moe/dp4ep2@4x1+shard1
    moe/dp4ep4@4x1 moe/dp2mp2ep2@4x1 moe/dp2mp2ep2@2x2+shard3 moe.used/pp2m4-1f1b@2x1
    moe/pp2m4-zb_h1@2x1 moe/dp2pp2m2-1f1b@4x1+shard2 moe/dp2ep2pp2m2-1f1b@4x1
    moe/dp2mp2ep2pp2m2-1f1b@4x2 moe_global.used/dp2@1x2 moe_global/dp2ep2@2x1
    moe_global/dp2@2x1+shard3 moe_global/dp4@4x1+shard2 moe_global/dp2mp2ep2@2x2
    masked.used/dp2@2x1+shard3 masked/mp2@1x2 masked.used/mp2@1x2+rows+sp masked/dp2@2x1
    masked/pp2m4-1f1b@2x1 long_masked/cp2@1x2+ring long_masked.used/cp2mp2@1x4+rows+all_gather
    long_masked/dp2cp2@1x4+ulysses
    sentences/mp2@1x2+sp sentences/dp2@2x1+shard2 sentences/dp2pp2m2-1f1b@4x1
    bart.used/dp2mp2@2x2+rows bart/mp2@1x2+rows+sp bart.used/dp2@2x1+shard3 bart/dp2@2x1+shard1
    bart/dp2@2x1+shard2 bart.used/pp2m4-1f1b@2x1 bart/pp2m4-zb_h1@2x1
    bart.used/mp2pp2m2-1f1b@2x2+rows t5.used/dp2mp2@2x2+rows t5/mp2@1x2+rows+sp
    t5.used/dp2@2x1+shard3 t5/dp2@2x1+shard1 t5/dp2@2x1+shard2 t5.used/pp2m4-1f1b@2x1
    t5/pp2m4-zb_h1@2x1 deep_t5/pp2m2-interleaved2@2x1 t5.used/mp2pp2m2-1f1b@2x2+rows
    long.used/cp2pp2m2-1f1b@2x2+all_gather long/cp4@1x4+ring long/cp4mp2@1x8+ulysses
    long/dp2cp2@2x2+ulysses+shard1 long/dp2cp2@1x4+all_gather long/dp2cp2@2x2+ring+shard3
    long/cp4@1x4+ulysses_ring long_causal/cp4mp2@1x8+ulysses_ring
    long_causal/cp4@4x1+ulysses_ring long/cp2mp2@1x4+rows+ring
    long_causal.used/cp2mp2@2x2+rows+all_gather
    long_causal/dp2cp2@2x2+ring+shard2 long_causal/cp4@4x1+ring long_causal/cp4@2x2+ulysses
    long_causal/cp4@1x4+all_gather long_causal/cp2pp2m2-1f1b@4x1+ulysses
    long_causal/cp2mp2pp2m2-1f1b@2x4+ring causal.used/mp2@2x1+sp
    deep_causal.used/pp2m2-interleaved2@2x1 long_moe/cp2@1x2 long_moe/dp2cp2ep2@1x4
    moe/dp2ep2@1x2+recompute long_causal/cp2@1x2+ring+recompute
    deep_causal.used/mp2-interleaved4@1x2 deep_tied.used/mp2m2-interleaved4@2x1+rows+sp
    deep_llama.used/dp2mp2-interleaved4@2x2+shard2 deep_t5.used/mp2-interleaved4@1x2
    deep_tied.used/pp2m4-zb_v2@2x1 deep/dp2pp2m4-zb_h1@4x1+shard2 deep/mp2pp2m2-1f1b@4x1+rows+sp
    lamb/dp2@2x1+whole1 adafactor/dp2@2x1+whole1 adafactor/dp2@2x1+whole2 muon/dp2@2x1+whole2
    adamw/dp2@2x1+whole2 lamb/dp2mp2@2x2+rows+whole1 lamb/dp4@4x1+whole1
    adafactor/dp4@4x1+whole2 muon/dp4@4x1+whole2 adafactor/dp2mp2@4x1+rows+whole2
    muon/mp2@2x1+rows+whole1 muon/pp2m4-1f1b@2x1 muon/dp2mp2@2x2+whole2
    tied.used/mp2@2x1+rows+sp sgd/mp4@2x2+rows adamw/dp2@2x1+shard2
    lamb/dp2@2x1+whole2 deep_tied.used/pp2m2-interleaved2@2x1 deep_tied/dp2pp2m2-1f1b@4x1+shard2
    llama/mp2@2x1 long_causal/cp2@2x1+ring gemma/dp2@2x1+shard3 deep_gemma/pp2m2-1f1b@2x1
    olmo/mp2@1x2+rows+sp olmo/dp2@2x1+shard3 deep_olmo/pp2m2-1f1b@2x1
    falcon/mp2@1x2+rows+sp falcon/dp2@2x1+shard3 deep_falcon/pp2m2-1f1b@2x1 falcon.used/mp2@1x2
    glm_experts/mp2@1x2+rows+sp glm_experts/dp2@2x1+shard3 deep_glm_experts/pp2m2-1f1b@2x1
    gpt_oss/mp2@1x2+rows+sp gpt_oss/dp2ep2@2x1 gpt_oss/dp2@2x1+shard3+recompute
    deep_gpt_oss/pp2m2-1f1b@2x1 gpt_oss.used/dp2mp2ep2@2x2+rows
    deepseek/mp2@1x2+rows+sp deepseek/dp2ep2@2x1 deepseek/dp2@2x1+shard3+recompute
    deep_deepseek/pp2m2-1f1b@2x1 deepseek.used/dp2mp2ep2@2x2+rows
    long_gpt_oss/cp2@2x1+ring long_gpt_oss/dp2cp2@2x2+all_gather+shard3
    long_gpt_oss/cp2pp2m2-1f1b@2x2+ulysses long_deepseek/cp2@2x1+ring
    long_deepseek/dp2cp2ep2@1x4+ulysses long_deepseek/cp2mp2@2x2+rows+all_gather
    long_olmo/cp2@2x1+ring hunyuan.used/mp2@1x2+rows hunyuan.used/pp2m2-1f1b@2x1
    apertus/mp2@1x2+rows+sp apertus/dp2@2x1+shard3+recompute deep_apertus/pp2m2-1f1b@2x1
    modernbert/mp2@1x2+rows+sp modernbert/dp2@2x1+shard3 deep_modernbert/pp2m2-1f1b@2x1
    gemma/dp2mp2@2x2+rows+shard2 modernbert/dp2@2x1 sgd/dp2mp2m2@4x1+rows+sp+whole2+recompute
    tied/mp2pp2m2-gpipe@2x2+rows+sp deep/dp2pp2m2-zb_v2@4x1+shard2+recompute
    bert/mp2pp2m2-1f1b@4x1 lamb/dp2pp2m2-1f1b@4x1+whole2 moe/dp4ep2@4x1+shard2
    untied/dp2mp2@2x2+rows+sp+shard1 tied.used/mp2m2@2x1+rows+sp+recompute
    llama/dp2mp2m2@2x2+rows+sp+shard3 sgd/dp2mp2@4x1+rows+sp+whole2+recompute
    deep_tied.used/pp2m2-interleaved2@2x1+recompute dropout/pp2m4-1f1b@2x1
    long/dp2cp2@2x2+ring+whole1 long/cp2pp2m2-1f1b@2x2+ring moe/dp2ep2@2x1+shard3+gpu
    moe/dp2mp2ep2m2@1x4+rows+sp+recompute causal/mp2-interleaved2@2x1+rows+sp+gpu
    adamw/dp2m2-interleaved2@2x1+shard2+recompute adamw/dp2-interleaved2@2x1+whole1
    gemma/mp2@1x2+rows+sp moe/dp2ep2@2x1+shard3 causal/mp2-interleaved2@2x1+rows+sp
    deep/pp2m2-zb_v2@2x1+recompute+gpu deep/pp2m2-zb_v2@2x1+recompute
    tied.used/mp2m2-interleaved2@2x1+rows+sp+recompute tied/dp2pp2m2-1f1b@4x1+shard1
    long_causal/dp2cp2-interleaved2@2x2+ring+whole1 moe/dp4ep2@2x2+whole1
    causal/dp2pp2m2-1f1b@4x1+shard1 long_causal/dp2cp2@2x2+all_gather+shard3
    deep_tied.used/dp2pp2m2-interleaved2@4x1+shard3 deep/dp2pp2m4-zb_h1@4x1+shard3
    deep/dp2pp2m4-zb_v2@4x1+shard3+recompute tied/dp2pp2m2-gpipe@4x1+shard3+reduce
    deep_tied/dp2pp2m2-interleaved2@4x1+shard2+reduce deep/dp2pp2m4-zb_h1@4x1+shard2+reduce
    tied.used/dp2mp2pp2m2-1f1b@4x2+shard3 sgd/dp2mp2pp2m2-1f1b@4x2+sp+shard2+reduce
    llama_lora.used/dp2pp2m2-1f1b@4x1+shard3 llama_lora/dp2pp2m2-1f1b@4x1+shard2+reduce
    deep_llama_frozen/dp2pp2m2-1f1b@4x1+shard3 moe/dp2ep2pp2m2-1f1b@2x2+shard3
    lamb/dp2pp2m2-1f1b@4x1+whole2+reduce adamw/dp2m2@2x1+shard2+reduce
    causal/dp2m2-interleaved2@2x1+shard3 causal/dp2mp2m2-interleaved2@1x4+shard3
    dropout/dp2@2x1 dropout/dp2m2@2x1 dropout/dp2@2x1+shard3+recompute dropout/mp2@1x2
    dropout/mp2@1x2+rows+sp dropout/dp2mp2m2@1x4+rows+sp dropout/dp2pp2m2-1f1b@4x1
    dropout/mp2pp2m2-1f1b@2x2+sp long_dropout/cp2@1x2+ulysses long_dropout/cp2@1x2+ring
    long_dropout/cp2@1x2+all_gather long_dropout/cp4@1x4+ulysses_ring
""".split()
# Runs with "+gpu" use the GPU code path (harness/gpu_branch.py). The long suite uses it once for each
# network and for each layout of two ranks, because layouts do not depend on networks, and for the
# runs of four ranks below. Runs with "+gpu" in the quick suite use the CPU code path in the long suite.
_IS_GPU = "+gpu"
_GPU_OF_FOUR = """
    sgd/dp2mp2@4x1+rows+sp+whole2+recompute bert/mp2pp2m2-gpipe@4x1+rows+sp
    lamb/dp2pp2m2-zb_h1@4x1+whole1 tied/dp2pp2m2-1f1b@4x1+shard1 moe/dp4ep4@4x1
    long_causal/cp4@4x1+ring deep_dropout/pp4m4-zb_h1@4x1
""".split()


def _as_on_gpus(runs):
    """Yield runs of two ranks, with "+gpu", until each network and each layout occurs once."""
    seen = set()
    for run in runs:
        network, layout = run.removesuffix(_IS_GPU).split("/")
        parts = {network.removesuffix(".used"), layout}
        if parts - seen and "@2x1" in layout:
            yield run.removesuffix(_IS_GPU) + _IS_GPU
            seen |= parts


LONG += [run.removesuffix(_IS_GPU) for run in QUICK if run.endswith(_IS_GPU)]
LONG += [run + _IS_GPU for run in _GPU_OF_FOUR]
LONG += _as_on_gpus(sorted([*QUICK, *LONG], key=lambda run: _IS_GPU not in run))
LONG = sorted(set(LONG) - set(QUICK), key=LONG.index)
RUNS = [*QUICK, *LONG]
