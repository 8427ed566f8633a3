"""Rules of neural networks' ops: convolutions, pooling, normalisation, recurrent kernels, losses."""
