"""The models of ``python -m benchmarks zoo``: how each is built with random weights, and what it is given.

Nothing is downloaded. Widths are those of models that are in use; of the language models there are fewer layers than
these have. Each is built in one of two sizes: the tiny one shows on the CPU that it runs.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = dict[str, Any]
Builder = Callable[[bool], nn.Module]


@dataclass(frozen=True)
class Model:
    """build: makes it, tiny or not. inputs: the keywords of a call, on the CPU, of so many samples, tiny or not.
    loss: of the result and the keywords. small, large, training: batches. inference: keywords that are given without
    gradients alone. decodes: a causal language model, which has a cache. routed: a small error may choose another
    expert. channels_last: its images lie in memory as torch's convolutions are fastest. result: of what it returns."""

    name: str
    build: Builder
    inputs: Callable[[bool, int], Inputs]
    loss: Callable[[Tensor, Inputs], Tensor]
    small: int = 1
    large: int = 32
    training: int = 16
    inference: Mapping[str, Any] = field(default_factory=dict)
    decodes: bool = False
    routed: bool = False
    channels_last: bool = False
    result: Callable[[Any], Tensor] = lambda output: output if isinstance(output, Tensor) else output[0]

    def make(self, device: str, dtype: torch.dtype, is_tiny: bool) -> nn.Module:
        """With random weights, made on the device, which takes less time than on the CPU."""
        torch.manual_seed(0)
        with torch.device(device):
            module = self.build(is_tiny)
        module = module.to(device, dtype)
        if self.channels_last:
            module = module.to(memory_format=torch.channels_last)
        self._set_statistics(module, self.arguments(device, dtype, is_tiny, 8))
        return module.eval()

    def arguments(self, device: str, dtype: torch.dtype, is_tiny: bool, batch: int) -> Inputs:
        """The keywords of a call."""
        torch.manual_seed(batch)
        return {name: self._placed(x, device, dtype) for name, x in self.inputs(is_tiny, batch).items()}

    def _placed(self, x: Any, device: str, dtype: torch.dtype) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.to(device, dtype if x.is_floating_point() else x.dtype)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    @torch.no_grad()
    def _set_statistics(self, module: nn.Module, inputs: Inputs) -> None:
        """Batch norms are given the statistics of a batch: without any, the values of a deep model with random weights
        vanish or overflow in eval mode."""
        norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 1.0
        module.train()(**inputs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


# --- Losses ---


def next_token(logits: Tensor, inputs: Inputs) -> Tensor:
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def same_token(logits: Tensor, inputs: Inputs) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), inputs["input_ids"].flatten())


def one_class(logits: Tensor, inputs: Inputs) -> Tensor:
    labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return F.cross_entropy(logits.float(), labels)


def distance(result: Tensor, inputs: Inputs) -> Tensor:
    """From values that are spread evenly: after a norm, the distance from zero would be the same for all weights."""
    wanted = torch.linspace(-1, 1, result.numel(), device=result.device).view(result.shape)
    return F.mse_loss(result.float(), wanted)


# --- transformers ---


def transformer(name: str, config: str, real: Inputs, tiny: Inputs, **both: Any) -> Builder:
    """Of a class of transformers and that of its config, without dropout, so that results of training compare."""

    def build(is_tiny: bool) -> nn.Module:
        transformers = importlib.import_module("transformers")
        settings = getattr(transformers, config)(**copy.deepcopy({**both, **(tiny if is_tiny else real)}))
        for key, value in list(vars(settings).items()):
            if "drop" in key and isinstance(value, float):
                setattr(settings, key, 0.0)
        return getattr(transformers, name)(settings)

    return build


def tokens(is_tiny: bool, batch: int, *, length: int, vocabulary: int = 30_000, **more: Any) -> Inputs:
    """Of a text; 100 words and 24 places in a tiny one."""
    length, vocabulary = (24, 100) if is_tiny else (length, vocabulary)
    return {"input_ids": torch.randint(3, vocabulary, (batch, length)), **more}


def translation(is_tiny: bool, batch: int) -> Inputs:
    inputs = tokens(is_tiny, batch, length=512, use_cache=False)
    return inputs | {"decoder_input_ids": tokens(is_tiny, batch, length=128)["input_ids"]}


def spectrogram(is_tiny: bool, batch: int) -> Inputs:
    """Thirty seconds of speech, and the start of what was said."""
    features = torch.randn(batch, 80, 64 if is_tiny else 3000)
    ids = tokens(is_tiny, batch, length=64)["input_ids"]
    return {"input_features": features, "decoder_input_ids": ids, "use_cache": False}


def sound(is_tiny: bool, batch: int) -> Inputs:
    """Five seconds at 16 kHz."""
    return {"input_values": torch.randn(batch, 4000 if is_tiny else 80_000)}


def images(is_tiny: bool, batch: int, *, name: str = "x", tiny: int = 64) -> Inputs:
    size = tiny if is_tiny else 224
    return {name: torch.randn(batch, 3, size, size)}


def captioned(is_tiny: bool, batch: int) -> Inputs:
    text = tokens(is_tiny, batch, length=77)
    return text | images(is_tiny, batch, name="pixel_values", tiny=32)


SMALL = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
SMALL_DECODER = dict(SMALL, num_key_value_heads=2, head_dim=16)
SDPA = dict(attn_implementation="sdpa")


def encoder(name: str, prefix: str, real: Inputs, **both: Any) -> Model:
    """Of text, with a head for masked words."""
    real = dict(real, num_hidden_layers=6)
    build = transformer(f"{prefix}ForMaskedLM", f"{prefix}Config", real, SMALL, **SDPA, **both)
    return Model(name, build, partial(tokens, length=512), same_token)


def decoder(
    name: str,
    prefix: str,
    real: Inputs,
    tiny: Inputs,
    config: str = "",
    head: str = "ForCausalLM",
    routed: bool = False,
    **both: Any,
) -> Model:
    """A causal language model: a prefill asks for the logits of the last token alone."""
    made = transformer(f"{prefix}{head}", config or f"{prefix}Config", real, tiny, **SDPA, **both)
    inputs = partial(tokens, length=1024, use_cache=False)
    return Model(
        name, made, inputs, next_token, large=8, training=4, inference={"logits_to_keep": 1}, decodes=True,
        routed=routed,
    )  # fmt: skip


# --- timm and torchvision ---


def of_timm(name: str, **tiny: Any) -> Builder:
    def build(is_tiny: bool) -> nn.Module:
        timm = importlib.import_module("timm")
        return timm.create_model(name, pretrained=False, drop_rate=0.0, drop_path_rate=0.0, **(tiny if is_tiny else {}))

    return build


def of_torchvision(name: str, **settings: Any) -> Builder:
    def build(is_tiny: bool) -> nn.Module:
        return getattr(importlib.import_module("torchvision.models"), name)(**settings)

    return build


def convolutional(name: str, build: Builder) -> Model:
    return Model(name, build, images, one_class, large=64, training=32, channels_last=True)


# --- Of torch alone ---


class Residual(nn.Module):
    """Two convolutions after group norms, with the time step between them, and a way around both."""

    def __init__(self, inputs: int, outputs: int, time: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.around = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.around(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Of all places of an image, in heads of 64 channels."""

    def __init__(self, channels: int):
        super().__init__()
        self.heads = max(1, channels // 64)
        self.norm = nn.GroupNorm(32, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        places = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(places).view(n, height * width, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, height * width, channels)
        return x + self.out(mixed).transpose(1, 2).reshape(n, channels, height, width)


class UNet(nn.Module):
    """What predicts the noise in diffusion: down to a quarter of each side and up again, with attention below the full
    size."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        widths = (width, 2 * width, 4 * width)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        kept, at = [width], width
        for level, wide in enumerate(widths):
            for _ in range(2):
                self.down.append(self._level(at, wide, level))
                kept.append(at := wide)
            if level < 2:
                self.down.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                kept.append(wide)
        self.middle = nn.ModuleList([Residual(at, at, 4 * width), Attention(at), Residual(at, at, 4 * width)])
        for level, wide in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(self._level(at + kept.pop(), wide, level))
                at = wide
            if level:
                self.up.append(nn.Conv2d(wide, wide, 3, padding=1))
        self.norm, self.last = nn.GroupNorm(32, width), nn.Conv2d(width, channels, 3, padding=1)

    def _level(self, inputs: int, outputs: int, level: int) -> nn.Module:
        residual = Residual(inputs, outputs, 4 * self.width)
        return nn.ModuleList([residual, Attention(outputs)] if level else [residual])

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(10_000) / half))
        angles = steps[:, None] * rates
        time = self.time(torch.cat((angles.sin(), angles.cos()), 1).to(x.dtype))
        x = self.first(x)
        kept = [x]
        for part in self.down:
            x = self._run(part, x, time)
            kept.append(x)
        x = self._run(self.middle, x, time)
        for part in self.up:
            if isinstance(part, nn.Conv2d):
                x = part(F.interpolate(x, scale_factor=2.0, mode="nearest"))
            else:
                x = self._run(part, torch.cat((x, kept.pop()), 1), time)
        return self.last(F.silu(self.norm(x)))

    def _run(self, part: nn.Module, x: Tensor, time: Tensor) -> Tensor:
        if isinstance(part, nn.Conv2d):
            return part(x)
        for one in part:  # type: ignore[attr-defined]
            x = one(x, time) if isinstance(one, Residual) else one(x)
        return x


def latents(is_tiny: bool, batch: int) -> Inputs:
    size = 8 if is_tiny else 64
    return {"x": torch.randn(batch, 4, size, size), "steps": torch.randint(0, 1000, (batch,))}


class Recommender(nn.Module):
    """As DLRM: dense features through a small network, bags of categories from tables, products of all pairs of these,
    and a network that scores them."""

    DENSE, TABLES, BAG = 13, 26, 4

    def __init__(self, rows: int, width: int):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, width, mode="sum") for _ in range(self.TABLES)])
        self.below = perceptron(self.DENSE, 512, 256, width)
        pairs = torch.triu_indices(self.TABLES + 1, self.TABLES + 1, offset=1)
        self.register_buffer("pairs", pairs[0] * (self.TABLES + 1) + pairs[1])
        self.above = perceptron(width + pairs.shape[1], 1024, 512, 256)
        self.score = nn.Linear(256, 1)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        x = self.below(dense)
        bags = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack((x, *bags), 1)
        products = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return self.score(self.above(torch.cat((x, products.index_select(1, self.pairs)), 1)))


def perceptron(*widths: int) -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def visits(is_tiny: bool, batch: int) -> Inputs:
    categories = torch.randint(0, 100 if is_tiny else 20_000, (batch, Recommender.TABLES, Recommender.BAG))
    return {"dense": torch.randn(batch, Recommender.DENSE), "categories": categories}


# --- All of them ---

BERT = dict(hidden_size=768, num_attention_heads=12)
LAYERS = dict(vocab_size=32000, num_hidden_layers=4)
LLAMA = dict(LAYERS, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8)
QWEN3 = dict(LAYERS, hidden_size=2048, intermediate_size=6144, num_attention_heads=16, num_key_value_heads=8)
GEMMA3 = dict(LAYERS, hidden_size=1152, intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1)
MIXTRAL = dict(LAYERS, hidden_size=2048, intermediate_size=7168, num_attention_heads=32, num_key_value_heads=8)
QWEN3_MOE = dict(LAYERS, hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128)
T5 = dict(vocab_size=32000, d_model=768, d_kv=64, d_ff=2048, num_layers=6, num_heads=12)
WHISPER = dict(vocab_size=32000, d_model=512, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
SMALL_WHISPER = dict(vocab_size=100, d_model=64, encoder_ffn_dim=128, decoder_ffn_dim=128, max_source_positions=32)
SMALL_SOUND = dict(SMALL, conv_dim=(16,) * 7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)
CLIP = dict(vision_config=dict(image_size=224, patch_size=32))
SMALL_CLIP = dict(
    text_config=dict(SMALL, projection_dim=32),
    vision_config=dict(SMALL, image_size=32, patch_size=8, projection_dim=32),
    projection_dim=32,
)
VIT = dict(image_size=224, num_hidden_layers=12, num_labels=1000)

MODELS = (
    encoder("bert", "Bert", dict(BERT, intermediate_size=3072)),
    encoder("modernbert", "ModernBert", dict(BERT, intermediate_size=1152), pad_token_id=0, reference_compile=False),
    Model(
        "t5",
        transformer(
            "T5ForConditionalGeneration", "T5Config", T5,
            dict(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
            feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        ),
        translation, next_token,
    ),
    decoder(
        "gpt2", "GPT2", dict(n_embd=1024, n_layer=6, n_head=16),
        dict(vocab_size=100, n_embd=64, n_layer=2, n_head=4), head="LMHeadModel", n_positions=2048,
    ),
    decoder("llama", "Llama", LLAMA, SMALL_DECODER),
    decoder("qwen3", "Qwen3", dict(QWEN3, head_dim=128), SMALL_DECODER),
    decoder("gemma3", "Gemma3", dict(GEMMA3, num_hidden_layers=6, head_dim=256), SMALL_DECODER, "Gemma3TextConfig",
            pad_token_id=0),
    decoder("mixtral", "Mixtral", dict(MIXTRAL, num_hidden_layers=2), SMALL_DECODER, routed=True),
    decoder(
        "qwen3_moe", "Qwen3Moe", dict(QWEN3_MOE, num_hidden_layers=2, moe_intermediate_size=768, num_experts=64),
        dict(SMALL_DECODER, moe_intermediate_size=32, num_experts=16), routed=True,
    ),
    Model(
        "whisper",
        transformer(
            "WhisperForConditionalGeneration", "WhisperConfig",
            WHISPER | dict.fromkeys(("encoder_layers", "decoder_layers"), 6)
            | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 8),
            SMALL_WHISPER | dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
            | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **SDPA,
        ),
        spectrogram, next_token, large=16, training=8,
    ),
    Model(
        "wav2vec2",
        transformer("Wav2Vec2Model", "Wav2Vec2Config", dict(num_hidden_layers=6), SMALL_SOUND,
                    apply_spec_augment=False, **SDPA),
        sound, distance, large=16, training=8,
    ),
    Model(
        "clip", transformer("CLIPModel", "CLIPConfig", CLIP, SMALL_CLIP), captioned, distance,
        result=lambda output: torch.cat((output.text_embeds, output.image_embeds)),
    ),
    Model(
        "vit",
        transformer("ViTForImageClassification", "ViTConfig", VIT, dict(SMALL, image_size=32, patch_size=8), **SDPA),
        partial(images, name="pixel_values", tiny=32), one_class, large=64, training=32,
    ),
    Model(
        "deit", of_timm("deit_small_patch16_224", img_size=64, embed_dim=64, depth=2, num_heads=4), images, one_class,
        large=64, training=32,
    ),
    Model(
        "swin",
        of_timm("swin_tiny_patch4_window7_224", img_size=64, embed_dim=32, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)),
        images, one_class, large=64, training=32,
    ),
    convolutional("convnext", of_timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(16, 32, 48, 64))),
    convolutional("resnet50", of_torchvision("resnet50")),
    convolutional("efficientnet", of_torchvision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0)),
    convolutional("regnet", of_torchvision("regnet_y_1_6gf")),
    convolutional("mobilenet", of_torchvision("mobilenet_v3_large", dropout=0.0)),
    Model(
        "unet", lambda is_tiny: UNet(4, 32 if is_tiny else 192), latents, distance, large=16, training=8,
        channels_last=True,
    ),
    Model(
        "recommender", lambda is_tiny: Recommender(*(100, 16) if is_tiny else (20_000, 64)), visits, distance,
        large=4096, training=4096,
    ),
)  # fmt: skip
