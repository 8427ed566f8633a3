// Attributes and shape functions of the ops that exchange rows of embedding tables; those of the
// other ops are in registration.cc.
#include "whale_ops/tf_kernels/communication/shapes.h"

namespace whale_ops {
namespace {}  // namespace

WHALE_EXCHANGE_OP("WhaleRouteIds")
    .Input("ids: N * T")
    .Output("asked: N * T")
    .Output("back: N * int32")
    .Output("sent: N * int64")
    .Output("came: N * int64")
    .Attr("starts: list(int)")
    .Attr("N: int >= 1")
    .Attr("T: {int32, int64}")
    .SetShapeFn([](InferenceContext* c) {
      const int tables = c->num_inputs() - 1;
      for (int i = 0; i < tables; ++i) {
        c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
        c->set_output(tables + i, c->input(1 + i));
        c->set_output(2 * tables + i, c->Vector(InferenceContext::kUnknownDim));
        c->set_output(3 * tables + i, c->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(
        "Ids of rows go to the ranks that hold them, each id once; sizes are exchanged first. "
        "starts: of each table, every rank's first row and the number of rows. asked: ids that the "
        "ranks want of this one, counted from its first row, rank by rank; back: which of the ids "
        "that were sent an id is; sent, came: how many ids went to, and came from, each rank.");

WHALE_EXCHANGE_OP("WhaleReturnRows")
    .Input("rows: N * T")
    .Input("back: N * int32")
    .Input("sent: N * int64")
    .Input("came: N * int64")
    .Output("found: N * T")
    .Attr("N: int >= 1")
    .Attr("T: type")
    .SetShapeFn([](InferenceContext* c) {
      const int tables = c->num_outputs();
      for (int i = 0; i < tables; ++i) {
        ShapeHandle row, found = c->UnknownShape();
        if (c->RankKnown(c->input(1 + i)) && c->RankKnown(c->input(1 + tables + i))) {
          TF_RETURN_IF_ERROR(c->Subshape(c->input(1 + i), 1, &row));
          TF_RETURN_IF_ERROR(c->Concatenate(c->input(1 + tables + i), row, &found));
        }
        c->set_output(i, found);
      }
      return absl::OkStatus();
    })
    .Doc("Rows that RouteIds' `asked` names go back to who asked for them, and lie as its ids do.");

WHALE_EXCHANGE_OP("WhaleSendRows")
    .Input("rows: N * T")
    .Input("back: N * int32")
    .Input("sent: N * int64")
    .Input("came: N * int64")
    .Output("added: N * T")
    .Attr("N: int >= 1")
    .Attr("T: {half, bfloat16, float, double}")
    .SetShapeFn([](InferenceContext* c) {
      const int tables = c->num_outputs();
      for (int i = 0; i < tables; ++i) {
        const ShapeHandle rows = c->input(1 + i), ids = c->input(1 + tables + i);
        ShapeHandle row, found = c->UnknownShape();
        if (c->RankKnown(rows) && c->RankKnown(ids)) {
          TF_RETURN_IF_ERROR(c->Subshape(rows, c->Rank(ids), &row));
          TF_RETURN_IF_ERROR(c->Concatenate(c->Vector(InferenceContext::kUnknownDim), row, &found));
        }
        c->set_output(i, found);
      }
      return absl::OkStatus();
    })
    .Doc(
        "A row for each of RouteIds' ids goes to the rank that has the id's row; rows of one id "
        "are added up before. They lie as `asked` does.");

}  // namespace whale_ops
