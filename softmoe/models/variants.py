"""The size table: letter -> width, depth, MLP width, heads. Ti to H as in the paper; g and G for its collapse study."""

SIZES: dict[str, tuple[int, int, int, int]] = {
    "ti": (192, 12, 768, 3),
    "s": (384, 12, 1536, 6),
    "b": (768, 12, 3072, 12),
    "l": (1024, 24, 4096, 16),
    "h": (1280, 32, 5120, 16),
    "g": (1408, 40, 6144, 16),
    "G": (1664, 48, 8192, 16),
}

PAPER_MODELS: tuple[str, ...] = (  # the long runs of the paper, dense and Soft MoE
    "vit_s16",
    "vit_b16",
    "vit_l16",
    "vit_h14",
    "soft_s16_128e",
    "soft_s14_256e",
    "soft_b16_128e",
    "soft_l16_128e",
    "soft_h14_128e",
    "soft_h14_256e",
)
