"""All models by name."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.models import (
    adapters,
    hugging,
    practice,
    science,
    text,
    timm_own,
    torch_own,
    vision,
)
from benchmarks.zoo.training import Way

TRANSFORMERS: dict[str, str] = {
    "causal": """
        LlamaForCausalLM GPT2LMHeadModel MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM
        Gemma3ForCausalLM Phi3ForCausalLM PhiForCausalLM BloomForCausalLM FalconForCausalLM GPTNeoXForCausalLM
        GPTNeoForCausalLM GPTJForCausalLM CodeGenForCausalLM GPTBigCodeForCausalLM OPTForCausalLM MptForCausalLM
        OlmoForCausalLM Olmo2ForCausalLM CohereForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
        GraniteForCausalLM PersimmonForCausalLM XGLMForCausalLM BioGptForCausalLM OpenAIGPTLMHeadModel
        CTRLLMHeadModel XLNetLMHeadModel ProphetNetForCausalLM TrOCRForCausalLM ModernBertDecoderForCausalLM
        SmolLM3ForCausalLM HeliumForCausalLM Exaone4ForCausalLM Glm4ForCausalLM BitNetForCausalLM
        DiffLlamaForCausalLM NanoChatForCausalLM Lfm2ForCausalLM MixtralForCausalLM OlmoeForCausalLM
        Qwen2MoeForCausalLM Qwen3MoeForCausalLM GptOssForCausalLM PhimoeForCausalLM DeepseekV3ForCausalLM
        JetMoeForCausalLM MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM RecurrentGemmaForCausalLM
        RwkvForCausalLM JambaForCausalLM BambaForCausalLM xLSTMForCausalLM Qwen3NextForCausalLM
    """,
    "masked": """
        BertForMaskedLM RobertaForMaskedLM AlbertForMaskedLM DistilBertForMaskedLM ElectraForMaskedLM
        DebertaForMaskedLM DebertaV2ForMaskedLM MPNetForMaskedLM ModernBertForMaskedLM ConvBertForMaskedLM
        FNetForMaskedLM FunnelForMaskedLM LongformerForMaskedLM BigBirdForMaskedLM NystromformerForMaskedLM
        MobileBertForMaskedLM SqueezeBertForMaskedLM RemBertForMaskedLM RoFormerForMaskedLM XLMWithLMHeadModel
        EsmForMaskedLM NomicBertForMaskedLM YosoForMaskedLM LayoutLMForMaskedLM IBertForMaskedLM
    """,
    "translation": """
        T5ForConditionalGeneration BartForConditionalGeneration MBartForConditionalGeneration MarianMTModel
        PegasusForConditionalGeneration M2M100ForConditionalGeneration LEDForConditionalGeneration
        LongT5ForConditionalGeneration BlenderbotForConditionalGeneration SwitchTransformersForConditionalGeneration
        NllbMoeForConditionalGeneration UMT5ForConditionalGeneration FSMTForConditionalGeneration
        T5GemmaForConditionalGeneration EncoderDecoderModel
    """,
    "classes": """
        BertForSequenceClassification GPT2ForSequenceClassification LlamaForSequenceClassification
        BartForSequenceClassification XLNetForSequenceClassification CanineForSequenceClassification
    """,
    "tokens": "DistilBertForTokenClassification DebertaV2ForTokenClassification LukeForTokenClassification",
    "answers": "BertForQuestionAnswering AlbertForQuestionAnswering ElectraForQuestionAnswering",
    "image": """
        ViTForImageClassification BeitForImageClassification DeiTForImageClassification Dinov2ForImageClassification
        SwinForImageClassification Swinv2ForImageClassification ConvNextForImageClassification
        ConvNextV2ForImageClassification ResNetForImageClassification RegNetForImageClassification
        BitForImageClassification CvtForImageClassification FocalNetForImageClassification LevitForImageClassification
        MobileNetV1ForImageClassification MobileNetV2ForImageClassification MobileViTForImageClassification
        PoolFormerForImageClassification PvtForImageClassification PvtV2ForImageClassification
        EfficientNetForImageClassification SwiftFormerForImageClassification SiglipForImageClassification
        PerceiverForImageClassificationLearned SegformerForImageClassification
    """,
    "segmentation": """
        SegformerForSemanticSegmentation MobileNetV2ForSemanticSegmentation
        MobileViTForSemanticSegmentation
    """,
    "detection": "YolosForObjectDetection RfDetrForObjectDetection",
    "pairs": "CLIPModel SiglipModel BlipModel AltCLIPModel",
    "ctc": "Wav2Vec2ForCTC HubertForCTC WavLMForCTC SEWForCTC",
    "sound": """
        Wav2Vec2ConformerForSequenceClassification Data2VecAudioForSequenceClassification
        UniSpeechForSequenceClassification
    """,
    "speech": "WhisperForConditionalGeneration",
    "caption": "VisionEncoderDecoderModel",
    "labels": """
        GPT2LMHeadModel BertForMaskedLM OPTForCausalLM RobertaForMaskedLM Qwen2ForCausalLM
    """,
    "chat": """
        LlavaForConditionalGeneration VipLlavaForConditionalGeneration PaliGemmaForConditionalGeneration
        Gemma3ForConditionalGeneration GitForCausalLM BlipForConditionalGeneration
    """,
    "film": "VideoMAEForVideoClassification TimesformerForVideoClassification VivitForVideoClassification",
    "series": "PatchTSTForPrediction PatchTSMixerForPrediction",
    "choices": "BertForMultipleChoice RobertaForMultipleChoice",
    "sentences": "BertForPreTraining FNetForPreTraining",
    "page": "LayoutLMForTokenClassification LayoutLMv3ForTokenClassification",
    "question": "ViltForQuestionAnswering",
    "depth": "GLPNForDepthEstimation",
    "spectrum": "ASTForAudioClassification",
    "spectra": "Speech2TextForConditionalGeneration",
    "voice": "MoonshineForConditionalGeneration SpeechT5ForSpeechToText SpeechEncoderDecoderModel",
    "hidden": "ViTForMaskedImageModeling DeiTForMaskedImageModeling",
}
"""Training heads of transformers by the task they are trained for."""


OWN = {
    "torch": torch_own.ENTRIES,
    "vision": vision.ENTRIES,
    "text": text.ENTRIES,
    "practice": practice.ENTRIES,
    "science": science.ENTRIES,
}
"""Models that are written out, by their group."""

EXTRA = {
    "adapters": (adapters.ENTRIES, ("peft",)),
    "timm": (timm_own.ENTRIES, ("timm", "torchvision")),
}
"""Models of libraries that need not be there, and these."""


def entries() -> dict[str, Entry]:
    """Name → entry."""
    found: dict[str, Entry] = {}
    for kind, names in TRANSFORMERS.items():
        for name in names.split():
            found[f"transformers/{kind}/{name}"] = hugging.entry(kind, name)
    for group_name, own in OWN.items():
        found.update({f"{group_name}/{name}": entry for name, entry in own.items()})
    for group_name, (own, libraries) in EXTRA.items():
        if all(find_spec(library) for library in libraries):
            found.update({f"{group_name}/{name}": entry for name, entry in own.items()})
    return found


VARIED = (
    "torch/encoder-causal",
    "torch/gru-both-ways",
    "vision/diffusion",
    "vision/pyramid",
    "text/mingpt",
    "text/tied-modules",
    "text/wavenet",
    "practice/nested",
    "practice/unused",
    "science/dlrm",
    "science/multi-task",
    "science/graph-edges",
    "science/real-nvp",
    "transformers/causal/OPTForCausalLM",
    "transformers/translation/T5ForConditionalGeneration",
    "transformers/masked/RobertaForMaskedLM",
)
"""Some of all shapes, to be trained in :data:`WAYS`."""

WAYS = (
    Way("zb-h1"),
    Way("gpipe"),
    Way(directive="recompute"),
    Way(directive="offload"),
    Way(replicas=2),
    Way("zb-h1", "offload", 2),
)
"""How they are trained beside the usual way."""
