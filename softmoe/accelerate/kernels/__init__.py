"""Triton kernels, each a small tiling of one product or one pass; they import triton and are loaded when first used."""
