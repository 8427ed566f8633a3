"""Cases of convolutions, pools, losses, normalisations, images, quantisation, recurrent cells."""

from __future__ import annotations

from tests.sharding_rules.sampling import D, F, G, K, N, U, case
from whale.ir.values import DType

_WINDOW = {"ksize": (1, 2, 2, 1), "strides": (1, 2, 2, 1), "padding": "VALID"}
_CUBE = {"ksize": (1, 2, 2, 2, 1), "strides": (1, 2, 2, 2, 1), "padding": "VALID"}
_CONV = {"strides": (1, 1, 1, 1), "padding": "SAME"}
_CONV3 = {"strides": (1, 1, 1, 1, 1), "padding": "SAME"}

CONVOLUTIONS = [
    case("Conv2D", F(8, 4, 4, 4), F(3, 3, 4, 6), **_CONV),
    case("Conv2D", F(8, 5, 5, 4), F(3, 3, 4, 6), strides=(1, 2, 2, 1), padding="VALID"),
    case("Conv2D", F(8, 5, 5, 4), F(3, 3, 4, 6), **_CONV, dilations=(1, 2, 2, 1)),
    case("Conv2D", F(8, 5, 5, 4), F(3, 3, 4, 6), strides=(1, 1, 1, 1), padding="EXPLICIT", explicit_paddings=(0, 0, 1,
         0, 0, 1, 0, 0)),
    case("Conv2D", F(8, 4, 4, 4), F(3, 3, 2, 6), **_CONV),
    case("Conv2D", F(2, 8, 8, 2), F(3, 3, 2, 2), strides=(1, 2, 2, 1), padding="SAME"),
    case("Conv2D", F(2, 9, 8, 2), F(3, 5, 2, 2), strides=(1, 3, 1, 1), padding="SAME"),
    case("Conv2D", F(2, 8, 6, 2), F(3, 2, 2, 2), **_CONV, dilations=(1, 2, 2, 1)),
    case("Conv2DBackpropInput", K([2, 8, 8, 2]), F(4, 3, 2, 2), F(2, 4, 4, 2), strides=(1, 2, 2, 1), padding="SAME"),
    case("Conv2DBackpropInput", K([2, 8, 9, 2]), F(5, 4, 2, 2), F(2, 8, 3, 2), strides=(1, 1, 3, 1), padding="SAME"),
    case("Conv2DBackpropFilter", F(2, 8, 8, 2), K([5, 3, 2, 2]), F(2, 4, 4, 2), strides=(1, 2, 2, 1), padding="SAME"),
    case("DepthwiseConv2dNativeBackpropInput", K([2, 8, 8, 2]), F(3, 3, 2, 2), F(2, 4, 4, 4), strides=(1, 2, 2, 1),
         padding="SAME"),
    case("DepthwiseConv2dNativeBackpropFilter", F(2, 8, 8, 2), K([3, 3, 2, 2]), F(2, 4, 4, 4), strides=(1, 2, 2, 1),
         padding="SAME"),
    case("Conv2D", G(2, 8, 4, 2), G(3, 3, 2, 2), **_CONV),
    case("Conv2DBackpropInput", K([2, 8, 4, 2]), G(3, 3, 2, 2), G(2, 8, 4, 2), **_CONV),
    case("Conv2DBackpropFilter", G(2, 8, 4, 2), K([3, 3, 2, 2]), G(2, 8, 4, 2), **_CONV),
    case("Conv2D", F(4, 8, 4, 4), F(2, 1, 4, 6), strides=(1, 2, 1, 1), padding="SAME"),
    case("Conv2DBackpropInput", K([4, 8, 4, 4]), F(2, 1, 4, 6), F(4, 4, 4, 6), strides=(1, 2, 1, 1), padding="SAME"),
    case("Conv2DBackpropInput", K([8, 4]), F(2, 1, 4, 6), F(4, 4, 4, 6), strides=(1, 2, 1, 1), padding="SAME"),
    case("Conv2DBackpropFilter", F(4, 8, 4, 4), K([2, 1, 4, 6]), F(4, 4, 4, 6), strides=(1, 2, 1, 1), padding="SAME"),
    case("DepthwiseConv2dNative", F(4, 4, 4, 4), F(1, 1, 4, 2), strides=(1, 1, 1, 1), padding="VALID"),
    case("Conv", F(8, 4, 4, 4), F(3, 3, 4, 6), strides=(1, 1, 1, 1), padding="SAME"),
    case("Conv2DBackpropInput", K([8, 4, 4, 4]), F(3, 3, 4, 6), F(8, 4, 4, 6), **_CONV),
    case("Conv2DBackpropFilter", F(8, 4, 4, 4), K([3, 3, 4, 6]), F(8, 4, 4, 6), **_CONV),
    case("Conv3D", F(4, 3, 3, 3, 4), F(2, 2, 2, 4, 2), **_CONV3),
    case("Conv3DBackpropInputV2", K([4, 3, 3, 3, 4]), F(2, 2, 2, 4, 2), F(4, 3, 3, 3, 2), **_CONV3),
    case("Conv3DBackpropFilterV2", F(4, 3, 3, 3, 4), K([2, 2, 2, 4, 2]), F(4, 3, 3, 3, 2), **_CONV3),
    case("DepthwiseConv2dNative", F(8, 4, 4, 4), F(3, 3, 4, 2), **_CONV),
    case("DepthwiseConv2dNativeBackpropInput", K([8, 4, 4, 4]), F(3, 3, 4, 2), F(8, 4, 4, 8), **_CONV),
    case("DepthwiseConv2dNativeBackpropFilter", F(8, 4, 4, 4), K([3, 3, 4, 2]), F(8, 4, 4, 8), **_CONV),
    case("Dilation2D", F(8, 4, 4, 4), F(2, 2, 4), strides=(1, 1, 1, 1), rates=(1, 1, 1, 1), padding="SAME"),
    case("Dilation2DBackpropInput", F(8, 4, 4, 4), F(2, 2, 4), F(8, 4, 4, 4), strides=(1, 1, 1, 1), rates=(1, 1, 1,
         1), padding="SAME"),
    case("Dilation2DBackpropFilter", F(8, 4, 4, 4), F(2, 2, 4), F(8, 4, 4, 4), strides=(1, 1, 1, 1), rates=(1, 1, 1,
         1), padding="SAME"),
]  # fmt: skip

POOLS = [
    case("MaxPool", F(8, 4, 4, 4), **_WINDOW), case("AvgPool", F(8, 4, 4, 4), **_WINDOW),
    case("MaxPool", F(8, 4, 4, 4), ksize=(1, 1, 1, 2), strides=(1, 1, 1, 2), padding="VALID"),
    case("MaxPoolV2", F(8, 4, 4, 4), K([1, 2, 2, 1]), K([1, 2, 2, 1]), padding="VALID"),
    case("AvgPoolGrad", K([8, 4, 4, 4]), F(8, 2, 2, 4), **_WINDOW), case("MaxPool3D", G(4, 4, 4, 4, 2), **_CUBE),
    case("AvgPool3D", G(4, 4, 4, 4, 2), **_CUBE), case("AvgPool3DGrad", K([4, 4, 4, 4, 2]), G(4, 2, 2, 2, 2), **_CUBE),
    case("MaxPoolWithArgmax", F(4, 4, 4, 2), **_WINDOW),
    case("MaxPoolWithArgmax", F(4, 4, 4, 2), include_batch_in_index=True, **_WINDOW),
]  # fmt: skip

LOSSES = [
    case("Softmax", F(8, 5)), case("LogSoftmax", F(8, 5)), case("SoftmaxCrossEntropyWithLogits", F(8, 5), U(8, 5)),
    case("SoftmaxCrossEntropyWithLogits", F(8, 5), U(1, 5)), case("SparseSoftmaxCrossEntropyWithLogits", F(8, 5), N(8)),
    case("InTopKV2", G(8, 5), N(8), K(2)), case("InTopK", G(8, 5), N(8), k=2),
]  # fmt: skip

NORMS = [
    case("FusedBatchNormV3", G(8, 2, 2, 4), G(4), G(4), G(4), U(4, dtype="float32"), is_training=False),
    case("FusedBatchNormV3", G(8, 2, 2, 4), G(4), G(4), D([], "float32"), D([], "float32"), is_training=True),
    case("FusedBatchNorm", G(8, 2, 2, 4), G(4), G(4), G(4), U(4, dtype="float32"), is_training=False),
    case("FusedBatchNormV2", G(8, 2, 2, 4), G(4), G(4), G(4), U(4, dtype="float32"), is_training=False),
    # The last operand is read by the GPU's kernel only: not searched.
    case("FusedBatchNormGradV3", G(8, 2, 2, 4), G(8, 2, 2, 4), G(4), G(4), U(4, dtype="float32"), K(0.0, "float32"),
         is_training=False),
    case("FusedBatchNormGradV3", G(8, 2, 2, 4), G(8, 2, 2, 4), G(4), G(4), U(4, dtype="float32"), K(0.0, "float32"),
         is_training=True),
    case("LRN", G(8, 2, 2, 4)), case("LRNGrad", G(8, 2, 2, 4), G(8, 2, 2, 4), G(8, 2, 2, 4)),
]  # fmt: skip

IMAGES = [
    *(case(op, G(8, 3, 3, 4), K([5, 6]))
      for op in ("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ResizeNearestNeighbor")),
    case("ResizeBilinearGrad", G(8, 5, 6, 4), G(8, 3, 3, 4)), case("ResizeBicubicGrad", G(8, 5, 6, 4), G(8, 3, 3, 4)),
    case("ResizeNearestNeighborGrad", F(8, 5, 6, 4), K([3, 3])),
    case("ScaleAndTranslate", G(8, 3, 3, 4), K([5, 6]), D([1.5, 1.5], "float32"), D([0.0, 0.0], "float32")),
    case("ScaleAndTranslateGrad", G(8, 5, 6, 4), G(8, 3, 3, 4), D([1.5, 1.5], "float32"), D([0.0, 0.0], "float32")),
    case("CropAndResize", G(2, 5, 5, 4), U(8, 4, dtype="float32"), N(8, below=2), K([3, 3])),
    case("CropAndResizeGradImage", G(8, 3, 3, 4), U(8, 4, dtype="float32"), N(8, below=2), K([2, 5, 5, 4]),
         T=DType("float32")),
    case("CropAndResizeGradBoxes", G(8, 3, 3, 4), G(2, 5, 5, 4), U(8, 4, dtype="float32"), N(8, below=2)),
    case("AdjustContrastv2", G(8, 3, 3, 4), D(0.5, "float32")),
    case("AdjustHue", U(8, 3, 3, 3, dtype="float32"), D(0.2, "float32")),
    case("AdjustSaturation", U(8, 3, 3, 3, dtype="float32"), D(0.5, "float32")), case("RGBToHSV", U(8, 3, 3, 3)),
    case("HSVToRGB", U(8, 3, 3, 3)),
    case("DrawBoundingBoxes", U(8, 5, 5, 3, dtype="float32"), U(8, 2, 4, dtype="float32")),
    case("ExtractImagePatches", F(8, 4, 4, 2), ksizes=(1, 2, 2, 1), strides=(1, 1, 1, 1), rates=(1, 1, 1, 1),
         padding="VALID"),
    case("ExtractVolumePatches", F(4, 4, 4, 4, 2), ksizes=(1, 2, 2, 2, 1), strides=(1, 1, 1, 1, 1), padding="VALID"),
    case("ImageProjectiveTransformV2", G(8, 4, 4, 2), D([[1, 0.1, 0, 0, 1, 0, 0, 0]], "float32"), K([4, 4]),
         interpolation="BILINEAR"),
    case("ImageProjectiveTransformV3", G(4, 4, 4, 2), D([[1, 0.1, 1, 0, 1, 1, 0, 0]] * 4, "float32"), K([4, 4]),
         D(1.0, "float32"),
         interpolation="NEAREST"),
    case("CombinedNonMaxSuppression", U(8, 6, 1, 4, dtype="float32"), U(8, 6, 2, dtype="float32"), K(2), K(3), D(0.5,
         "float32"), D(0.5, "float32")),
]  # fmt: skip

QUANTISED = [
    case("FakeQuantWithMinMaxArgs", G(8, 3)),
    case("FakeQuantWithMinMaxArgsGradient", G(8, 3), G(8, 3), min=-0.5, max=0.5),
    case("FakeQuantWithMinMaxVars", G(8, 3), D(-1.0, "float32"), D(1.0, "float32")),
    case("FakeQuantWithMinMaxVarsGradient", G(8, 3), G(8, 3), D(-1.0, "float32"), D(1.0, "float32")),
    case("FakeQuantWithMinMaxVarsPerChannel", G(8, 4), D([-1.0] * 4, "float32"), D([1.0] * 4, "float32")),
    case("FakeQuantWithMinMaxVarsPerChannelGradient", G(8, 4), G(8, 4), D([-1.0] * 4, "float32"), D([1.0] * 4,
         "float32")),
    case("QuantizeAndDequantizeV2", F(8, 3), D(-1.0), D(1.0), range_given=True),
    case("QuantizeAndDequantizeV2", F(8, 3), D(-1.0), D(1.0), range_given=False),
    case("QuantizeAndDequantizeV3", F(8, 3), D(-1.0), D(1.0), D(8, "int32"), range_given=True),
]  # fmt: skip

RECURRENT = [
    case("LSTMBlockCell", G(8, 3), G(8, 4), G(8, 4), G(7, 16), G(4), G(4), G(4), G(16), search=False),
    case("LSTMBlockCellGrad", G(8, 3), G(8, 4), G(8, 4), G(7, 16), G(4), G(4), G(4), G(16), *[G(8, 4)] * 8,
         use_peephole=True, search=False),
    case("BlockLSTM", D(5, "int64"), G(5, 8, 3), G(8, 4), G(8, 4), G(7, 16), G(4), G(4), G(4), G(16), search=False),
    case("BlockLSTMV2", D(5, "int64"), G(5, 8, 3), G(8, 4), G(8, 4), G(7, 16), G(4), G(4), G(4), G(16), search=False),
    case("BlockLSTMGrad", D(5, "int64"), G(5, 8, 3), G(8, 4), G(8, 4), G(7, 16), G(4), G(4), G(4), G(16), *[G(5, 8,
         4)] * 9, use_peephole=True, search=False),
    case("GRUBlockCell", G(8, 3), G(8, 4), G(7, 8), G(7, 4), G(8), G(4), search=False),
    case("GRUBlockCellGrad", G(8, 3), G(8, 4), G(7, 8), G(7, 4), G(8), G(4), G(8, 4), G(8, 4), G(8, 4), G(8, 4),
         search=False),
]  # fmt: skip

CASES = [*CONVOLUTIONS, *POOLS, *LOSSES, *NORMS, *IMAGES, *QUANTISED, *RECURRENT]
