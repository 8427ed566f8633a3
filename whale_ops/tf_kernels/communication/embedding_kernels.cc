// RouteIds, ReturnRows and SendRows: exchange rows of embedding tables that are sharded by rows,
// with all-to-alls that carry only the rows needed.
//
// A rank requests each id once, from the id's owner. Requests are ordered by table, then by
// ascending id, so that the ids of one owner are contiguous. Several tables are exchanged together:
// the message to a rank consists of the runs of all tables, one after the other.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "tensorflow/core/framework/register_types.h"
#include "whale_ops/tf_kernels/communication/communication_op.h"

namespace whale_ops {
namespace {

using tensorflow::OpInputList;

// Rows of each table that go to, or come from, each rank: [table][rank].
using Counts = std::vector<std::vector<int64_t>>;

int64_t sum(const std::vector<int64_t>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), int64_t{0});
}

// Elements of all tables for each rank. `widths`: elements of a row of each table.
std::vector<int64_t> by_rank(const Counts& counts, const std::vector<int64_t>& widths) {
  std::vector<int64_t> found(counts[0].size(), 0);
  for (size_t table = 0; table < counts.size(); ++table) {
    for (size_t rank = 0; rank < found.size(); ++rank)
      found[rank] += counts[table][rank] * widths[table];
  }
  return found;
}

// Calls copy(table, first byte within the table, first byte within the message, bytes) for every
// run.
template <typename Copy>
void for_runs(const Counts& counts, const std::vector<int64_t>& widths, int64_t element_bytes,
              Copy copy) {
  std::vector<int64_t> at(counts.size(), 0);
  int64_t position = 0;
  for (size_t rank = 0; rank < counts[0].size(); ++rank) {
    for (size_t table = 0; table < counts.size(); ++table) {
      const int64_t bytes = counts[table][rank] * widths[table] * element_bytes;
      if (bytes > 0) copy(table, at[table], position, bytes);
      at[table] += bytes;
      position += bytes;
    }
  }
}

// Base class of the three, with attribute N, the number of tables.
class RowsOp : public TensorOp {
 public:
  explicit RowsOp(OpKernelConstruction* ctx) : TensorOp(ctx) { read(ctx, "N", &tables_); }
  // Expensive, since they sort, add or copy rows before anything is sent.
  bool IsExpensive() override { return true; }

 protected:
  int tables() const { return tables_; }

  // Rows to be exchanged, and those results of RouteIds that describe the exchange.
  struct Routed {
    OpInputList rows, back;
    Counts sent, came;
  };

  absl::Status read_routed(OpKernelContext* ctx, size_t size, Routed* routed) const {
    TF_RETURN_IF_ERROR(ctx->input_list("rows", &routed->rows));
    TF_RETURN_IF_ERROR(ctx->input_list("back", &routed->back));
    TF_RETURN_IF_ERROR(read_counts(ctx, "sent", size, &routed->sent));
    return read_counts(ctx, "came", size, &routed->came);
  }

  absl::Status read_counts(OpKernelContext* ctx, const char* name, size_t size,
                           Counts* counts) const {
    OpInputList list;
    TF_RETURN_IF_ERROR(ctx->input_list(name, &list));
    for (const Tensor& one : list) {
      if (one.NumElements() != static_cast<int64_t>(size)) {
        return invalid("the operand `", name, "` of '", key(), "' has the shape ",
                       one.shape().DebugString(), " for ", size,
                       " ranks; expected one number per rank");
      }
      const auto values = one.flat<int64_t>();
      counts->emplace_back(values.data(), values.data() + size);
    }
    return absl::OkStatus();
  }

  // An all-to-all of rows, and what to do with the received rows afterwards, `bytes` of them (null:
  // nothing).
  struct Exchange {
    whale::Request request;
    std::function<void()> deal;
    int64_t bytes = 0;
  };

  // Sends each rank its rows of the tables `from`, and receives rows into the tables `to`.
  // `widths`: elements of a row of each table.
  absl::Status all_to_all(OpKernelContext* ctx, const Counts& out, const Counts& in,
                          const std::vector<int64_t>& widths, const std::vector<Tensor>& from,
                          const std::vector<Tensor>& to, const char* what,
                          Exchange* exchange) const {
    Tensor sent, received;
    TF_RETURN_IF_ERROR(sent_from(ctx, out, widths, from, &sent));
    TF_RETURN_IF_ERROR(received_into(ctx, in, widths, to, &received, &exchange->deal));
    whale::Request& request = exchange->request;
    request =
        request_of(whale::OpKind::kAllToAll, absl::StrCat(what, " of ", from.size(), " tables"));
    request.counts = by_rank(out, widths);
    request.recv_counts = by_rank(in, widths);
    request.input = data_of(sent);
    request.output = data_of(received);
    exchange->bytes = static_cast<int64_t>(received.TotalBytes());
    request.owner = owner_of(std::move(sent), std::move(received));
    return absl::OkStatus();
  }

 private:
  // Received rows of one table are already in place; those of several tables are distributed by
  // `finish`.
  absl::Status received_into(OpKernelContext* ctx, const Counts& in,
                             const std::vector<int64_t>& widths, const std::vector<Tensor>& tables,
                             Tensor* received, std::function<void()>* finish) const {
    if (tables.size() == 1) {
      *received = tables[0];
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(
        ctx->allocate_temp(dtype(), TensorShape({sum(by_rank(in, widths))}), received));
    const int64_t bytes_each = tensorflow::DataTypeSize(dtype());
    *finish = [in, widths, tables, whole = *received, bytes_each] {
      for_runs(in, widths, bytes_each, [&](size_t table, int64_t to, int64_t from, int64_t bytes) {
        std::memcpy(data_of(tables[table]) + to, data_of(whole) + from, bytes);
      });
    };
    return absl::OkStatus();
  }

  absl::Status sent_from(OpKernelContext* ctx, const Counts& out,
                         const std::vector<int64_t>& widths, const std::vector<Tensor>& tables,
                         Tensor* sent) const {
    if (tables.size() == 1) {
      *sent = tables[0];
      return absl::OkStatus();
    }
    TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype(), TensorShape({sum(by_rank(out, widths))}), sent));
    for_runs(out, widths, tensorflow::DataTypeSize(dtype()),
             [&](size_t table, int64_t from, int64_t to, int64_t bytes) {
               std::memcpy(data_of(*sent) + to, data_of(tables[table]) + from, bytes);
             });
    return absl::OkStatus();
  }

  int tables_ = 1;
};

// Elements of a row, and the shape of `rows` rows.
int64_t width_of(const TensorShape& shape, int rows_dims) {
  int64_t width = 1;
  for (int i = rows_dims; i < shape.dims(); ++i) width *= shape.dim_size(i);
  return width;
}

TensorShape with_rows(const TensorShape& rows, const TensorShape& of, int skipped) {
  TensorShape shape = rows;
  for (int i = skipped; i < of.dims(); ++i) shape.AddDim(of.dim_size(i));
  return shape;
}

template <typename Id>
class RouteIdsOp : public RowsOp {
 public:
  explicit RouteIdsOp(OpKernelConstruction* ctx) : RowsOp(ctx) { read(ctx, "starts", &starts_); }

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    if (starts_.size() != tables() * (group.size + 1)) {
      return invalid("the attribute `starts` of RouteIds '", key(), "' has ", starts_.size(),
                     " numbers for ", tables(), " tables and ", group.size,
                     " ranks; expected each rank's first row and the number of rows, table by "
                     "table");
    }
    auto route = std::make_shared<Route>();
    route->out.assign(tables(), std::vector<int64_t>(group.size, 0));
    route->in = route->out;
    for (int table = 0; table < tables(); ++table) {
      TF_RETURN_IF_ERROR(sort(ctx, group, table, route.get()));
    }
    const size_t each = tables();
    route->numbers.resize(2 * each * group.size);
    for (size_t rank = 0; rank < group.size; ++rank) {
      for (size_t table = 0; table < each; ++table)
        route->numbers[rank * each + table] = route->out[table][rank];
    }
    whale::Request request = make_request(whale::OpKind::kAllToAll, tensorflow::DT_INT64,
                                          absl::StrCat("rows of ", each, " tables"));
    request.key += "/sizes";
    request.counts.assign(group.size, tables());
    request.recv_counts = request.counts;
    request.input = route->numbers.data();
    request.output = route->numbers.data() + each * group.size;
    request.owner = route;
    launch(ctx, group, std::move(request),
           [this, ctx, group, route, done = std::move(*done)](const whale::Status& status) {
             proceed(ctx, status, done,
                     [&](DoneCallback* own) { return exchange(ctx, group, route, own); });
           });
    return absl::OkStatus();
  }

 private:
  struct Route {
    Counts out, in;
    std::vector<Tensor> once;  // by table: its unique ids, ascending
    std::vector<int64_t> numbers;
  };

  const int64_t* starts(const Group& group, int table) const {
    return starts_.data() + table * (group.size + 1);
  }

  // Finds a table's unique ids, how many of them each rank owns, and the position of each input id
  // among them.
  absl::Status sort(OpKernelContext* ctx, const Group& group, int table, Route* route) {
    const Tensor& input = ctx->input(1 + table);
    const auto ids = input.flat<Id>();
    const int64_t count = ids.size();
    std::vector<std::pair<Id, int32_t>> order(count);
    for (int64_t i = 0; i < count; ++i) order[i] = {ids(i), static_cast<int32_t>(i)};
    std::sort(order.begin(), order.end());
    const int64_t* first = starts(group, table);
    const int64_t rows = first[group.size];
    for (const auto* end : {count ? &order.front() : nullptr, count ? &order.back() : nullptr}) {
      if (end != nullptr && (end->first < 0 || static_cast<int64_t>(end->first) >= rows)) {
        return invalid("indices[", end->second, "] = ", end->first, " is not in [0, ", rows,
                       ") (RouteIds '", key(), "')");
      }
    }
    Tensor* back = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(tables() + table, input.shape(), &back));
    auto place = back->flat<int32_t>();
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (i > 0 && order[i].first != order[i - 1].first) ++found;
      place(order[i].second) = static_cast<int32_t>(found);
    }
    Tensor once;
    TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype(), TensorShape({count ? found + 1 : 0}), &once));
    auto kept = once.flat<Id>();
    size_t owner = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = place(order[i].second);
      if (i > 0 && order[i].first == order[i - 1].first) continue;
      while (static_cast<int64_t>(order[i].first) >= first[owner + 1]) ++owner;
      kept(at) = order[i].first;
      ++route->out[table][owner];
    }
    route->once.push_back(std::move(once));
    return absl::OkStatus();
  }

  absl::Status exchange(OpKernelContext* ctx, const Group& group,
                        const std::shared_ptr<Route>& route, DoneCallback* done) {
    const size_t each = tables();
    for (size_t rank = 0; rank < group.size; ++rank) {
      for (size_t table = 0; table < each; ++table)
        route->in[table][rank] = route->numbers[(group.size + rank) * each + table];
    }
    std::vector<Tensor> asked;
    for (size_t table = 0; table < each; ++table) {
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(
          ctx->allocate_output(table, TensorShape({sum(route->in[table])}), &output));
      asked.push_back(*output);
      const std::pair<size_t, const Counts*> numbers[] = {{2, &route->out}, {3, &route->in}};
      for (const auto& [list, counts] : numbers) {
        Tensor* sizes = nullptr;
        const TensorShape shape({static_cast<int64_t>(group.size)});
        TF_RETURN_IF_ERROR(ctx->allocate_output(list * each + table, shape, &sizes));
        std::copy((*counts)[table].begin(), (*counts)[table].end(), sizes->flat<int64_t>().data());
      }
    }
    const std::vector<int64_t> one(each, 1);
    Exchange found;
    TF_RETURN_IF_ERROR(
        all_to_all(ctx, route->out, route->in, one, route->once, asked, "ids", &found));
    std::vector<int64_t> mine;
    for (size_t table = 0; table < each; ++table) mine.push_back(starts(group, table)[group.index]);
    return launch_last(ctx, group, std::move(found.request), std::move(*done), found.bytes,
                       [asked, mine, deal = std::move(found.deal)] {
                         if (deal != nullptr) deal();
                         for (size_t table = 0; table < asked.size(); ++table) {
                           Tensor ids = asked[table];
                           auto values = ids.flat<Id>();
                           for (int64_t i = 0; i < values.size(); ++i)
                             values(i) -= static_cast<Id>(mine[table]);
                         }
                       });
  }

  std::vector<int64_t> starts_;
};

class ReturnRowsOp : public RowsOp {
 public:
  using RowsOp::RowsOp;

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    Routed routed;
    TF_RETURN_IF_ERROR(read_routed(ctx, group.size, &routed));
    const auto& [rows, back, sent_ids, came_ids] = routed;
    std::vector<Tensor> held, once, results, places;
    std::vector<int64_t> widths;
    for (int table = 0; table < tables(); ++table) {
      if (rows[table].dims() < 1 || rows[table].dim_size(0) != sum(came_ids[table])) {
        return invalid("ReturnRows '", key(), "' has rows of shape ",
                       rows[table].shape().DebugString(), "; expected the ", sum(came_ids[table]),
                       " rows that other ranks have asked for");
      }
      held.push_back(rows[table]);
      places.push_back(back[table]);
      widths.push_back(width_of(rows[table].shape(), 1));
      Tensor kept;
      const TensorShape shape =
          with_rows(TensorShape({sum(sent_ids[table])}), rows[table].shape(), 1);
      TF_RETURN_IF_ERROR(ctx->allocate_temp(dtype(), shape, &kept));
      once.push_back(std::move(kept));
      Tensor* output = nullptr;
      const TensorShape spread = with_rows(back[table].shape(), rows[table].shape(), 1);
      TF_RETURN_IF_ERROR(ctx->allocate_output(table, spread, &output));
      results.push_back(*output);
    }
    Exchange found;
    TF_RETURN_IF_ERROR(all_to_all(ctx, came_ids, sent_ids, widths, held, once, "rows", &found));
    int64_t bytes = 0;
    for (const Tensor& result : results) bytes += static_cast<int64_t>(result.TotalBytes());
    const int64_t bytes_each = tensorflow::DataTypeSize(dtype());
    return launch_last(ctx, group, std::move(found.request), std::move(*done), bytes,
                       [once, results, places, widths, bytes_each, deal = std::move(found.deal)] {
                         if (deal != nullptr) deal();
                         for (size_t table = 0; table < once.size(); ++table) {
                           const int64_t row = widths[table] * bytes_each;
                           const auto place = places[table].flat<int32_t>();
                           char* to = data_of(results[table]);
                           for (int64_t i = 0; i < place.size(); ++i)
                             std::memcpy(to + i * row, data_of(once[table]) + place(i) * row, row);
                         }
                       });
  }
};

template <typename T>
class SendRowsOp : public RowsOp {
 public:
  using RowsOp::RowsOp;

 protected:
  absl::Status start(OpKernelContext* ctx, const Group& group, DoneCallback* done) override {
    Routed routed;
    TF_RETURN_IF_ERROR(read_routed(ctx, group.size, &routed));
    const auto& [rows, back, sent_ids, came_ids] = routed;
    std::vector<Tensor> added, results;
    std::vector<int64_t> widths;
    for (int table = 0; table < tables(); ++table) {
      const int ids_dims = back[table].dims();
      const TensorShape& shape = rows[table].shape();
      bool fits = shape.dims() >= ids_dims;
      for (int i = 0; fits && i < ids_dims; ++i)
        fits = shape.dim_size(i) == back[table].dim_size(i);
      if (!fits) {
        return invalid("SendRows '", key(), "' has rows of shape ", shape.DebugString(),
                       " for ids of shape ", back[table].shape().DebugString(),
                       "; expected a row for each id");
      }
      widths.push_back(width_of(shape, ids_dims));
      Tensor sums;
      TF_RETURN_IF_ERROR(ctx->allocate_temp(
          dtype(), with_rows(TensorShape({sum(sent_ids[table])}), shape, ids_dims), &sums));
      add(rows[table], back[table], widths.back(), &sums);
      added.push_back(std::move(sums));
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(ctx->allocate_output(
          table, with_rows(TensorShape({sum(came_ids[table])}), shape, ids_dims), &output));
      results.push_back(*output);
    }
    Exchange found;
    TF_RETURN_IF_ERROR(all_to_all(ctx, sent_ids, came_ids, widths, added, results, "sums", &found));
    const int64_t bytes = found.deal == nullptr ? 0 : found.bytes;
    return launch_last(ctx, group, std::move(found.request), std::move(*done), bytes,
                       std::move(found.deal));
  }

 private:
  // Adds up the rows that belong to the same id.
  static void add(const Tensor& rows, const Tensor& back, int64_t width, Tensor* sums) {
    std::memset(data_of(*sums), 0, sums->TotalBytes());
    const auto place = back.flat<int32_t>();
    const T* from = rows.flat<T>().data();
    T* to = sums->flat<T>().data();
    for (int64_t i = 0; i < place.size(); ++i) {
      T* sum = to + place(i) * width;
      for (int64_t k = 0; k < width; ++k) sum[k] += from[i * width + k];
    }
  }
};

}  // namespace

WHALE_CPU_KERNEL_FOR("WhaleRouteIds", "T", int32_t, RouteIdsOp);
WHALE_CPU_KERNEL_FOR("WhaleRouteIds", "T", int64_t, RouteIdsOp);

WHALE_CPU_KERNEL("WhaleReturnRows", ReturnRowsOp);

WHALE_CPU_KERNEL_FOR("WhaleSendRows", "T", Eigen::half, SendRowsOp);
WHALE_CPU_KERNEL_FOR("WhaleSendRows", "T", tensorflow::bfloat16, SendRowsOp);
WHALE_CPU_KERNEL_FOR("WhaleSendRows", "T", float, SendRowsOp);
WHALE_CPU_KERNEL_FOR("WhaleSendRows", "T", double, SendRowsOp);

}  // namespace whale_ops
