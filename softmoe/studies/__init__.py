"""Experiments that train several runs and compare them."""
