#include "whale_ops/core/device/staged.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <string>
#include <tuple>
#include <utility>

#include "whale_ops/core/collective/reduce.h"
#include "whale_ops/core/device/pieces.h"

namespace whale {
namespace {

// An operation under way. Its mark is moved behind the last copy that was queued for it.
struct Staging {
  DeviceOperation what;
  void* mark = nullptr;
  std::string key;
  size_t left = 0;  // pieces whose copy back to the device is not queued yet
};

// The outcome of an exchange, which the engine's thread sets.
struct Outcome {
  std::atomic<bool> known{false};
  Status status;  // written by the engine's thread before `known`
};

// Host memory for one piece, and the piece that is under way in it.
struct Place {
  char* memory = nullptr;
  void* mark = nullptr;
  std::shared_ptr<Staging> staging;
  StagedPiece piece;
  std::shared_ptr<Outcome> outcome;
  int64_t since_ns = 0;
};

class Staged final : public Device {
 public:
  Staged(std::shared_ptr<Endpoint> endpoint, std::unique_ptr<DeviceCopies> copies,
         size_t piece_bytes)
      : endpoint_(std::move(endpoint)),
        copies_(std::move(copies)),
        piece_bytes_(piece_bytes),
        places_(kStagedPieces) {}
  ~Staged() override {
    copies_->drain();
    for (Place& place : places_) {
      if (place.mark != nullptr) copies_->release(place.mark);
    }
  }

  Status open() {
    const Status status = copies_->host_memory(2 * piece_bytes_ * kStagedPieces, &memory_);
    if (!status.ok()) return status;
    for (size_t i = 0; i < kStagedPieces; ++i) {
      places_[i].memory = static_cast<char*>(memory_.get()) + 2 * piece_bytes_ * i;
      free_.push_back(&places_[i]);
    }
    return status;
  }

  const char* kind() const override { return copies_->kind(); }
  Status mark(void* stream, void** mark) override { return copies_->mark(stream, mark); }
  void release(void* mark) override { copies_->release(mark); }

  Status launch(const DeviceOperation& what, void* mark) override {
    if (what.scale != 1.0f)
      return Status::Error(Code::kInternal,
                           "an exchange through the host's memory was asked to scale its result, "
                           "which it cannot; report this");
    auto staging = std::make_shared<Staging>();
    staging->what = what;
    staging->mark = mark;
    staging->key = "device/staged/" + what.key;
    // Queued on the stream for copies out, before the pieces' own copies.
    if (!what.before.empty()) {
      const Status status = copies_->copy(what.before, true, mark, &staging->mark);
      if (!status.ok()) return status;
    }
    std::vector<StagedPiece> pieces = pieces_of(what, piece_bytes_);
    staging->left = pieces.size();
    under_way_.push_back(staging);
    for (StagedPiece& piece : pieces) waiting_.emplace_back(staging, std::move(piece));
    return pieces.empty() ? all_back(staging.get()) : go_on();
  }

  Status finished(void* mark, bool* yes) override {
    *yes = false;
    const Status status = go_on();
    const auto own = std::find_if(under_way_.begin(), under_way_.end(),
                                  [mark](const auto& one) { return one->mark == mark; });
    if (!status.ok() || own == under_way_.end()) {
      return status.ok()
                 ? Status::Error(
                       Code::kInternal,
                       "the end of an exchange was asked for that is not under way; report this")
                 : status;
    }
    if ((*own)->left > 0) return status;
    const Status there = copies_->finished(mark, yes);
    if (!*yes) return there;
    under_way_.erase(own);
    return free_those_in();  // its mark is behind these copies
  }

  // Messages under way have memory of their own, which lives as long as the engine uses it.
  void abandon() override {
    copies_->drain();
    waiting_.clear();
    under_way_.clear();
  }

 private:
  // Advances every piece as far as possible without waiting. Pieces are sent in their order, which
  // is equal on all ranks.
  Status go_on() {
    Status status = free_those_in();
    bool there = true;
    for (Place* place : std::exchange(travels_, {})) {
      if (status.ok() && place->outcome->known.load(std::memory_order_acquire)) {
        status = copy_in(place);
      } else {
        travels_.push_back(place);
      }
    }
    while (status.ok() && !out_.empty()) {
      status = copies_->finished(out_.front()->mark, &there);
      if (!status.ok() || !there) break;
      send(out_.front());
      out_.pop_front();
    }
    while (status.ok() && !free_.empty() && !waiting_.empty()) {
      status = copy_out(free_.back());
      free_.pop_back();
    }
    return status;
  }

  Status free_those_in() {
    bool there = true;
    while (!in_.empty()) {
      const Status status = copies_->finished(in_.front()->mark, &there);
      if (!status.ok() || !there) return status;
      count(*in_.front(), in_.front()->piece.in, false);
      in_.front()->staging.reset();
      free_.push_back(in_.front());
      in_.pop_front();
    }
    return Status::Ok();
  }

  Status copy_out(Place* place) {
    std::tie(place->staging, place->piece) = std::move(waiting_.front());
    waiting_.pop_front();
    out_.push_back(place);
    place->since_ns = now_ns();
    return copies_->copy(copies_of(*place, place->piece.out, true), true, place->staging->mark,
                         &place->mark);
  }

  void send(Place* place) {
    count(*place, place->piece.out, true);
    const DeviceOperation& what = place->staging->what;
    Request request;
    request.kind = what.kind;
    request.key = place->staging->key;
    request.text = "in pieces of " + std::to_string(piece_bytes_) + " bytes";
    request.dtype_name = "elements";
    request.element_bytes = what.element_bytes;
    request.input = place->memory;
    request.output = received(*place);
    request.counts = place->piece.counts;
    request.recv_counts = place->piece.recv_counts;
    request.root = what.root;
    request.group = what.group;
    if (is_point_to_point(what.kind)) {
      request.root = what.group[what.kind == OpKind::kSend ? 1 : 0];
      request.group.clear();
    }
    if (what.kind == OpKind::kAllReduce || what.kind == OpKind::kReduceScatter) {
      request.dtype_name.clear();
      request.dtype = what.dtype;
      request.reduction = what.reduction;
    }
    if (narrows(what)) {
      narrow_floats(what.wire, reinterpret_cast<const float*>(place->memory),
                    place->memory + piece_bytes_, static_cast<size_t>(request.counts[0]));
      request.dtype = what.wire;
      request.element_bytes = element_bytes(what.wire);
      request.input = request.output = place->memory + piece_bytes_;
    }
    place->outcome = std::make_shared<Outcome>();
    travels_.push_back(place);
    request.owner = memory_;
    request.done = [outcome = place->outcome](const Status& told) {
      outcome->status = told;
      outcome->known.store(true, std::memory_order_release);
    };
    endpoint_->submit(std::move(request));
  }

  Status copy_in(Place* place) {
    if (!place->outcome->status.ok()) return place->outcome->status;
    const DeviceOperation& what = place->staging->what;
    if (narrows(what)) {
      widen_floats(what.wire, place->memory + piece_bytes_, reinterpret_cast<float*>(place->memory),
                   static_cast<size_t>(place->piece.counts[0]));
    }
    in_.push_back(place);
    place->since_ns = now_ns();
    // The copy waits for `mark` as well, behind which nobody uses the results' memory.
    const Status status = copies_->copy(copies_of(*place, place->piece.in, false), false,
                                        place->staging->mark, &place->mark);
    if (!status.ok() || --place->staging->left > 0) return status;
    return all_back(place->staging.get());
  }

  // All pieces' copies back are queued: the copies that take the parts apart go behind them.
  Status all_back(Staging* staging) {
    return copies_->copy(staging->what.after, false, staging->mark, &staging->mark);
  }

  static bool narrows(const DeviceOperation& what) {
    return what.kind == OpKind::kAllReduce && what.wire != what.dtype;
  }
  char* received(const Place& place) const {
    return place.memory + (has_two_regions(place.staging->what.kind) ? piece_bytes_ : 0);
  }

  std::vector<DeviceCopy> copies_of(const Place& place, const std::vector<StagedPiece::Part>& parts,
                                    bool out) const {
    std::vector<DeviceCopy> found;
    for (const StagedPiece::Part& part : parts) {
      char* host = (out ? place.memory : received(place)) + part.offset;
      found.push_back({out ? part.device : host, out ? host : part.device, part.bytes, part.bytes,
                       part.bytes, 1});
    }
    return found;
  }

  void count(const Place& place, const std::vector<StagedPiece::Part>& parts, bool out) {
    if (parts.empty()) return;
    Record record;
    record.key = out ? kCopiedOut : kCopiedIn;
    record.kind = out ? OpKind::kSend : OpKind::kRecv;
    record.algorithm = "copy";
    record.call = (out ? copied_out_ : copied_in_)++;
    for (const StagedPiece::Part& part : parts)
      record.logical_bytes += static_cast<int64_t>(part.bytes);
    record.ready_ns = record.first_ns = place.since_ns;
    record.end_ns = now_ns();
    endpoint_->recorder().add(record);
  }

  const std::shared_ptr<Endpoint> endpoint_;
  const std::unique_ptr<DeviceCopies> copies_;
  const size_t piece_bytes_;
  std::shared_ptr<void> memory_;
  // Used by the launching thread only.
  std::vector<Place> places_;
  std::vector<Place*> free_, travels_;
  std::deque<Place*> out_, in_;  // in the order in which the device finishes them
  std::deque<std::pair<std::shared_ptr<Staging>, StagedPiece>> waiting_;
  std::deque<std::shared_ptr<Staging>> under_way_;
  uint64_t copied_out_ = 0, copied_in_ = 0;
};

}  // namespace

Status open_staged(const std::shared_ptr<Endpoint>& endpoint, std::unique_ptr<DeviceCopies> copies,
                   size_t buffer_bytes, std::unique_ptr<Device>* device) {
  constexpr size_t kLargestElementBytes = 16;
  // A piece may begin at any element, and holds at least one element of every rank.
  const size_t least_bytes = kLargestElementBytes * static_cast<size_t>(endpoint->size());
  const size_t piece_bytes = std::max(
      buffer_bytes / kStagedPieces / kLargestElementBytes * kLargestElementBytes, least_bytes);
  auto made = std::make_unique<Staged>(endpoint, std::move(copies), piece_bytes);
  const Status status = made->open();
  if (status.ok()) *device = std::move(made);
  return status;
}

}  // namespace whale
