"""User program for the type checker: every public name, and calls with their types.

`make lint` checks it with mypy against the package's annotations (`py.typed`), like a user's
editor. tests/test_package.py checks that no public name is missing.
"""

import keras
import numpy as np

import dtransformer
from dtransformer import datasets, layers, models, planner, trainers
from dtransformer.parallel import collectives

NAMES = (
    dtransformer.EmbeddingOpParallelConfig,
    dtransformer.MoEConfig,
    dtransformer.MoEParallelConfig,
    dtransformer.OpParallelConfig,
    dtransformer.Trainer,
    dtransformer.TransformerOpParallelConfig,
    dtransformer.TransformerRecomputeConfig,
    dtransformer.__version__,
    dtransformer.compiles_shapes,
    dtransformer.data_shard,
    dtransformer.get_parallel_config,
    dtransformer.init,
    dtransformer.is_chief,
    dtransformer.local_rank,
    dtransformer.parallel_config,
    dtransformer.rank,
    dtransformer.recompute,
    dtransformer.row_multiple,
    dtransformer.set_parallel_config,
    dtransformer.set_seed,
    dtransformer.shutdown,
    dtransformer.size,
    datasets.InstructionBatches,
    datasets.LanguageModelBatches,
    datasets.LengthBuckets,
    datasets.MaskedLanguageModelBatches,
    datasets.MixedBatches,
    datasets.NextSentenceBatches,
    datasets.ShardMixture,
    datasets.SpanCorruptionBatches,
    datasets.SpecialTokenIds,
    datasets.SubwordTokenizer,
    datasets.TokenShards,
    datasets.TranslationBatches,
    datasets.clean_pairs,
    datasets.load_tokenizer,
    datasets.plan_batches,
    datasets.read_documents,
    datasets.read_lines,
    datasets.read_pairs,
    datasets.read_tsv,
    datasets.train_byte_level,
    datasets.write_token_shards,
    layers.AttentionMask,
    layers.BlockStack,
    layers.CrossEntropyLoss,
    layers.DistillationLoss,
    layers.Dropout,
    layers.FeedForward,
    layers.FixedSparseAttention,
    layers.Layer,
    layers.LayerNorm,
    layers.LatentAttention,
    layers.Linear,
    layers.MaskedLMHead,
    layers.MoE,
    layers.MultiHeadAttention,
    layers.PoolingHead,
    layers.PositionEmbedding,
    layers.QKNorm,
    layers.RMSNorm,
    layers.Rotary,
    layers.Router,
    layers.SequenceHead,
    layers.TokenHead,
    layers.TokenTypeEmbedding,
    layers.Transformer,
    layers.TransformerBlock,
    layers.TransformerDecoder,
    layers.TransformerDecoderLayer,
    layers.TransformerEncoder,
    layers.TransformerEncoderLayer,
    layers.VocabEmbedding,
    layers.VocabHead,
    layers.dropout_seed,
    layers.spread_evenly,
    models.AttentionConfig,
    models.BlockConfig,
    models.CausalLM,
    models.EmbeddingConfig,
    models.EncoderDecoderLM,
    models.GenerationOptions,
    models.HeadConfig,
    models.MaskedLM,
    models.TextGenerator,
    models.TransformerConfig,
    models.TranslationTransformer,
    models.add_lora,
    models.check_target,
    models.freeze,
    models.from_preset,
    models.from_pretrained,
    models.load_lora,
    models.merge_lora,
    models.quantize,
    models.save_lora,
    models.save_pretrained,
    models.unfreeze,
    collectives.Group,
    collectives.all_gather,
    collectives.all_reduce_max,
    collectives.all_reduce_min,
    collectives.all_reduce_sum,
    collectives.all_to_all,
    collectives.broadcast,
    collectives.gather,
    collectives.new_group,
    collectives.recv,
    collectives.reduce_scatter_sum,
    collectives.reduce_sum,
    collectives.scatter,
    collectives.send,
    planner.Cluster,
    planner.Constants,
    planner.Cost,
    planner.DEVICES,
    planner.Device,
    planner.Job,
    planner.Link,
    planner.ModelShape,
    planner.Plan,
    planner.TransformerOpParallelConfig,
    planner.auto_config,
    planner.cost,
    planner.get_device,
    planner.from_network,
    planner.get_model,
    planner.plan,
    trainers.ModelCheckpoint,
    trainers.Muon,
    trainers.SpikeGuard,
    trainers.Trainer,
)


def train(texts: np.ndarray) -> keras.callbacks.History:
    """Use a model, a config and `fit` with annotated types."""
    recompute = dtransformer.TransformerRecomputeConfig(recompute=True)
    config: dtransformer.TransformerOpParallelConfig = dtransformer.TransformerOpParallelConfig(
        model_parallel=2, optimizer_shard=1, recompute=recompute
    )
    dtransformer.init(config)
    model: keras.Model = models.CausalLM(50, hidden_size=16, num_heads=2, num_layers=1)
    trainer: keras.Model = dtransformer.Trainer(model)
    loss: keras.losses.Loss = layers.CrossEntropyLoss(ignore_id=0)
    trainer.compile(keras.optimizers.AdamW(1e-3), loss)
    ranks: int = dtransformer.size()
    return trainer.fit(texts[:, :-1], texts[:, 1:], batch_size=4 * ranks)


def results(trainer: dtransformer.Trainer) -> str:
    """Return the reports as text."""
    chief: bool = dtransformer.is_chief()
    return f"{trainer.plan()}\n{trainer.communication_report()}" if chief else ""
