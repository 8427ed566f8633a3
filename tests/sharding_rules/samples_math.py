"""Cases of elementwise ops, reductions, products, linear algebra, transforms, sorts."""

from __future__ import annotations

from tests.sharding_rules.sampling import D, F, G, K, M, N, T, U, Z, case
from whale.ir.values import DType

_UNARY = """Relu Relu6 Elu Selu LeakyRelu Softplus Softsign Sigmoid Tanh Exp Expm1 Sinh Asinh Atan Erf Floor Ceil Rint
    Round Sign Abs Square Cos Cosh Sin Tan Erfc BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1
    Expint Dawsn FresnelCos FresnelSin Neg Identity Snapshot StopGradient PreventGradient ZerosLike OnesLike
    L2Loss""".split()
_POSITIVE = """Log Log1p Sqrt Rsqrt Reciprocal Inv Acos Asin Atanh Lgamma Digamma Ndtri Erfinv BesselK0 BesselK0e
    BesselK1
    BesselK1e BesselY0 BesselY1 Spence""".split()
_BINARY = """AddV2 Add Sub Mul Maximum Minimum SquaredDifference Atan2 RealDiv Div DivNoNan MulNoNan FloorDiv FloorMod
    Less LessEqual Greater GreaterEqual""".split()
_POSITIVE_BINARY = "Pow Xlogy Xlog1py Igamma Igammac IgammaGradA RandomGammaGrad".split()
_GRADIENTS = """ReluGrad Relu6Grad EluGrad SeluGrad LeakyReluGrad SoftplusGrad SoftsignGrad SigmoidGrad TanhGrad
    RsqrtGrad SqrtGrad ReciprocalGrad InvGrad""".split()

POINTWISE = [
    *(case(op, F(8, 3)) for op in _UNARY),
    *(case(op, U(8, 3)) for op in _POSITIVE),
    *(case(op, F(8, 3), F(8, 3)) for op in _BINARY),
    *(case(op, F(8, 1, 3), F(4, 1)) for op in _BINARY),
    *(case(op, F(8, 3), F()) for op in ("Mul", "AddV2", "RealDiv", "Maximum")),
    *(case(op, U(8, 3), U(8, 3)) for op in _POSITIVE_BINARY),
    case("NextAfter", U(8, 3), U(8, 3), search=False),  # its result is its operand, up to what the prover can see
    *(case(op, F(8, 3), F(8, 3)) for op in _GRADIENTS[:5]),
    *(case(op, U(8, 3), U(8, 3)) for op in _GRADIENTS[5:]),
    case("Zeta", U(8, 3, low=1.5, high=3.0), U(8, 3)),
    case("Polygamma", N(8, 3, below=3, low=1, dtype="float64"), U(8, 3)),
    case("Betainc", U(8, 3), U(8, 3), U(8, 3)),
    *(case(op, N(8, 3, dtype="float64"), N(3, dtype="float64")) for op in ("Equal", "NotEqual")),
    # Not searched: what the parts of a sum are says nothing sure about the sum, which may overflow or cancel.
    *(case(op, D([[0.5, float("inf"), float("nan")]] * 8), search=False) for op in ("IsFinite", "IsInf", "IsNan")),
    case("Acosh", U(8, 3, low=1.1, high=3.0)),
    case("Invert", N(8, 3)), case("PopulationCount", N(8, 3)), case("BitwiseAnd", N(8, 3), N(8, 3)),
    case("BitwiseOr", N(8, 3), N(8, 3)), case("BitwiseXor", N(8, 3), N(8, 3)), case("LeftShift", N(8, 3), N(8, 3)),
    case("RightShift", N(8, 3), N(8, 3)), case("TruncateMod", F(8, 3), U(8, 3)), case("Mod", N(8, 3), N(8, 3, low=1)),
    case("TruncateDiv", N(8, 3), N(8, 3, low=1)), case("AddV2", N(8, 3), N(3)), case("Mul", N(8, 3), N(3)),
    case("LogicalAnd", T(8, 3), T(3)), case("LogicalOr", T(8, 3), T(3)), case("LogicalNot", T(8, 3)),
    case("ApproximateEqual", F(8, 3), F(8, 3), tolerance=0.5),
    case("Select", T(8, 3), F(8, 3), F(8, 3)), case("Select", T(8), F(8, 3), F(8, 3)),
    case("Select", T(), F(8, 3), F(8, 3)),
    case("SelectV2", T(8, 1), F(8, 3), F(3)), case("SelectV2", T(8, 3), F(), F(8, 3)),
    case("ClipByValue", F(8, 3), D(-0.5), D(0.5)), case("ClipByValue", F(8, 3), U(8, 3), U(8, 3)),
    case("Cast", F(8, 3), DstT=DType("float32")), case("Cast", F(8, 3), DstT=DType("int32")),
    case("Cast", N(8, 3), DstT=DType("float64")), case("Cast", T(8, 3), DstT=DType("float64")),
    case("Complex", F(8, 3), F(8, 3), Tout=DType("complex128")), case("Real", Z(8, 3), Tout=DType("float64")),
    case("Imag", Z(8, 3), Tout=DType("float64")), case("Conj", Z(8, 3)), case("Angle", Z(8, 3), Tout=DType("float64")),
    case("ComplexAbs", Z(8, 3), Tout=DType("float64")), case("Mul", Z(8, 3), Z(3)),
    case("AddN", F(8, 3), F(8, 3), F(8, 3)),
    case("CheckNumerics", F(8, 3), message="bad"), case("EnsureShape", F(8, 3), shape=(None, None)),
    case("PlaceholderWithDefault", F(8, 3), shape=(None, None)),
    case("IdentityN", F(8, 3), F(4), search=False),
    case("Bitcast", F(8, 3), type=DType("int64")), case("Bitcast", F(8, 3), type=DType("int32")),
    case("Bitcast", N(8, 2), type=DType("int64")), case("Bucketize", F(8, 3), boundaries=(0.0, 0.5)),
    case("AsString", N(8, 3)),
]  # fmt: skip

REDUCTIONS = [
    *(case(op, F(8, 4, 3), K(axes), keep_dims=keep)
      for op in ("Sum", "Mean", "Max", "Min", "Prod", "EuclideanNorm")
      for axes, keep in (([0], False), ([0, 2], True), ([-1], False), ([], False))),
    # Axes that are no constants: not searched, since what agrees does so for these axes only.
    *(case(op, F(8, 4), D([0, 1], "int32"), search=False) for op in ("Sum", "Mean", "Max")),
    *(case(op, F(8, 4), D([0], "int32"), keep_dims=True, search=False) for op in ("Sum", "Mean", "Min")),
    *(case(op, F(4, 8), D([0], "int32"), search=False) for op in ("Sum", "Mean")),
    *(case(op, T(8, 3), K([0])) for op in ("All", "Any")), *(case(op, T(8, 3), K([0, 1])) for op in ("All", "Any")),
    *(case(op, N(8, 3), K([0])) for op in ("Sum", "Mean", "Max", "Min", "Prod")),
    *(case(op, F(8, 5), K(axis)) for op in ("ArgMax", "ArgMin") for axis in (1, 0, -1)),
]  # fmt: skip

PRODUCTS = [
    *(case("MatMul", F(*((6, 8) if a else (8, 6))), F(*((4, 6) if b else (6, 4))), transpose_a=a, transpose_b=b)
      for a in (False, True) for b in (False, True)),
    case("BatchMatMul", F(4, 8, 6), F(4, 6, 2)), case("BatchMatMulV2", F(4, 8, 6), F(6, 2)),
    case("BatchMatMulV2", F(4, 1, 8, 6), F(2, 8, 6), adj_y=True),
    case("BatchMatMulV2", Z(4, 6, 8), Z(4, 6, 2), adj_x=True),
    case("BatchMatMulV3", F(4, 8, 6), F(4, 6, 2), Tout=DType("float64")), case("SparseMatMul", G(8, 6), G(6, 4)),
    case("Einsum", F(8, 6), F(6, 4), equation="ab,bc->ac"),
    case("Einsum", F(8, 4, 6), F(6, 2), equation="...a,ab->...b"),
    case("Einsum", F(8, 6), equation="ab->b"), case("Einsum", F(8, 6), equation="ab->ba"),
    case("Einsum", F(4, 6, 2), F(4, 8, 2), equation="bqd,bkd->bqk"), case("Einsum", F(4, 4, 2), equation="aab->ab"),
    case("Einsum", F(4, 8), F(4, 8), equation="ab,ab->"),
    case("Einsum", F(8, 1, 3), F(4, 3), equation="...a,...a->..."),
    case("BiasAdd", F(8, 3, 4), F(4)), case("BiasAdd", F(8, 4, 3, 3), F(4), data_format="NCHW"),
    case("BiasAddV1", F(8, 4), F(4)),
    case("BiasAddGrad", F(8, 3, 4)), case("BiasAddGrad", F(8, 4, 3, 3), data_format="NCHW"),
    case("Cross", F(8, 3), F(8, 3)),
    case("SparseTensorDenseMatMul", D([[0, 1], [2, 3], [4, 0]], "int64"), F(3), D([5, 4], "int64"), F(4, 6)),
    case("SparseTensorDenseMatMul", D([[0, 1], [2, 3], [4, 0]], "int64"), F(3), D([5, 4], "int64"), F(6, 4),
         adjoint_b=True),
]  # fmt: skip

LINALG = [
    *(case(op, M(4, 3, 3)) for op in ("Cholesky", "MatrixInverse", "MatrixSquareRoot", "MatrixDeterminant",
                                      "LogMatrixDeterminant", "Qr", "Svd", "SelfAdjointEigV2", "Lu")),
    case("MatrixLogarithm", Z(4, 3, 3)), case("CholeskyGrad", M(4, 3, 3), M(4, 3, 3)),

    case("MatrixSolve", M(4, 3, 3), F(4, 3, 2)), case("MatrixTriangularSolve", M(4, 3, 3), F(4, 3, 2)),
    case("MatrixSolveLs", F(4, 5, 3), F(4, 5, 2), D(0.0)), case("MatrixTriangularSolve", M(3, 3), F(4, 3, 2)),
    case("BandedTriangularSolve", U(4, 2, 3), F(4, 3, 2)), case("TridiagonalSolve", U(4, 3, 3), F(4, 3, 2)),
    case("TridiagonalMatMul", F(4, 1, 3), F(4, 1, 3), F(4, 1, 3), F(4, 3, 2)),
    case("MatrixBandPart", F(4, 3, 3), K(1, "int64"), K(0, "int64")), case("MatrixDiag", F(4, 3)),
    case("MatrixDiagPart", F(4, 3, 3)),
    case("MatrixSetDiag", F(4, 3, 3), F(4, 3)), case("Diag", F(4)), case("DiagPart", F(4, 4)),
    case("MatrixDiagV3", F(4, 3), K(0), K(-1), K(-1), K(0.0, "float64")),
    case("MatrixDiagV3", F(4, 2, 3), K([0, 1]), K(-1), K(-1), D(2.0)),
    case("MatrixDiagV2", F(4, 3), K(0), K(-1), K(-1), K(0.0, "float64")),
    case("MatrixDiagPartV2", F(4, 3, 3), K(0), K(0.0, "float64")),
    case("MatrixDiagPartV3", F(4, 3, 3), K(0), K(0.0, "float64")),
    case("MatrixDiagPartV3", F(4, 3, 3), K([0, 1]), K(0.0, "float64")),
    case("MatrixSetDiagV3", F(4, 3, 3), F(4, 3), K(0)), case("MatrixSetDiagV3", F(4, 3, 3), F(4, 2, 3), K([0, 1])),
    case("MatrixSetDiagV2", F(4, 3, 3), F(4, 3), K(0)), case("Eig", M(4, 3, 3), Tout=DType("complex128")),
    case("FFT", Z(8, 4)), case("IFFT", Z(8, 4)), case("FFT2D", Z(8, 4, 4)), case("IFFT2D", Z(8, 4, 4)),
    case("FFT3D", Z(8, 2, 4, 4)),
    case("IFFT3D", Z(8, 2, 4, 4)), case("RFFT", F(8, 4), K([4]), Tcomplex=DType("complex128")),
    case("IRFFT", Z(8, 3), K([4]), Treal=DType("float64")),
    case("RFFT2D", F(8, 4, 4), K([4, 4]), Tcomplex=DType("complex128")),
    case("IRFFT2D", Z(8, 4, 3), K([4, 4]), Treal=DType("float64")),
    case("RFFT3D", F(4, 2, 4, 4), K([2, 4, 4]), Tcomplex=DType("complex128")),
    case("IRFFT3D", Z(4, 2, 4, 3), K([2, 4, 4]), Treal=DType("float64")),
]  # fmt: skip

SORTS = [
    *(case(op, F(8, 5), K(axis)) for op in ("Cumsum", "Cumprod", "CumulativeLogsumexp") for axis in (0, -1)),
    case("Cumsum", F(8, 5), D(1, "int32"), reverse=True, search=False),
    case("TopKV2", F(8, 5), K(2)), case("NthElement", F(8, 5), K(2)),
    case("IsotonicRegression", F(8, 5), output_dtype=DType("float64")),
    case("ApproxTopK", G(8, 5), k=2), case("LowerBound", D([[1, 2, 3]] * 4), F(4, 5)),
    case("UpperBound", D([[1, 2, 3]] * 4), F(4, 5)),
]  # fmt: skip

CASES = [*POINTWISE, *REDUCTIONS, *PRODUCTS, *LINALG, *SORTS]
