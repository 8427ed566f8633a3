"""Cases of ops that move, slice, gather and scatter elements."""

from __future__ import annotations

import numpy as np

from tests.sharding_rules.sampling import Arg, D, F, K, N, case
from whale.ir.marks import Marks

SHAPES = [
    case("Reshape", F(8, 6), K([48])), case("Reshape", F(8, 6), K([4, 2, 6])), case("Reshape", F(4, 2, 6), K([8, 6])),
    case("Reshape", F(8, 6), K([8, 2, 3])), case("Reshape", F(8, 6), K([12, 4])),
    case("Reshape", F(8, 1, 6), K([8, 6, 1])), case("Reshape", F(1, 6, 4), K([24])),
    case("Reshape", F(12, 2), K([1, 3, 4, 2])),
    case("Reshape", F(6, 4, 2), K([6, 8])), case("Reshape", F(8), D([2, 4], "int64")),
    case("Reshape", F(8, 3, 4), K([-1, 4])),
    case("ExpandDims", F(8, 3), K(0)), case("ExpandDims", F(8, 3), K(-1)), case("ExpandDims", F(8, 3), K(1)),
    case("Squeeze", F(8, 1, 3)), case("Squeeze", F(8, 1, 1, 3), squeeze_dims=(1,)),
    case("Transpose", F(8, 4, 3), K([1, 0, 2])), case("Transpose", F(8, 4), K([1, 0])),
    case("ConjugateTranspose", F(8, 4), K([1, 0])),
    case("ConcatV2", F(8, 3), F(8, 2), K(1)), case("ConcatV2", F(8, 3), F(8, 3), K(-1)),
    case("ConcatV2", F(4, 3), F(8, 3), K(0)), case("ConcatV2", F(6, 2), F(6, 2), F(12, 2), K(0)),
    case("SplitV", F(18, 2), K([6, 12]), K(0), num_split=2), case("Tile", F(6, 2), K([3, 2])),
    case("Slice", F(12, 5), K([6, 0]), K([6, 5])), case("Slice", F(18, 2), K([6, 0]), K([-1, 2])),
    case("StridedSlice", F(12, 5), K([-6]), K([0]), K([1]), end_mask=1),
    case("StridedSlice", F(18, 5), K([6, 0]), K([12, 5]), K([1, 1])),
    case("StridedSliceGrad", K([12, 5]), K([0]), K([6]), K([1]), F(6, 5), begin_mask=1),
    case("SpaceToBatchND", F(6, 4, 3), K([2]), K([[0, 0]])),
    case("SpaceToBatchND", F(3, 5, 4, 2), K([2, 2]), K([[1, 0], [0, 0]])),
    case("BatchToSpaceND", F(12, 2, 3), K([2]), K([[0, 1]])),
    case("BatchToSpaceND", F(12, 2, 2, 2), K([2, 2]), K([[0, 0], [0, 1]])),
    case("Concat", K(1), F(8, 3), F(8, 2)), case("Pack", F(8, 3), F(8, 3)), case("Pack", F(8, 3), F(8, 3), axis=-1),
    case("Pack", F(), F()), case("Unpack", F(8, 3), num=3, axis=1), case("Unpack", F(3, 8), num=3),
    case("Split", K(1), F(8, 4), num_split=2), case("Split", K(0), F(8, 4), num_split=2),
    case("SplitV", F(8, 5), K([2, 3]), K(1), num_split=2),
    case("Tile", F(1, 1, 4), K([8, 2, 1])), case("Tile", F(8, 3), K([1, 2])), case("Tile", F(3, 4), K([8, 1])),
    case("Tile", F(1, 4), D([8, 1], "int64")),
    case("BroadcastTo", F(1, 3), K([8, 3])), case("BroadcastTo", F(3), K([8, 3])),
    case("BroadcastTo", F(8, 1), K([8, 3])),
    case("Fill", K([8, 3]), F()), case("Shape", F(8, 3)), case("ShapeN", F(8, 3), F(4)), case("Size", F(8, 3)),
    case("Rank", F(8, 3)),
    case("Range", K(0), K(8), K(1)), case("BroadcastGradientArgs", D([8, 3], "int32"), D([3], "int32")),
    case("InvertPermutation", D([2, 0, 1], "int32")), case("LinSpace", D(0.5), D(1.0), K(5)),
]  # fmt: skip

SLICES = [
    case("Slice", F(8, 5), K([0, 1]), K([8, 3])), case("Slice", F(8, 5), K([0, 1]), K([-1, 3])),
    case("Slice", F(8, 5), D([0, 1], "int32"), D([8, 3], "int32")),
    case("Slice", F(8, 5), D([2, 0], "int32"), D([4, -1], "int32")),
    case("Slice", F(8, 5), K([2, 0]), K([4, 5])),
    case("StridedSlice", F(8, 5), K([0, 1]), K([8, 3]), K([1, 1])),
    case("StridedSlice", F(8, 5), K([0, 1]), K([0, 3]), K([1, 1]), begin_mask=1, end_mask=1),
    case("StridedSlice", F(8, 5, 3), K([0, 1]), K([0, 2]), K([1, 1]), ellipsis_mask=1, shrink_axis_mask=2),
    case("StridedSlice", F(8, 5), K([0, 0]), K([8, 0]), K([1, 1]), new_axis_mask=2),
    case("StridedSlice", F(8, 5), K([2]), K([6]), K([1])),
    case("StridedSlice", F(8, 5), K([0]), K([8]), K([2])),
    case("StridedSlice", F(8, 5), K([-1]), K([0]), K([1]), shrink_axis_mask=1),
    case("StridedSlice", F(8, 5), D([0, 1], "int32"), D([0, 3], "int32"), K([1, 1]), begin_mask=1, end_mask=1),
    case("StridedSliceGrad", K([8, 5]), K([0, 1]), K([8, 3]), K([1, 1]), F(8, 2)),
    case("StridedSliceGrad", K([8, 5]), K([0, 1]), K([0, 2]), K([1, 1]), F(8), begin_mask=1, end_mask=1,
         shrink_axis_mask=2),
    case("TensorStridedSliceUpdate", F(8, 5), K([0, 1]), K([8, 3]), K([1, 1]), F(8, 2)),
    case("Pad", F(8, 5), K([[0, 0], [1, 2]])), case("Pad", F(8, 5), D([[0, 0], [1, 2]], "int32")),
    case("PadV2", F(8, 5), K([[0, 0], [1, 2]]), D(3.0)),
    case("MirrorPad", F(8, 5), K([[0, 0], [1, 2]]), mode="REFLECT"),
    case("MirrorPadGrad", F(8, 5), K([[0, 0], [1, 1]]), mode="SYMMETRIC"),
    case("ReverseV2", F(8, 5), K([1])), case("Reverse", F(8, 5), K([False, True], "bool")),
    case("Roll", F(8, 5), K([2]), K([1])),
    case("ReverseSequence", F(8, 5, 3), N(8, low=1, dtype="int64"), seq_dim=1, batch_dim=0),
    case("ReverseSequence", F(5, 8, 3), N(8, low=1, dtype="int64"), seq_dim=0, batch_dim=1),
    case("SpaceToDepth", F(8, 4, 4, 2), block_size=2), case("DepthToSpace", F(8, 2, 2, 8), block_size=2),
    case("SpaceToBatch", F(2, 4, 4, 6), K([[0, 0], [0, 0]]), block_size=2),
    case("BatchToSpace", F(8, 2, 2, 6), K([[0, 0], [0, 0]]), block_size=2),
]  # fmt: skip

_FOUR = Marks(blocks=4)


def _counted(*shape: int) -> Arg:
    """Indices of which the first column counts the blocks."""

    def make(r: np.random.Generator) -> np.ndarray:
        found = r.integers(0, 4, shape).astype(np.int32)
        found[..., 0] = np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 2))
        return found

    return Arg(make, f"counted{list(shape)}")


GATHERS = [
    case("GatherV2", F(6, 4), N(8), K(0)), case("GatherV2", F(8, 6, 4), N(3), K(1)),
    case("GatherV2", F(4, 6, 2), N(4, 3), K(1), batch_dims=1), case("GatherV2", F(8, 5), N(8), K(1), batch_dims=1),
    case("GatherV2", F(4, 6, 5), N(4, 6), K(2), batch_dims=2),
    case("GatherV2", F(8, 6, 2), N(8, 3), K(1), batch_dims=-1),
    case("GatherV2", F(6, 4), N(), K(0)), case("Gather", F(6, 4), N(8, 2)),
    case("GatherNd", F(6, 5, 4), N(8, 2)), case("GatherNd", F(6, 4), N(8, 3, 1)),
    case("ScatterNd", N(8, 1), F(8, 4), K([6, 4])), case("ScatterNd", N(8, 3, 2), F(8, 3, 4), K([6, 5, 4])),
    *(case(op, F(6, 4), N(8, 1), F(8, 4))
      for op in ("TensorScatterAdd", "TensorScatterSub", "TensorScatterMax", "TensorScatterMin",
         "ScatterNdNonAliasingAdd")),
    case("TensorScatterUpdate", F(6, 4), D([[1], [3]], "int32"), F(2, 4)),
    case("TensorScatterUpdate", F(6, 4), D([[1, 3], [3, 0], [5, 2]], "int32"), F(3)),
    # The first column counts blocks.
    case("ScatterNd", _counted(4, 3, 2), F(4, 3, 5), K([4, 6, 5]), marks=_FOUR, search=False),
    case("GatherNd", F(4, 6, 5), _counted(4, 3, 2), marks=_FOUR, search=False),
    case("ScatterNd", D([[1], [0], [3], [5], [8], [6], [10], [9]], "int32"), F(8), K([12]), marks=_FOUR, search=False),
    case("TensorScatterAdd", F(4, 6), _counted(4, 2), F(4), marks=_FOUR, search=False),
    case("TensorScatterMax", F(4, 6), _counted(4, 2), F(4), marks=_FOUR, search=False),
    case("TensorScatterUpdate", F(4, 6), _counted(4, 2), F(4), marks=_FOUR, search=False),
    case("ScatterNd", _counted(4, 3, 2), F(4, 3), K([4, 6]), marks=_FOUR, search=False),
    case("TensorScatterMin", F(4, 6), _counted(4, 3, 2), F(4, 3), marks=_FOUR, search=False),
    case("OneHot", N(8, 3), K(4), D(1.0), D(0.5)), case("OneHot", N(8, 3), K(4), D(1.0), D(0.5), axis=0),
    case("OneHot", N(8), K(4), D(2.0), D(-1.0), axis=1),
    # Not searched: how many rows of a rank fall into a part depends on the data, and a layout has sizes.
    case("DynamicPartition", F(8, 4), D([0, 1] * 4, "int32"), num_partitions=2, search=False),
    case("UnravelIndex", N(8), K([3, 4])),
    case("DynamicStitch", D([0, 2], "int32"), D([1, 3], "int32"), F(2, 4), F(2, 4)),
    case("InplaceAdd", F(6, 4), D([4, 1], "int32"), F(2, 4)),
    case("InplaceSub", F(6, 4), D([4, 1], "int32"), F(2, 4)),
    case("InplaceUpdate", F(6, 4), D([4, 1], "int32"), F(2, 4)),
    case("Unique", N(8)),
]  # fmt: skip

_IDS = D([0, 0, 1, 1, 1, 2, 2, 3], "int32")
SEGMENTS = [
    *(case(f"UnsortedSegment{k}", F(8, 4), N(8), K(5)) for k in ("Sum", "Max", "Min", "Prod")),
    case("UnsortedSegmentSum", F(8, 3, 4), N(8, 3), K(5)),
    *(case(f"UnsortedSegment{k}", F(8, 3), D([1, 0, 2, 3, 5, 4, 7, 6], "int32"), K(8), marks=_FOUR, search=False)
      for k in ("Sum", "Max")),
    *(case(f"Segment{k}", F(8, 4), _IDS) for k in ("Sum", "Mean", "Max", "Min", "Prod")),
    *(case(f"SparseSegment{k}", F(6, 4), N(8), _IDS) for k in ("Sum", "Mean", "SqrtN")),
    *(case(f"SparseSegment{k}WithNumSegments", F(6, 4), N(8), _IDS, K(5)) for k in ("Sum", "Mean", "SqrtN")),
    *(case(f"SparseSegment{k}Grad", F(5, 4), N(8), _IDS, K(6)) for k in ("Sum", "Mean", "SqrtN")),
    case("Bincount", N(8, 3), K(5), F(8, 3)), case("Bincount", N(8, 3), K(5), D([], "float64")),
    case("DenseBincount", N(8, 3), K(5), F(8, 3)),
    case("DenseBincount", N(8), K(5), F(8)), case("DenseBincount", N(8, 3), K(5), D([], "float64"), binary_output=True),
    case("HistogramFixedWidth", F(8, 3), D([-1.0, 1.0]), K(4)),
]  # fmt: skip

CASES = [*SHAPES, *SLICES, *GATHERS, *SEGMENTS]
