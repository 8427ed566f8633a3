"""Fourier transforms: linear, over the innermost dimensions."""

from __future__ import annotations

from whale.sharding_rules.registry import rule

RULES = (
    rule("FFT IFFT BatchFFT BatchIFFT", "* a^ -> * a^", lin="0"),
    rule("FFT2D IFFT2D BatchFFT2D BatchIFFT2D", "* a^ b^ -> * a^ b^", lin="0"),
    rule("FFT3D IFFT3D BatchFFT3D BatchIFFT3D", "* a^ b^ c^ -> * a^ b^ c^", lin="0"),
    rule("RFFT IRFFT", "* a^, . -> * x^", lin="0"),
    rule("RFFT2D IRFFT2D", "* a^ b^, . -> * x^ y^", lin="0"),
    rule("RFFT3D IRFFT3D", "* a^ b^ c^, . -> * x^ y^ z^", lin="0"),
)
