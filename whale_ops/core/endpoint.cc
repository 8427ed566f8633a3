#include "endpoint.h"

#include <algorithm>
#include <set>

#include "reduce.h"

namespace whale {
namespace {

constexpr int64_t kCheckEveryNs = 100'000'000;       // how often waits are looked at
constexpr int64_t kSendGraceNs = 500'000'000;        // a departed rank's last receives may still be completing
constexpr size_t kRememberedOperations = 4096;

bool is_point_to_point(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }

Status invalid(const Request& request, const std::string& what) {
  return Status::Error(Code::kInvalidArgument, std::string(name_of(request.kind)) + " '" + request.key + "': " + what);
}

}  // namespace

Endpoint::Endpoint(std::string name, std::unique_ptr<Transport> transport, std::function<void()> wake)
    : name_(std::move(name)),
      transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      wake_(std::move(wake)),
      left_(size_, false) {}

Endpoint::~Endpoint() = default;

// ---- any thread ---------------------------------------------------------------------------------------------------------

uint64_t Endpoint::reserve() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t id = next_id_++;
  reservations_[id] = Reservation::kFree;
  return id;
}

void Endpoint::release(uint64_t id) {
  const std::lock_guard<std::mutex> lock(mutex_);
  reservations_.erase(id);
}

void Endpoint::push(Entry entry) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    inbox_.push_back(std::move(entry));
  }
  wake_();
}

void Endpoint::submit(uint64_t id, Request request) {
  Entry entry{Entry::What::kSubmit, id, 0, now_ns(), {}, check(request)};
  {
    // Counting and queueing under one lock: the order of calls under a key is the order of their numbers.
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto reservation = reservations_.find(id);
    if (reservation != reservations_.end() && reservation->second == Reservation::kCancelled && entry.status.ok()) {
      entry.status = Status::Error(Code::kCancelled, "the step was cancelled before the operation started");
    }
    if (reservation != reservations_.end()) reservation->second = Reservation::kSubmitted;
    if (entry.status.ok()) entry.call = calls_[counter_name(request)]++;
    request.algorithm = algorithm_;
    entry.request = std::move(request);
    inbox_.push_back(std::move(entry));
  }
  wake_();
}

void Endpoint::cancel(uint64_t id, Status status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto reservation = reservations_.find(id);
    if (reservation == reservations_.end()) return;
    if (reservation->second != Reservation::kSubmitted) {
      reservation->second = Reservation::kCancelled;
      return;
    }
    inbox_.push_back({Entry::What::kCancel, id, 0, 0, {}, std::move(status)});
  }
  wake_();
}

void Endpoint::abort(Status status) { push({Entry::What::kAbort, 0, 0, 0, {}, std::move(status)}); }

void Endpoint::lose(int peer, const std::string& what) {
  push({Entry::What::kLose, static_cast<uint64_t>(peer), 0, 0, {}, Status::Error(Code::kUnavailable, what)});
}

void Endpoint::leave() { push({Entry::What::kLeave, 0, 0, 0, {}, {}}); }

void Endpoint::set_link(LinkModel link) {
  const std::lock_guard<std::mutex> lock(mutex_);
  link_ = link;
}

void Endpoint::set_algorithm(Algorithm algorithm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  algorithm_ = algorithm;
}

bool Endpoint::on_one_machine(const std::vector<int>& group) const {
  const size_t members = group.empty() ? static_cast<size_t>(size_) : group.size();
  const auto rank_at = [&](size_t index) { return group.empty() ? static_cast<int>(index) : group[index]; };
  for (size_t i = 0; i < members; ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!transport_->share_memory(rank_at(i), rank_at(j))) return false;
    }
  }
  return true;
}

Status Endpoint::check(const Request& request) const {
  std::vector<bool> seen(size_, false);
  for (const int member : request.group) {
    if (member < 0 || member >= size_ || seen[member]) {
      return invalid(request, "ranks are " + join_ranks(request.group) + "; expected different ranks below " +
                                  std::to_string(size_) + " of communicator '" + name_ + "'");
    }
    seen[member] = true;
  }
  if (is_point_to_point(request.kind)) {
    if (request.root < 0 || request.root >= size_ || request.root == rank_) {
      return invalid(request, "peer is " + std::to_string(request.root) + " on rank " + std::to_string(rank_) +
                                  "; expected another rank of communicator '" + name_ + "' of " + std::to_string(size_) + " ranks");
    }
    return Status::Ok();
  }
  if (!request.group.empty() && !seen[rank_]) {
    return invalid(request, "rank " + std::to_string(rank_) + " is not one of the ranks " + join_ranks(request.group) +
                                "; build this operation on those ranks only");
  }
  const size_t group_size = request.group.empty() ? static_cast<size_t>(size_) : request.group.size();
  const bool per_rank = request.kind == OpKind::kAllGather || request.kind == OpKind::kReduceScatter ||
                        request.kind == OpKind::kAllToAll;
  if ((per_rank && request.counts.size() != group_size) ||
      (request.kind == OpKind::kAllToAll && request.recv_counts.size() != group_size)) {
    return invalid(request, "got " + std::to_string(request.counts.size()) + " sizes; expected one per rank of the group of " +
                                std::to_string(group_size));
  }
  for (const auto* counts : {&request.counts, &request.recv_counts}) {
    if (std::any_of(counts->begin(), counts->end(), [](int64_t n) { return n < 0; })) {
      return invalid(request, "a size is negative; sizes are numbers of elements, zero included");
    }
  }
  if (request.kind == OpKind::kBroadcast && (request.root < 0 || static_cast<size_t>(request.root) >= group_size)) {
    return invalid(request, "root is " + std::to_string(request.root) + "; expected an index into the group of " +
                                std::to_string(group_size) + " ranks");
  }
  if (request.kind == OpKind::kAllReduce || request.kind == OpKind::kReduceScatter) {
    const Status status = check_reduction(request.dtype, request.reduction);
    if (!status.ok()) return invalid(request, status.message);
  }
  return Status::Ok();
}

// ---- engine thread ------------------------------------------------------------------------------------------------------

bool Endpoint::poll(int64_t now) {
  if (closed_) return false;
  std::vector<Entry> entries;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries.swap(inbox_);
    engine_link_ = link_;
  }
  bool worked = !entries.empty();
  for (Entry& entry : entries) handle(std::move(entry));
  worked |= flush_delayed(now);
  worked |= transport_->progress(this);
  if (now >= next_check_ns_) check_waits(now);
  if (self_left_ && delayed_.empty() && transport_->drained() &&
      std::all_of(left_.begin(), left_.end(), [](bool left) { return left; })) {
    transport_.reset();  // here and not in the destructor: all calls of a transport belong to this thread
    closed_ = true;
  }
  return worked;
}

int64_t Endpoint::next_deadline_ns() const {
  const int64_t check = active_.empty() ? INT64_MAX : next_check_ns_;
  return delayed_.empty() ? check : std::min(check, delayed_.front().deliver_ns);
}

void Endpoint::handle(Entry entry) {
  switch (entry.what) {
    case Entry::What::kSubmit: begin(std::move(entry)); break;
    case Entry::What::kAbort:
      if (!self_left_) fail_everything(entry.status, true);
      break;
    case Entry::What::kLeave: depart(); break;
    case Entry::What::kLose: peer_lost(static_cast<int>(entry.id), entry.status.message); break;
    case Entry::What::kCancel: {
      std::shared_ptr<Operation> found;
      for (const auto& [tag, operation] : active_) {
        if (operation->id == entry.id) found = operation;
      }
      if (!found) break;
      const std::string what = found->title() + " was cancelled on rank " + std::to_string(rank_) + ": " + entry.status.message;
      finish(found, Status::Error(entry.status.code, what));
      const Code others = entry.status.code == Code::kCancelled ? Code::kAborted : entry.status.code;
      fail_everything(Status::Error(others, what), true);
      break;
    }
  }
}

void Endpoint::begin(Entry entry) {
  Status status = entry.status;
  if (status.ok() && self_left_) {
    status = Status::Error(Code::kUnavailable, invalid(entry.request, "this rank has left communicator '" + name_ +
                                                                          "'; run no operation after leave()").message);
  }
  if (status.ok()) status = aborted_;
  if (!aborted_.ok() && lost_) {
    status.message += ", so that rank " + std::to_string(rank_) + " can no longer run " + name_of(entry.request.kind) + " '" +
                      entry.request.key + "'";
  }
  if (!status.ok()) {
    release(entry.id);
    auto done = std::move(entry.request.done);
    entry.request.owner.reset();
    done(status);
    return;
  }
  if (entry.request.kind == OpKind::kAllReduce) entry.request.one_machine = on_one_machine(entry.request.group);
  auto operation = std::make_shared<Operation>(entry.id, std::move(entry.request), rank_, size_, entry.call, &scratch_);
  operation->ready_ns = entry.ready_ns;
  const uint64_t tag = operation->tag();
  std::vector<Arrival> early;
  const auto it = unexpected_.find(tag);
  if (it != unexpected_.end()) {
    early = std::move(it->second);
    unexpected_.erase(it);
  }
  active_[tag] = operation;
  operation->start(this, std::move(early));
  settle(operation);
}

void Endpoint::arrived(Arrival&& arrival) {
  if (arrival.header.kind == MessageKind::kAbort) {
    fail_everything(Status::Error(static_cast<Code>(arrival.header.id), arrival.note), false);
    return;
  }
  if (arrival.header.kind == MessageKind::kLeave) {
    peer_left(arrival.source);
    return;
  }
  if (!aborted_.ok() || self_left_) {
    discard(arrival);
    return;
  }
  const uint64_t tag = arrival.header.tag;
  const auto it = active_.find(tag);
  if (it == active_.end()) {
    const auto finished = finished_.find(tag);
    if (finished == finished_.end()) {
      unexpected_[tag].push_back(std::move(arrival));
      return;
    }
    fail_everything(Status::Error(Code::kInvalidArgument,
                                  "ranks disagree about an operation: rank " + std::to_string(arrival.source) +
                                      " still sends for it, rank " + std::to_string(rank_) + " has finished " + finished->second +
                                      "; run the same program with the same shapes on every rank"),
                    true);
    discard(arrival);
    return;
  }
  const std::shared_ptr<Operation> operation = it->second;
  if (!operation->agrees(arrival)) {
    fail_everything(operation->mismatch(arrival), true);
    discard(arrival);
    return;
  }
  operation->arrived(this, std::move(arrival));
  settle(operation);
}

void Endpoint::transferred(uint64_t cookie) {
  const auto it = in_transit_.find(cookie);
  if (it == in_transit_.end()) return;
  const InTransit transit = std::move(it->second);
  in_transit_.erase(it);
  if (transit.operation->settled) return;
  transit.operation->transferred(this, transit.lane);
  settle(transit.operation);
}

void Endpoint::failed(const std::string& what) {
  fail_everything(Status::Error(Code::kUnavailable, "communicator '" + name_ + "' on rank " + std::to_string(rank_) + ": " + what),
                  true);
}

void Endpoint::post_send(Operation* operation, int lane, int peer, const MessageHeader& header, const std::string& note,
                         const void* payload) {
  const uint64_t cookie = next_cookie_++;
  in_transit_[cookie] = {operation->shared_from_this(), lane, peer, true};
  emit(peer, header, note, payload, cookie);
}

void Endpoint::post_receive(Operation* operation, int lane, const Arrival& arrival, void* dst) {
  const uint64_t cookie = next_cookie_++;
  in_transit_[cookie] = {operation->shared_from_this(), lane, arrival.source, false};
  transport_->receive(arrival, dst, cookie, this);
}

void Endpoint::emit(int peer, const MessageHeader& header, const std::string& note, const void* payload, uint64_t cookie) {
  if (!engine_link_.active() && delayed_.empty()) {
    transport_->send(peer, header, note, payload, cookie, this);
    return;
  }
  // One message after the other occupies the link; each then takes the latency. Never before an earlier message.
  const int64_t now = now_ns();
  const double bandwidth = engine_link_.bandwidth_bytes_per_s;
  const double busy_s = bandwidth > 0 ? static_cast<double>(header.bytes) / bandwidth : 0;
  link_free_ns_ = std::max(link_free_ns_, now) + static_cast<int64_t>(busy_s * 1e9);
  int64_t deliver_ns = link_free_ns_ + static_cast<int64_t>(engine_link_.latency_s * 1e9);
  if (!delayed_.empty()) deliver_ns = std::max(deliver_ns, delayed_.back().deliver_ns);
  delayed_.push_back({deliver_ns, peer, header, note, payload, cookie});
}

bool Endpoint::flush_delayed(int64_t now) {
  bool worked = false;
  while (!delayed_.empty() && delayed_.front().deliver_ns <= now) {
    const Delayed message = std::move(delayed_.front());
    delayed_.pop_front();
    transport_->send(message.peer, message.header, message.note, message.payload, message.cookie, this);
    worked = true;
  }
  return worked;
}

void Endpoint::settle(const std::shared_ptr<Operation>& operation) {
  if (operation->settled || operation->busy()) return;
  if (!operation->failure().ok()) {
    fail_everything(operation->failure(), true);  // the other ranks cannot finish this operation either
  } else if (operation->finished()) {
    finish(operation, Status::Ok());
  }
}

void Endpoint::finish(const std::shared_ptr<Operation>& operation, const Status& status) {
  operation->settled = true;
  active_.erase(operation->tag());
  release(operation->id);
  auto done = std::move(operation->request.done);
  if (status.ok()) {
    remember_finished(*operation);
    recorder_.add(operation->record(now_ns()));
    operation->return_scratch(&scratch_);
    operation->request.owner.reset();
  } else {
    recorder_.add_failed(operation->record(now_ns()), status.message);
    for (const Arrival& arrival : operation->take_unreceived()) discard(arrival);
  }
  done(status);
}

void Endpoint::discard(const Arrival& arrival) {
  if (!arrival.inlined) transport_->discard(arrival);
}

void Endpoint::remember_finished(const Operation& operation) {
  finished_[operation.tag()] = operation.descriptor() + " '" + operation.request.key + "'";
  finished_order_.push_back(operation.tag());
  if (finished_order_.size() > kRememberedOperations) {
    finished_.erase(finished_order_.front());
    finished_order_.pop_front();
  }
}

void Endpoint::fail_everything(const Status& status, bool tell_others) {
  if (!aborted_.ok()) return;
  aborted_ = status;
  // Data that waits for the emulated link belongs to operations that fail now; a good-bye must still go out.
  delayed_.erase(std::remove_if(delayed_.begin(), delayed_.end(),
                                [](const Delayed& d) { return d.header.kind == MessageKind::kData; }),
                 delayed_.end());
  if (tell_others) {
    MessageHeader header;
    header.kind = MessageKind::kAbort;
    header.id = static_cast<uint32_t>(status.code);
    const std::string note = status.message.substr(0, Transport::kMaxNoteBytes);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && !left_[peer]) transport_->send(peer, header, note, nullptr, 0, this);
    }
  }
  std::vector<std::shared_ptr<Operation>> operations;
  for (const auto& [tag, operation] : active_) operations.push_back(operation);
  for (const auto& operation : operations) finish(operation, status);
  for (const auto& [tag, arrivals] : unexpected_) {
    for (const Arrival& arrival : arrivals) discard(arrival);
  }
  unexpected_.clear();
}

void Endpoint::depart() {
  if (self_left_) return;
  self_left_ = true;
  left_[rank_] = true;
  const Status status = Status::Error(Code::kUnavailable, "rank " + std::to_string(rank_) + " has left communicator '" + name_ +
                                                              "' while this operation was under way");
  std::vector<std::shared_ptr<Operation>> operations;
  for (const auto& [tag, operation] : active_) operations.push_back(operation);
  for (const auto& operation : operations) finish(operation, status);
  MessageHeader header;
  header.kind = MessageKind::kLeave;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) emit(peer, header, "", nullptr, 0);  // also to those who have left: they wait for this
  }
}

void Endpoint::peer_left(int peer) {
  left_[peer] = true;
  send_grace_ns_[peer] = now_ns() + kSendGraceNs;
  if (!aborted_.ok()) return;
  for (const auto& [tag, operation] : active_) {
    if (!operation->waits_for(peer)) continue;
    fail_everything(Status::Error(Code::kUnavailable, operation->left_message(peer)), true);
    return;
  }
}

void Endpoint::peer_lost(int peer, const std::string& what) {
  if (peer < 0 || peer >= size_ || peer == rank_ || left_[peer] || !aborted_.ok()) return;
  lost_ = true;
  const std::string sentence = "rank " + std::to_string(peer) + " " + what;
  std::vector<std::shared_ptr<Operation>> operations;
  for (const auto& [tag, operation] : active_) operations.push_back(operation);
  // TensorFlow reports the first error of a step: it shall name a tensor that waits for the peer, if there is one.
  const auto order_of = [&](const auto& operation) {
    return (operation->waits_for(peer) ? 0 : 2) + (operation->moves_tensor() ? 0 : 1);
  };
  std::stable_sort(operations.begin(), operations.end(), [&](const auto& a, const auto& b) { return order_of(a) < order_of(b); });
  for (const auto& operation : operations) {
    const std::string where = operation->waits_for(peer) ? " waited for it in " : " was in ";
    finish(operation, Status::Error(Code::kUnavailable, sentence + " while rank " + std::to_string(rank_) + where +
                                                            operation->purpose()));
  }
  fail_everything(Status::Error(Code::kUnavailable, sentence), false);  // whoever knows of it tells the other ranks as well
}

std::vector<int> Endpoint::pending_send_peers(const Operation* operation) const {
  std::vector<int> peers;
  for (const auto& [cookie, transit] : in_transit_) {
    if (transit.is_send && transit.operation.get() == operation) peers.push_back(transit.peer);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

void Endpoint::check_waits(int64_t now) {
  next_check_ns_ = now + kCheckEveryNs;
  std::vector<Wait> waits;
  for (const auto& [tag, operation] : active_) {
    if (now - operation->ready_ns < kCheckEveryNs) continue;
    waits.push_back({operation->purpose(), operation->moves_tensor(), operation->ready_ns, missing_peers(*operation)});
  }
  std::sort(waits.begin(), waits.end(), [](const Wait& a, const Wait& b) {
    return a.moves_tensor != b.moves_tensor ? a.moves_tensor : a.ready_ns < b.ready_ns;
  });
  const bool any = !waits.empty();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    waits_ = std::move(waits);
  }
  if (any && aborted_.ok()) {
    const Status status = crossed();
    if (!status.ok()) fail_everything(status, true);
  }
  if (send_grace_ns_.empty() || !aborted_.ok()) return;
  for (const auto& [cookie, transit] : in_transit_) {
    const auto grace = send_grace_ns_.find(transit.peer);
    if (!transit.is_send || transit.operation->settled || grace == send_grace_ns_.end() || now < grace->second) continue;
    fail_everything(Status::Error(Code::kUnavailable, transit.operation->left_message(transit.peer)), true);
    return;
  }
}

std::vector<int> Endpoint::missing_peers(const Operation& operation) const {
  std::vector<int> missing = operation.awaited_peers();
  return missing.empty() ? pending_send_peers(&operation) : missing;
}

// A rank that runs an operation alone has announced all it had to say before. So if a peer has begun another operation than
// the one in which it is waited for, and either of the two is run alone, neither will ever end.
Status Endpoint::crossed() const {
  Status found;
  bool found_tensor = false;
  for (const auto& [tag, operation] : active_) {
    for (const auto& [other_tag, arrivals] : unexpected_) {
      for (const Arrival& arrival : arrivals) {
        std::string other;
        bool tensor = false;
        if (arrival.note.empty() || !operation->waits_for(arrival.source) || !operation->crosses(arrival, &other, &tensor)) continue;
        if (!found.ok() && (found_tensor || !tensor)) continue;
        found_tensor = tensor;
        const std::string peer = "rank " + std::to_string(arrival.source);
        found = Status::Error(Code::kInvalidArgument,
                              "the ranks are at different places of the program: rank " + std::to_string(rank_) + " waits for " + peer +
                                  " in " + operation->purpose() + ", " + peer + " has begun " + other +
                                  "; run the same steps with the same shapes and dtypes on every rank");
      }
    }
  }
  return found;
}

std::vector<int> Endpoint::awaited_ranks(const std::string& title) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<int> ranks;
  for (const Wait& wait : waits_) {
    if (wait.title.find(title) != std::string::npos) ranks.insert(wait.missing.begin(), wait.missing.end());
  }
  return {ranks.begin(), ranks.end()};
}

std::vector<Wait> Endpoint::waits() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waits_;
}

}  // namespace whale
