"""Triton kernels, each a small tiling of one product or one pass; they import triton, and nothing here is loaded
before somebody asks for it."""
