"""Models of images and sound: those of Hugging Face unmodified, the others in the form that people write."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import PAIRS, SIZES, Case, random_everywhere, tokens
from .language import HEADS, LAYERS, VOCAB, WIDTH, Logits

VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 16,
    "patch_size": 4,
}
MELS = 8
#: Text of CLIP has one length always.
TEXT = 10


def whisper() -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=MELS,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=12,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return transformers.WhisperForConditionalGeneration(config)


def vit() -> Any:
    import transformers

    return transformers.ViTModel(transformers.ViTConfig(**VISION), add_pooling_layer=False)


class Clip(nn.Module):
    """Both towers: image and text embeddings, and how well each pair fits."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        text = {k: VISION[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
        config = transformers.CLIPConfig(
            text_config={
                **text,
                "vocab_size": VOCAB,
                "max_position_embeddings": 64,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
            vision_config=VISION,
            projection_dim=16,
        )
        self.clip = transformers.CLIPModel(config)

    def forward(self, ids: Tensor, pixels: Tensor) -> tuple[Tensor, ...]:
        out = self.clip(input_ids=ids, pixel_values=pixels)
        return out.logits_per_image, out.text_embeds, out.image_embeds


class DiTBlock(nn.Module):
    """Attention and MLP, each shifted, scaled and gated by the condition (adaLN), over a padded sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor, mask: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=1)
        h = self.norm1(x) * (1 + scale1.unsqueeze(1)) + shift1.unsqueeze(1)
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + gate1.unsqueeze(1) * self.out(h.transpose(1, 2).flatten(2))
        h = self.norm2(x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        return x + gate2.unsqueeze(1) * self.mlp(h)


class DiT(nn.Module):
    """Time embedding, two blocks; padded positions of a row are attended by nobody and come out as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 6)
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([DiTBlock() for _ in range(LAYERS)])

    def forward(self, x: Tensor, t: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.exp(-torch.arange(WIDTH // 2, device=t.device, dtype=t.dtype) / (WIDTH // 2))
        angles = t[:, None] * steps
        condition = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        mask = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        h = self.inside(x)
        for block in self.blocks:
            h = block(h, condition, mask)
        return self.outside(h) * mask.unsqueeze(-1)


def dit_calls() -> list[tuple[Any, ...]]:
    calls = []
    for b, n in PAIRS:
        lengths = torch.randint(1, n + 1, (b,))
        calls.append((torch.randn(b, n, 6), torch.rand(b), lengths))
    return calls


class ConvNet(nn.Module):
    """Convolutions with batch norm and a residual, pooled to ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.pool(torch.relu(x + self.block(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    """Down, middle, up, with group norms, a skip connection and a time embedding, as denoisers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 16))
        self.inside = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1))
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.outside = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        skip = self.inside(x)
        h = self.down(skip) + self.time(t[:, None])[:, :, None, None]
        h = self.up(h + self.middle(h))
        h = F.interpolate(h, scale_factor=1.0, mode="nearest")
        return self.outside(torch.cat([h, skip], 1))


class SpeechFrontend(nn.Module):
    """From samples to features: strided convolutions, norms over channels, and masked positions, no recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv1d(1, 16, 10, stride=5, bias=False), nn.Conv1d(16, 16, 3, stride=2)])
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)])
        self.project = nn.Linear(16, WIDTH)
        self.position = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=4)

    def forward(self, samples: Tensor) -> Tensor:
        h = (samples - samples.mean(-1, keepdim=True)).unsqueeze(1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = F.gelu(norm(conv(h).transpose(1, 2))).transpose(1, 2)
        h = self.project(h.transpose(1, 2))
        return h + F.gelu(self.position(h.transpose(1, 2))).transpose(1, 2)


def _eval(model: nn.Module) -> nn.Module:
    return random_everywhere(model).eval()


def without_tf32() -> AbstractContextManager[Any]:
    """Convolutions in full float32: TF32 keeps three digits, and which depends on the kernel."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False)


def images() -> list[tuple[Any, ...]]:
    return [(torch.randn(n, 3, 16, 16),) for n in SIZES]


BATCHES = {0: (0,), 1: (0,)}
CASES = (
    Case(
        "whisper",
        "Whisper, encoder and decoder",
        lambda: _eval(Logits(whisper(), "input_features", "decoder_input_ids", use_cache=False)),
        lambda: [(torch.randn(b, MELS, 24), tokens(b, n, VOCAB)) for b, n in PAIRS],
        {0: (0,), 1: (0, 1)},
        kernels=111,
    ),
    Case(
        "vit",
        "ViT",
        lambda: _eval(Logits(vit(), "pixel_values", output="last_hidden_state")),
        images,
        {0: (0,)},
        kernels=25,
        exact_on_cuda=False,
    ),
    Case(
        "clip",
        "CLIP, both towers",
        lambda: _eval(Clip()),
        lambda: [(tokens(b, TEXT, VOCAB), torch.randn(2 + n % 7, 3, 16, 16)) for b, n in PAIRS],
        BATCHES,
        kernels=75,
    ),
    Case(
        "dit",
        "DiT blocks with sequence padding",
        lambda: _eval(DiT()),
        dit_calls,
        {0: (0, 1), 1: (0,), 2: (0,)},
        kernels=48,
    ),
    Case(
        "convnet_eval", "convolutions, batch norm in eval mode", lambda: _eval(ConvNet()), images, {0: (0,)}, kernels=11
    ),
    Case(
        "convnet_train",
        "convolutions, batch norm in train mode",
        lambda: random_everywhere(ConvNet()),
        images,
        {0: (0,)},
        kernels=11,
    ),
    Case(
        "unet",
        "UNet, as in a denoiser",
        lambda: _eval(UNet()),
        lambda: [(torch.randn(n, 3, 8, 8), torch.rand(n)) for n in SIZES],
        BATCHES,
        kernels=14,
    ),
    Case(
        "unet_sizes",
        "UNet, images of many sizes",
        lambda: _eval(UNet()),
        lambda: [(torch.randn(b, 3, 2 * n, 8), torch.rand(b)) for b, n in PAIRS],
        {0: (0, 2), 1: (0,)},
        kernels=2,
        flops=0.0,
    ),
    Case(
        "speech_chunks",
        "strided convolutions over samples, chunks of one length",
        lambda: _eval(SpeechFrontend()),
        lambda: [(torch.randn(n, 120),) for n in SIZES],
        {0: (0,)},
        kernels=10,
    ),
    Case(
        "speech_lengths",
        "strided convolutions over samples, any length",
        lambda: _eval(SpeechFrontend()),
        lambda: [(torch.randn(b, 40 + 10 * n),) for b, n in PAIRS],
        {0: (0, 1)},
        kernels=7,
        flops=0.5,
        options={"buckets": [2, 4, 8, 64, 128, 192, 256, 320]},
        cuda_dtype=torch.float32,  # convolutions in half precision are not padded along the samples
        around=without_tf32,
    ),
)
