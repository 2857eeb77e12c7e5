"""Training heads of transformers, made small by their configurations.

A configuration is shrunk by the names of its settings, which are much the same in all families: every size that is
known by name gets a small value, in nested configurations too. What differs is in :data:`EXCEPTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.entry import Batch, Entry

HIDDEN, HEADS, LAYERS, VOCABULARY, LENGTH, CLASSES = 32, 4, 2, 99, 12, 5
IMAGE, PATCH, SAMPLES, MELS, FRAMES = 32, 8, 1600, 16, 24
PATCHES, IMAGE_TOKEN = (IMAGE // PATCH) ** 2, VOCABULARY - 1

_WIDTHS = (
    "hidden_size d_model n_embd embed_dim embedding_size dim d_embed hidden_dim projection_dim emb_dim "
    "encoder_hidden_dim word_embed_proj_dim output_hidden_size backbone_hidden_size mm_hidden_size conv_hidden_size "
    "lru_width attention_hidden_size cross_attention_hidden_size text_hidden_size fpn_feature_size "
    "hidden_channels encoder_hidden_size qformer_hidden_size rnn_hidden_size rotary_emb_dim embedding_dim"
)
_INNER = (
    "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim dim_feedforward n_inner ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size mlp_dim feed_forward_proj_dim feedforward_dim "
    "intermediate_size_mlp feed_forward_size hidden_size_ff"
)
_DEPTHS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers depth "
    "num_encoder_layers encoder_num_layers decoder_num_layers num_hidden_groups_layers"
)
_HEADS = (
    "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_key_value_heads "
    "encoder_num_attention_heads decoder_num_attention_heads attention_heads num_kv_heads multi_query_heads"
)
_KNOWN: dict[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), HIDDEN),
    **dict.fromkeys(_INNER.split(), 2 * HIDDEN),
    **dict.fromkeys(_DEPTHS.split(), LAYERS),
    **dict.fromkeys(_HEADS.split(), HEADS),
    "head_dim": HIDDEN // HEADS,
    "d_kv": HIDDEN // HEADS,
    "attention_head_size": HIDDEN // HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "vocab_size_or_config_json_file": VOCABULARY,
    "type_vocab_size": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "n_ctx_size": 64,
    "max_seq_len": 64,
    "max_sequence_length": 64,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": IMAGE,
    "patch_size": PATCH,
    "num_mel_bins": MELS,
    "feature_size": MELS,
    "input_feat_per_channel": MELS,
    "max_source_positions": FRAMES,
    "max_target_positions": 64,
    "num_queries": 6,
    "encoder_stride": PATCH,
    "rope_theta": 10000.0,
    "state_size": 8,
    "mamba_d_state": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "cls_token_id": 1,
    "decoder_start_token_id": 1,
    "image_token_id": IMAGE_TOKEN,
    "image_token_index": IMAGE_TOKEN,
    "context_length": 32,
    "prediction_length": 8,
    "num_input_channels": 3,
    "num_frames": 4,
    "tubelet_size": 2,
    "use_cache": False,
    "apply_spec_augment": False,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    "conv_dim": [HIDDEN, HIDDEN],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 8],
    "num_feat_extract_layers": 2,
}
_NEVER_RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")


def shrunk(kind: type, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of the configuration class ``kind`` for a model of a few thousand parameters."""
    known = kind()
    subs: dict[str, Any] = getattr(kind, "sub_configs", {})
    settings = {**known.to_dict()}
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name in subs:
            continue
        if any(word in name for word in _NEVER_RANDOM) and isinstance(value, float):
            found[name] = 0.0
        elif name in _KNOWN and (value is not None or name.endswith("token_id")):
            small = _KNOWN[name]
            if isinstance(value, list | tuple) == isinstance(small, list):
                found[name] = small
    found.pop("transformers_version", None)
    for name, sub in subs.items():
        inner = getattr(known, name, None)
        if inner is None:
            continue
        if sub.__name__ == "AutoConfig":
            sub = type(inner)
        given = dict((overrides or {}).get(name, {}))
        found[name] = {**shrunk(sub, given), **given}
        if "model_type" in inner.to_dict():
            found[name]["model_type"] = inner.model_type
    for name, value in (overrides or {}).items():
        if name not in subs or not isinstance(value, Mapping):
            found[name] = value
    return found


def settings_of(kind: type) -> dict[str, Any]:
    """The exceptions that hold for a configuration class."""
    return EXCEPTIONS.get(kind.__name__.removesuffix("Config"), {})


def build(name: str, labels: int = CLASSES, **more: Any) -> nn.Module:
    """The small model of the class ``name``."""
    import transformers

    cls = getattr(transformers, name)
    kind = cls.config_class
    config = kind(**shrunk(kind, {**settings_of(kind), **more}))
    if hasattr(config, "num_labels"):
        config.num_labels = labels
    return cls(config)


# ---- rows ------------------------------------------------------------------------------------------


def _tokens(rows: int, random: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=random)


def _mask(rows: int, length: int = LENGTH) -> Tensor:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1::2, length - 3 :] = 0
    return mask


def _text(rows: int, random: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _tokens(rows, random), "attention_mask": _mask(rows)}


def _classes(rows: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (rows,), generator=random)


def _pixels(rows: int, random: torch.Generator, channels: int = 3, size: int = IMAGE) -> Tensor:
    return torch.randn(rows, channels, size, size, generator=random)


def _wave(rows: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, SAMPLES, generator=random)


def lm_batch(rows: int, random: torch.Generator) -> Batch:
    """Padded text, and a target for each token."""
    return _text(rows, random), _tokens(rows, random)


def classes_batch(rows: int, random: torch.Generator) -> Batch:
    """Padded text that says where it ends, and classes."""
    inputs = _text(rows, random)
    inputs["input_ids"][torch.arange(rows), inputs["attention_mask"].sum(1) - 1] = 2
    return inputs, _classes(rows, random)


def token_classes_batch(rows: int, random: torch.Generator) -> Batch:
    """Padded text and a class for each token."""
    return _text(rows, random), torch.randint(0, CLASSES, (rows, LENGTH), generator=random)


def answers_batch(rows: int, random: torch.Generator) -> Batch:
    """Padded text, first and last token of the answer."""
    return _text(rows, random), torch.randint(0, LENGTH - 3, (rows, 2), generator=random)


def translation_batch(rows: int, random: torch.Generator) -> Batch:
    """Text, the text that it becomes, and what follows each token of that."""
    inputs = _text(rows, random)
    inputs["decoder_input_ids"] = _tokens(rows, random, 8)
    return inputs, _tokens(rows, random, 8)


def image_batch(rows: int, random: torch.Generator, size: int = IMAGE) -> Batch:
    """Images and classes."""
    return {"pixel_values": _pixels(rows, random, size=size)}, _classes(rows, random)


def segmentation_batch(rows: int, random: torch.Generator, size: int = IMAGE) -> Batch:
    """Images and a class for each pixel."""
    target = torch.randint(0, CLASSES, (rows, size, size), generator=random)
    return {"pixel_values": _pixels(rows, random, size=size)}, target


def detection_batch(rows: int, random: torch.Generator, size: int = IMAGE) -> Batch:
    """Images, and for each of many queries a class and a box."""
    classes = torch.randint(0, CLASSES, (rows, 300), generator=random)
    boxes = torch.rand(rows, 300, 4, generator=random)
    return {"pixel_values": _pixels(rows, random, size=size)}, {"classes": classes, "boxes": boxes}


def pairs_batch(rows: int, random: torch.Generator) -> Batch:
    """Images and their texts."""
    return {**_text(rows, random), "pixel_values": _pixels(rows, random)}, torch.arange(rows)


def wave_batch(rows: int, random: torch.Generator) -> Batch:
    """Sound and classes."""
    return {"input_values": _wave(rows, random)}, _classes(rows, random)


def ctc_batch(rows: int, random: torch.Generator) -> Batch:
    """Sound, and what is said in it."""
    return {"input_values": _wave(rows, random)}, _tokens(rows, random, 4)


def speech_batch(rows: int, random: torch.Generator) -> Batch:
    """Spectra, the words before, and the words after."""
    inputs = {
        "input_features": torch.randn(rows, MELS, 2 * FRAMES, generator=random),
        "decoder_input_ids": _tokens(rows, random, 8),
    }
    return inputs, _tokens(rows, random, 8)


def caption_batch(rows: int, random: torch.Generator) -> Batch:
    """Images, the words before, and the words after."""
    inputs = {"pixel_values": _pixels(rows, random), "decoder_input_ids": _tokens(rows, random, 8)}
    return inputs, _tokens(rows, random, 8)


def chat_batch(rows: int, random: torch.Generator) -> Batch:
    """Text that begins with the places of an image's patches, and the image."""
    ids = torch.randint(3, IMAGE_TOKEN, (rows, PATCHES + 6), generator=random)
    ids[:, :PATCHES] = IMAGE_TOKEN
    inputs = {
        "input_ids": ids,
        "pixel_values": _pixels(rows, random),
        "attention_mask": torch.ones_like(ids),
    }
    return inputs, torch.randint(0, VOCABULARY, (rows, 6), generator=random)


def film_batch(rows: int, random: torch.Generator) -> Batch:
    """Films and classes."""
    return {"pixel_values": torch.randn(rows, 4, 3, IMAGE, IMAGE, generator=random)}, _classes(
        rows, random
    )


def series_batch(rows: int, random: torch.Generator) -> Batch:
    """Series of numbers, and how they go on."""
    return {"past_values": torch.randn(rows, 32, 3, generator=random)}, torch.randn(
        rows, 8, 3, generator=random
    )


def choices_batch(rows: int, random: torch.Generator) -> Batch:
    """Several texts to a row, one of which is right."""
    ids = torch.randint(3, VOCABULARY, (rows, 3, LENGTH), generator=random)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randint(
        0, 3, (rows,), generator=random
    )


def sentences_batch(rows: int, random: torch.Generator) -> Batch:
    """Text; a target for each token, and whether the second sentence follows the first."""
    follows = torch.randint(0, 2, (rows,), generator=random)
    return _text(rows, random), {"tokens": _tokens(rows, random), "follows": follows}


def page_batch(rows: int, random: torch.Generator) -> Batch:
    """Words with their boxes on a page."""
    inputs = _text(rows, random)
    low = torch.randint(0, 30, (rows, LENGTH, 2), generator=random)
    inputs["bbox"] = torch.cat([low, low + 20], dim=-1)
    return inputs, torch.randint(0, CLASSES, (rows, LENGTH), generator=random)


def question_batch(rows: int, random: torch.Generator) -> Batch:
    """A question about an image, and scores of answers."""
    inputs = {**_text(rows, random), "pixel_values": _pixels(rows, random)}
    return inputs, torch.rand(rows, CLASSES, generator=random)


def depth_batch(rows: int, random: torch.Generator) -> Batch:
    """Images and depths."""
    return {"pixel_values": _pixels(rows, random)}, torch.rand(rows, IMAGE, IMAGE, generator=random)


def frames_batch(rows: int, random: torch.Generator) -> Batch:
    """Spectra and classes."""
    return {"input_values": torch.randn(rows, FRAMES, MELS, generator=random)}, _classes(
        rows, random
    )


def spectra_batch(rows: int, random: torch.Generator) -> Batch:
    """Spectra, time first, the words before, and the words after."""
    inputs = {
        "input_features": torch.randn(rows, 2 * FRAMES, MELS, generator=random),
        "decoder_input_ids": _tokens(rows, random, 8),
    }
    return inputs, _tokens(rows, random, 8)


def voice_batch(rows: int, random: torch.Generator) -> Batch:
    """Sound, the words before, and the words after."""
    inputs = {"input_values": _wave(rows, random), "decoder_input_ids": _tokens(rows, random, 8)}
    return inputs, _tokens(rows, random, 8)


def hidden_image_batch(rows: int, random: torch.Generator) -> Batch:
    """Images with some patches hidden, which are to be told."""
    pixels = _pixels(rows, random)
    hidden = torch.rand(rows, PATCHES, generator=random) < 0.5
    return {"pixel_values": pixels, "bool_masked_pos": hidden}, pixels


def labels_batch(rows: int, random: torch.Generator) -> Batch:
    """Text with its labels among the inputs: the model computes its loss."""
    inputs = _text(rows, random)
    inputs["labels"] = inputs["input_ids"]
    return inputs, torch.zeros(rows)


# ---- losses ----------------------------------------------------------------------------------------


def _logits(outputs: Any) -> Tensor:
    logits: Tensor = outputs.logits
    return logits


def token_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy over tokens."""
    logits = _logits(outputs)[:, -targets.shape[1] :]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def class_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy over rows."""
    return F.cross_entropy(_logits(outputs), targets)


def answer_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of where the answer begins and ends."""
    start = F.cross_entropy(outputs.start_logits, targets[:, 0])
    return start + F.cross_entropy(outputs.end_logits, targets[:, 1])


def pixel_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy over pixels."""
    logits = F.interpolate(_logits(outputs), size=targets.shape[-2:], mode="bilinear")
    return F.cross_entropy(logits, targets)


def box_loss(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of each query's class and distance of its box."""
    logits, boxes = outputs.logits, outputs.pred_boxes
    many = logits.shape[1]
    classes = F.cross_entropy(logits.flatten(0, 1), targets["classes"][:, :many].flatten())
    return classes + F.l1_loss(boxes, targets["boxes"][:, :many])


def pair_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Each image against all texts of the micro-batch."""
    logits = outputs.logits_per_image
    wanted = torch.arange(len(targets))
    return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2


def ctc_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Connectionist temporal classification."""
    logits = _logits(outputs).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((logits.shape[1],), logits.shape[0])
    wanted = torch.full((len(targets),), targets.shape[1])
    return F.ctc_loss(logits, targets, lengths, wanted, zero_infinity=True)


def series_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean squared error of how the series goes on."""
    return F.mse_loss(outputs.prediction_outputs, targets)


def sentences_loss(outputs: Any, targets: Mapping[str, Tensor]) -> Tensor:
    """Both of BERT's first tasks."""
    tokens = F.cross_entropy(outputs.prediction_logits.flatten(0, 1), targets["tokens"].flatten())
    return tokens + F.cross_entropy(outputs.seq_relationship_logits, targets["follows"])


def score_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Binary cross-entropy of each answer."""
    return F.binary_cross_entropy_with_logits(outputs.logits, targets)


def depth_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean distance of depths."""
    found = F.interpolate(outputs.predicted_depth[:, None], size=targets.shape[-2:])[:, 0]
    return F.l1_loss(found, targets)


def hidden_image_loss(outputs: Any, targets: Tensor) -> Tensor:
    """Mean distance of what was hidden, and what was not."""
    return F.l1_loss(outputs.reconstruction, targets)


def own_loss(outputs: Any, targets: Tensor) -> Tensor:
    """What the model computed from the labels that it was given."""
    del targets
    return outputs.loss


KINDS: dict[str, tuple[Callable[..., Batch], Callable[..., Tensor], dict[str, Any]]] = {
    "causal": (lm_batch, token_loss, {"labels": 2}),
    "masked": (lm_batch, token_loss, {"labels": 2}),
    "translation": (translation_batch, token_loss, {"labels": 2}),
    "classes": (classes_batch, class_loss, {}),
    "tokens": (token_classes_batch, token_loss, {}),
    "answers": (answers_batch, answer_loss, {"labels": 2}),
    "image": (image_batch, class_loss, {}),
    "segmentation": (segmentation_batch, pixel_loss, {}),
    "detection": (detection_batch, box_loss, {}),
    "pairs": (pairs_batch, pair_loss, {}),
    "sound": (wave_batch, class_loss, {}),
    "ctc": (ctc_batch, ctc_loss, {}),
    "speech": (speech_batch, token_loss, {}),
    "caption": (caption_batch, token_loss, {}),
    "labels": (labels_batch, own_loss, {"labels": 2}),
    "chat": (chat_batch, token_loss, {"labels": 2}),
    "film": (film_batch, class_loss, {}),
    "series": (series_batch, series_loss, {"labels": 2}),
    "choices": (choices_batch, class_loss, {"labels": 2}),
    "sentences": (sentences_batch, sentences_loss, {"labels": 2}),
    "page": (page_batch, token_loss, {}),
    "question": (question_batch, score_loss, {}),
    "depth": (depth_batch, depth_loss, {}),
    "spectrum": (frames_batch, class_loss, {}),
    "spectra": (spectra_batch, token_loss, {"labels": 2}),
    "voice": (voice_batch, token_loss, {"labels": 2}),
    "hidden": (hidden_image_batch, hidden_image_loss, {"labels": 2}),
}

_FOUR = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
_SWIN = {"embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}
_LATENT = {
    "head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_CROSSED = {"decoder": {"is_decoder": True, "add_cross_attention": True}}
COUPLED = ("pairs",)
IMPORTS = ("transformers.modeling_utils", "transformers.generation", "transformers.masking_utils")
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "ResNet": {**_FOUR, "embedding_size": 16},
    "RegNet": {**_FOUR, "embedding_size": 16, "groups_width": 8},
    "Bit": {**_FOUR, "embedding_size": 16, "num_groups": 4},
    "ConvNext": {**_FOUR, "patch_size": 4},
    "ConvNextV2": {**_FOUR, "patch_size": 4},
    "PoolFormer": _FOUR,
    "Cvt": {
        "embed_dim": [16, 32, 64],
        "num_heads": [1, 2, 4],
        "depth": [1, 2, 3],
        "drop_path_rate": [0.0, 0.0, 0.0],
    },
    "FocalNet": {"embed_dim": 16, "depths": [1, 1, 2, 1]},
    "MobileNetV1": {"depth_multiplier": 0.25},
    "MobileNetV2": {"depth_multiplier": 0.25},
    "MobileViT": {
        "hidden_sizes": [16, 24, 32],
        "neck_hidden_sizes": [8, 16, 16, 24, 32, 40, 64],
        "patch_size": 2,
    },
    "MobileViTV2": {"width_multiplier": 0.25, "patch_size": 2, "base_attn_unit_dims": [32, 48, 64]},
    "Pvt": {**_FOUR, "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]},
    "PvtV2": {**_FOUR, "num_attention_heads": [1, 2, 3, 4]},
    "Segformer": {**_FOUR, "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32},
    "SwiftFormer": {"embed_dims": [16, 32, 48, 64], "depths": [1, 1, 2, 1]},
    "EfficientNet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "Swin": _SWIN,
    "Swinv2": _SWIN,
    "DonutSwin": _SWIN,
    "Levit": {
        "hidden_sizes": [32, 48, 64],
        "num_attention_heads": [2, 3, 4],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "patch_size": 16,
    },
    "Hiera": {
        "embed_dim": 16,
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 8],
        "image_size": [32, 32],
        "patch_size": [7, 7],
        "masked_unit_size": [2, 2],
        "query_stride": [2, 2],
        "num_query_pool": 1,
    },
    "ImageGPT": {"image_size": 4, "patch_size": 1},
    "CTRL": {"dff": 64},
    "GPTJ": {"rotary_dim": 4},
    "CodeGen": {"rotary_dim": 4},
    "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
    "Youtu": _LATENT,
    "MiniCPM3": _LATENT,
    "Mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 1, "chunk_size": 8},
    "Bamba": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "mamba_chunk_size": 8,
        "attn_layer_indices": [1],
    },
    "GraniteMoeHybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_expand": 2,
        "layer_types": ["mamba", "attention"],
    },
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Dbrx": {"attn_config": {"clip_qkv": 8, "kv_n_heads": 2}},
    "Esm": {"vocab_size": VOCABULARY, "mask_token_id": 3},
    "Nemotron": {"head_dim": 8},
    "Ministral": {"head_dim": 8},
    "HunYuanDenseV1": {"head_dim": 8},
    "Xmod": {"languages": ["en_XX"], "default_language": "en_XX", "adapter_reduction_factor": 2},
    "Reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 4],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "is_decoder": True,
        "attention_head_size": 8,
    },
    "Funnel": {"block_sizes": [1, 1, 1], "num_decoder_layers": 1, "d_inner": 64, "d_head": 8},
    "XLNet": {"d_inner": 64, "d_head": 8},
    "MobileBert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "RemBert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "RoCBert": {
        "pronunciation_vocab_size": 20,
        "shape_vocab_size": 20,
        "pronunciation_embed_dim": 32,
        "shape_embed_dim": 32,
    },
    "LED": {
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
        "attention_window": 8,
    },
    "Longformer": {"attention_window": [8, 8]},
    "FSMT": {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    "AST": {"max_length": FRAMES, "patch_size": 8},
    "Wav2Vec2Bert": {"feature_projection_input_dim": MELS, "vocab_size": VOCABULARY},
    "Wav2Vec2Conformer": {"vocab_size": VOCABULARY, "conv_depthwise_kernel_size": 7},
    "Speech2Text": {"max_source_positions": 2 * FRAMES, "conv_channels": 32},
    "Siglip2": {"vision_config": {"num_patches": 16}},
    "Gemma3nText": {"num_kv_shared_layers": 0},
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "JetMoe": {"kv_channels": 8},
    "NemotronH": {"mamba_num_heads": 8, "mamba_head_dim": 8},
    "Qwen3Next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "Perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2},
    "Luke": {"entity_vocab_size": 20, "entity_emb_size": 32},
    **dict.fromkeys(("EncoderDecoder", "VisionEncoderDecoder", "SpeechEncoderDecoder"), _CROSSED),
    "GLPN": {**_FOUR, "num_attention_heads": [1, 2, 3, 4], "decoder_hidden_size": 32},
    "LayoutLMv3": {
        "coordinate_size": 4,
        "shape_size": 8,
        "max_2d_position_embeddings": 64,
        "visual_embed": False,
    },
    "VipLlava": {"vision_feature_layers": [-1, -2]},
    "Gemma3": {"mm_tokens_per_image": PATCHES},
    "LayoutLM": {"max_2d_position_embeddings": 64},
}
"""Settings of a family by the name of its configuration class, where the small values by name do not make a model."""


def entry(kind: str, name: str) -> Entry:
    """The class ``name`` of transformers, trained for the task ``kind``."""
    batch, loss, more = KINDS[kind]
    return Entry(
        partial(build, name, **more),
        batch,
        loss,
        f"transformers.{name}",
        coupled=kind in COUPLED,
        imports=IMPORTS,
    )
