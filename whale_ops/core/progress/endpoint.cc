// The part of an endpoint that runs on the engine's thread, as long as nothing fails.
#include "whale_ops/core/progress/endpoint.h"

#include <sched.h>

#include <algorithm>
#include <cstring>

namespace whale {
namespace {

constexpr size_t kRememberedOperations = 4096;

std::vector<int> group_by_memory(const Transport& transport) {
  std::vector<std::vector<int>> hosts;
  std::vector<int> of(transport.size());
  for (int rank = 0; rank < transport.size(); ++rank) {
    const auto joins = [&](const std::vector<int>& host) {
      return std::all_of(host.begin(), host.end(),
                         [&](int other) { return transport.share_memory(rank, other); });
    };
    const auto found = std::find_if(hosts.begin(), hosts.end(), joins);
    of[rank] = static_cast<int>(found - hosts.begin());
    found == hosts.end() ? hosts.push_back({rank}) : found->push_back(rank);
  }
  return of;
}

}  // namespace

Endpoint::Endpoint(std::string name, std::unique_ptr<Transport> transport,
                   std::function<void()> wake)
    : name_(std::move(name)),
      transport_(std::move(transport)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      hosts_(group_by_memory(*transport_)),
      several_hosts_(*std::max_element(hosts_.begin(), hosts_.end()) > 0),
      by_memory_(transport_->between_processes() && !transport_->needs_polling() &&
                 transport_->descriptor() < 0),
      wake_(std::move(wake)),
      left_(size_, false),
      gone_(size_, false) {}

Endpoint::~Endpoint() = default;

std::vector<int> Endpoint::hosts_of(const std::vector<int>& group) const {
  if (group.empty()) return hosts_;
  std::vector<int> numbers, hosts;
  for (const int member : group) {
    const auto found = std::find(numbers.begin(), numbers.end(), hosts_[member]);
    hosts.push_back(static_cast<int>(found - numbers.begin()));
    if (found == numbers.end()) numbers.push_back(hosts_[member]);
  }
  return hosts;
}

bool Endpoint::shares_tensors(const std::vector<int>& group) const {
  std::vector<int> members = group;
  for (int rank = 0; group.empty() && rank < size_; ++rank) members.push_back(rank);
  for (size_t i = 0; i < members.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (!transport_->share_tensors(members[i], members[j])) return false;
    }
  }
  return true;
}

Status Endpoint::read_lent(int peer, uint64_t place, void* to, uint64_t bytes) {
  const bool shared =
      transport_ != nullptr && peer != rank_ && transport_->share_tensors(rank_, peer);
  const char* from = shared ? transport_->at(peer, place, bytes) : nullptr;
  if (from == nullptr) {
    return Status::Error(Code::kInternal, "rank " + std::to_string(rank_) + " has not mapped " +
                                              std::to_string(bytes) + " bytes at offset " +
                                              std::to_string(place) + " of the memory that rank " +
                                              std::to_string(peer) + " shares; report this");
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
  return Status::Ok();
}

uint32_t Endpoint::carry_on(uint64_t id, int64_t patience_ns, const Doorbell& bell) {
  followed_ = id;
  const bool waits = patience_.waits();
  const int64_t start_ns = now_ns();
  uint32_t rings = 0;
  bool waited = false;
  for (;;) {
    rings = bell.rings();
    const bool worked = progress(now_ns());
    if (followed_ == 0) break;
    if (worked) continue;
    if (!waits || now_ns() - start_ns > patience_ns) break;
    waited = true;
    sched_yield();  // the rank that is waited for may need this core
  }
  if (waited) patience_.note(followed_ == 0);
  followed_ = 0;
  // Operations with work to do, and messages that the emulated link delays, need another turn
  // without any event from outside.
  if (!working_.empty() || !delayed_.empty() || self_left_) wake_();
  return rings;
}

bool Endpoint::poll(int64_t now) {
  if (closed_) return false;
  const bool worked = progress(now);
  if (self_left_ && delayed_.empty() && is_over()) {
    // Here and not in the destructor, since all calls of a transport belong to this thread.
    transport_.reset();
    in_transit_.clear();
    closed_ = true;
  }
  return worked;
}

bool Endpoint::progress(int64_t now) {
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
  worked |= work();
  if (now >= next_check_ns_) check_waits(now);
  return worked;
}

bool Endpoint::is_over() const {
  for (int rank = 0; rank < size_; ++rank) {
    if (!left_[rank] && !gone_[rank]) return false;
  }
  const bool some_gone = std::any_of(gone_.begin(), gone_.end(), [](bool gone) { return gone; });
  return some_gone ? transport_->may_end() : transport_->drained();
}

// Lets each operation compute one part of its sums, so that none delays the others' messages.
bool Endpoint::work() {
  std::vector<std::shared_ptr<Operation>> operations;
  operations.swap(working_);
  for (const auto& operation : operations) {
    if (operation->settled) continue;
    operation->work(this);
    settle(operation);
  }
  return !operations.empty();
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
      const std::string what = found->title() + " was cancelled on rank " + std::to_string(rank_) +
                               ": " + entry.status.message;
      finish(found, Status::Error(entry.status.code, what));
      // The error that made TensorFlow cancel a step is reported by itself, and names its rank: the
      // others shall get that error first. So a cancelled exchange of data beside tensors, which
      // waits for nobody's computation, does not abort them.
      if (entry.status.code == Code::kCancelled && !found->moves_tensor()) break;
      const Code others =
          entry.status.code == Code::kCancelled ? Code::kAborted : entry.status.code;
      fail_everything(Status::Error(others, what), true);
      break;
    }
  }
}

void Endpoint::begin(Entry entry) {
  Status status = entry.status;
  if (status.ok() && self_left_) {
    status = Status::Error(Code::kUnavailable,
                           invalid(entry.request, "this rank has left communicator '" + name_ +
                                                      "'; run no operation after leave()")
                               .message);
  }
  if (status.ok()) status = aborted_;
  if (!aborted_.ok() && lost_) {
    status.message += ", so that rank " + std::to_string(rank_) + " can no longer run " +
                      name_of(entry.request.kind) + " '" + entry.request.key + "'";
  }
  if (!status.ok()) {
    if (followed_ == entry.id) followed_ = 0;
    release(entry.id);
    auto done = std::move(entry.request.done);
    entry.request.owner.reset();
    done(status);
    return;
  }
  if (knows_hosts(entry.request.kind)) {
    entry.request.hosts = hosts_of(entry.request.group);
  }
  if (entry.request.kind == OpKind::kAllReduce) {
    entry.request.tensors_shared = shares_tensors(entry.request.group);
    entry.request.lends = !engine_link_.active();  // an emulated link has to carry all bytes
  }
  auto operation = std::make_shared<Operation>(entry.id, std::move(entry.request), rank_, size_,
                                               entry.call, &scratch_);
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
    fail_everything(
        Status::Error(Code::kInvalidArgument,
                      "ranks disagree about an operation: rank " + std::to_string(arrival.source) +
                          " still sends for it, rank " + std::to_string(rank_) + " has finished " +
                          finished->second +
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
  fail_everything(Status::Error(Code::kUnavailable, "communicator '" + name_ + "' on rank " +
                                                        std::to_string(rank_) + ": " + what),
                  true);
}

void Endpoint::post_send(Operation* operation, int lane, int peer, const MessageHeader& header,
                         const std::string& note, const void* payload) {
  const uint64_t cookie = next_cookie_++;
  in_transit_[cookie] = {operation->shared_from_this(), lane, peer, true};
  emit(peer, header, note, payload, cookie);
}

void Endpoint::post_receive(Operation* operation, int lane, const Arrival& arrival, void* dst) {
  const uint64_t cookie = next_cookie_++;
  in_transit_[cookie] = {operation->shared_from_this(), lane, arrival.source, false};
  transport_->receive(arrival, dst, cookie, this);
}

void Endpoint::emit(int peer, const MessageHeader& header, const std::string& note,
                    const void* payload, uint64_t cookie) {
  const bool beside = several_hosts_ && hosts_[peer] == hosts_[rank_];
  if (beside || (!engine_link_.active() && delayed_.empty())) {
    transport_->send(peer, header, note, payload, cookie, this);
    return;
  }
  // Messages occupy the link one after the other, and then each takes the latency. None arrives
  // before an earlier one.
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
    transport_->send(message.peer, message.header, message.note, message.payload, message.cookie,
                     this);
    worked = true;
  }
  return worked;
}

void Endpoint::settle(const std::shared_ptr<Operation>& operation) {
  if (operation->settled || operation->busy()) return;
  if (!operation->failure().ok()) {
    // The other ranks cannot finish this operation either, so the whole communicator fails.
    fail_everything(operation->failure(), true);
  } else if (operation->finished()) {
    finish(operation, Status::Ok());
  }
}

void Endpoint::finish(const std::shared_ptr<Operation>& operation, const Status& status) {
  operation->settled = true;
  if (followed_ == operation->id) followed_ = 0;
  active_.erase(operation->tag());
  release(operation->id);
  auto done = std::move(operation->request.done);
  if (status.ok()) {
    remember_finished(*operation);
    recorder_.add(operation->record(now_ns()));
    operation->return_scratch();
    operation->request.owner.reset();
  } else {
    recorder_.add_failed(operation->record(now_ns()), status.message);
    for (const Arrival& arrival : operation->take_unreceived()) discard(arrival);
  }
  done(status);
}

void Endpoint::discard(const Arrival& arrival) {
  if (!arrival.inlined || arrival.header.kind == MessageKind::kLend) transport_->discard(arrival);
}

void Endpoint::remember_finished(const Operation& operation) {
  finished_[operation.tag()] = operation.descriptor() + " '" + operation.request.key + "'";
  finished_order_.push_back(operation.tag());
  if (finished_order_.size() > kRememberedOperations) {
    finished_.erase(finished_order_.front());
    finished_order_.pop_front();
  }
}

}  // namespace whale
