#include "whale_ops/core/progress/exchange.h"

#include <numeric>

namespace whale {
namespace {

struct Gather {
  std::string own;
  int64_t own_length = 0;
  std::vector<int64_t> lengths;
  std::string all;
  BytesCallback done;
};

struct Copy {
  std::string bytes;
  int64_t length = 0;
  BytesCallback done;
};

Request raw_request(OpKind kind, const std::string& key, const std::string& text,
                    const std::string& alone, const std::vector<int>& group) {
  Request request;
  request.kind = kind;
  request.key = key;
  request.text = text;
  request.alone = alone;
  request.dtype_name = kBytes;
  request.group = group;
  return request;
}

}  // namespace

void gather_bytes(const std::shared_ptr<Endpoint>& endpoint, uint64_t id, const std::string& key,
                  const std::string& text, const std::string& alone, const std::vector<int>& group,
                  std::string bytes, BytesCallback done) {
  const size_t members = group.empty() ? static_cast<size_t>(endpoint->size()) : group.size();
  auto state = std::make_shared<Gather>();
  state->own = std::move(bytes);
  state->own_length = static_cast<int64_t>(state->own.size());
  state->lengths.assign(members, 0);
  state->done = std::move(done);

  Request lengths = raw_request(OpKind::kAllGather, key + "/lengths", text, alone, group);
  lengths.element_bytes = sizeof(int64_t);
  lengths.counts.assign(members, 1);
  lengths.input = &state->own_length;
  lengths.output = state->lengths.data();
  lengths.owner = state;
  lengths.done = [endpoint, key, text, alone, group, state](const Status& status) {
    if (!status.ok()) {
      state->done(status, {});
      return;
    }
    state->all.resize(static_cast<size_t>(
        std::accumulate(state->lengths.begin(), state->lengths.end(), int64_t{0})));
    Request contents = raw_request(OpKind::kAllGather, key, text, alone, group);
    contents.counts = state->lengths;
    contents.input = state->own.data();
    contents.output = state->all.data();
    contents.owner = state;
    contents.done = [state](const Status& outcome) {
      std::vector<std::string> parts;
      size_t begin = 0;
      for (const int64_t length : state->lengths) {
        if (!outcome.ok()) break;
        parts.push_back(state->all.substr(begin, static_cast<size_t>(length)));
        begin += static_cast<size_t>(length);
      }
      state->done(outcome, std::move(parts));
    };
    endpoint->submit(std::move(contents));
  };
  endpoint->submit(id, std::move(lengths));
}

void broadcast_bytes(const std::shared_ptr<Endpoint>& endpoint, uint64_t id, const std::string& key,
                     const std::string& text, const std::string& alone,
                     const std::vector<int>& group, int root, std::string bytes,
                     BytesCallback done) {
  auto state = std::make_shared<Copy>();
  state->bytes = std::move(bytes);
  state->length = static_cast<int64_t>(state->bytes.size());
  state->done = std::move(done);

  Request length = raw_request(OpKind::kBroadcast, key + "/length", text, alone, group);
  length.element_bytes = sizeof(int64_t);
  length.root = root;
  length.counts = {1};
  length.input = &state->length;
  length.output = &state->length;
  length.owner = state;
  length.done = [endpoint, key, text, alone, group, root, state](const Status& status) {
    if (!status.ok()) {
      state->done(status, {});
      return;
    }
    state->bytes.resize(static_cast<size_t>(state->length));
    Request contents = raw_request(OpKind::kBroadcast, key, text, alone, group);
    contents.root = root;
    contents.counts = {state->length};
    contents.input = state->bytes.data();
    contents.output = state->bytes.data();
    contents.owner = state;
    contents.done = [state](const Status& outcome) {
      std::vector<std::string> parts;
      if (outcome.ok()) parts.push_back(std::move(state->bytes));
      state->done(outcome, std::move(parts));
    };
    endpoint->submit(std::move(contents));
  };
  endpoint->submit(id, std::move(length));
}

}  // namespace whale
