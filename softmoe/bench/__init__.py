"""Where every speed claim lives: interleaved medians, with the fraction of the machine's roofline in every row."""
