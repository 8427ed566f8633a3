"""Rules of arithmetic: elementwise, linear, reductions, matrix products, random."""
