"""Defines sharding rules of matrix decompositions and solvers: by batches of matrices, and columns of right-hand
sides.
"""

from __future__ import annotations

from whale.sharding_rules.base import OpView
from whale.sharding_rules.notation import REPLICATED
from whale.sharding_rules.registry import rule


def svd(op: OpView) -> str:
    """Writes the sharding rule of Svd, from ``compute_uv``."""
    return "* m^ n^ -> * p^, * a^ b^, * c^ d^" if op.attr("compute_uv", True) else "* m^ n^ -> * p^, =., =."


def eigen(op: OpView) -> str:
    """Writes the sharding rule of eigenvalue ops, from ``compute_v``."""
    return "* m^ n^ -> * n^, * m^ n^" if op.attr("compute_v", True) else "* m^ n^ -> * n^, =."


def _write_diagonal(
    op: OpView, matrix: tuple[int | None, ...] | None, diagonal: tuple[int | None, ...] | None
) -> str | None:
    """Writes the term of one diagonal, or of a band of diagonals; None if a rank is unknown."""
    if matrix is None or diagonal is None:
        return None
    return "* d^" if len(diagonal) < len(matrix) else "* e^ d^"


def diag(op: OpView) -> str:
    """Writes the sharding rule of MatrixDiagV3, for one diagonal or a band."""
    part = _write_diagonal(op, op.outputs[0].shape, op.inputs[0].shape)
    return REPLICATED if part is None else f"{part}, ., ., ., . -> * m^ n^"


def diag_part(op: OpView) -> str:
    """Writes the sharding rule of MatrixDiagPartV3, for one diagonal or a band."""
    part = _write_diagonal(op, op.inputs[0].shape, op.outputs[0].shape)
    return REPLICATED if part is None else f"* m^ n^, ., . -> {part}"


def set_diag(op: OpView) -> str:
    """Writes the sharding rule of MatrixSetDiagV3, for one diagonal or a band."""
    part = _write_diagonal(op, op.inputs[0].shape, op.inputs[1].shape)
    return REPLICATED if part is None else f"* m^ n^, {part}, . -> * m^ n^"


def _find_linear_diagonals(op: OpView) -> str | None:
    """Returns ``lin`` of MatrixDiagV3 and MatrixDiagPartV3: partial sums pass operand 0 if the padding value is a
    constant zero, else None.
    """
    last = len(op.inputs) - 1
    padding = op.const(last)
    return "0" if padding is not None and not padding.any() else None


_MATRIX = "* m^ n^ -> * m^ n^"
_SOLVE = "* m^ n^, * n^ k -> * n^ k"

RULES = (
    rule(
        "Cholesky MatrixInverse MatrixExponential MatrixLogarithm MatrixSquareRoot BatchCholesky BatchMatrixInverse",
        _MATRIX,
    ),
    rule("CholeskyGrad BatchCholeskyGrad", "* m^ n^, * m^ n^ -> * m^ n^", lin="1"),
    rule("MatrixDeterminant BatchMatrixDeterminant", "* m^ n^ -> *"),
    rule("LogMatrixDeterminant", "* m^ n^ -> *, *"),
    rule("MatrixSolve MatrixTriangularSolve BatchMatrixSolve BatchMatrixTriangularSolve", _SOLVE, lin="1"),
    rule("MatrixSolveLs BatchMatrixSolveLs", "* m^ n^, * m^ k, . -> * n^ k", lin="1"),
    rule("BandedTriangularSolve TridiagonalSolve", "* d^ n^, * n^ k -> * n^ k", lin="1"),
    rule("TridiagonalMatMul", "* 1 n^, * 1 n^, * 1 n^, * n^ k -> * n^ k", lin="0&1&2|3"),
    rule("Qr", "* m^ n^ -> * m^ p^, * q^ n^"),
    rule("Svd BatchSvd", svd),
    rule("SelfAdjointEigV2 Eig BatchSelfAdjointEigV2", eigen),
    rule("Lu", "* m^ n^ -> * m^ n^, * m^"),
    rule("MatrixBandPart BatchMatrixBandPart", "* m^ n^, ., . -> * m^ n^", lin="0"),
    rule("MatrixDiag BatchMatrixDiag", "* d^ -> * d^ n^", lin="0"),
    rule("MatrixDiagPart BatchMatrixDiagPart", "* m^ n^ -> * d^", copy="0"),
    rule("MatrixSetDiag BatchMatrixSetDiag", "* m^ n^, * d^ -> * m^ n^", copy="0&1"),
    rule("MatrixDiagV2 MatrixDiagV3", diag, lin=_find_linear_diagonals, copy="0&4"),
    rule("MatrixDiagPartV2 MatrixDiagPartV3", diag_part, lin=_find_linear_diagonals, copy="0&2"),
    rule("MatrixSetDiagV2 MatrixSetDiagV3", set_diag, copy="0&1"),
    rule("Diag", "i*^ -> o*^", lin="0"),
    rule("DiagPart", "i*^ -> o*^", copy="0"),
    rule("FFT IFFT BatchFFT BatchIFFT", "* a^ -> * a^", lin="0"),
    rule("FFT2D IFFT2D BatchFFT2D BatchIFFT2D", "* a^ b^ -> * a^ b^", lin="0"),
    rule("FFT3D IFFT3D BatchFFT3D BatchIFFT3D", "* a^ b^ c^ -> * a^ b^ c^", lin="0"),
    rule("RFFT IRFFT", "* a^, . -> * x^", lin="0"),
    rule("RFFT2D IRFFT2D", "* a^ b^, . -> * x^ y^", lin="0"),
    rule("RFFT3D IRFFT3D", "* a^ b^ c^, . -> * x^ y^ z^", lin="0"),
)
