#include "whale_ops/core/transport/in_process.h"

#include <cstring>
#include <deque>
#include <unordered_map>
#include <utility>

namespace whale {
namespace {

// All ranks are served by the same engine thread, so nothing here needs a lock.
struct Mailbox {
  std::deque<Arrival> arrivals;
  std::deque<uint64_t> finished_sends;
};

struct Parked {
  int sender;
  const void* payload;
  uint64_t cookie;
};

struct Hub {
  Hub(int size, std::vector<int> hosts) : mailboxes(size), hosts(std::move(hosts)) {}
  std::vector<Mailbox> mailboxes;
  const std::vector<int> hosts;
  std::unordered_map<uint64_t, Parked> parked;  // payloads that wait for their receiver, by token
  uint64_t next_token = 1;
};

class InProcessTransport final : public Transport {
 public:
  InProcessTransport(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(hub_->mailboxes.size()); }
  bool needs_polling() const override { return false; }
  bool between_processes() const override { return false; }
  bool share_memory(int one, int other) const override {
    return hub_->hosts.empty() || hub_->hosts[one] == hub_->hosts[other];
  }
  bool drained() const override { return hub_->mailboxes[rank_].finished_sends.empty(); }

  void send(int peer, const MessageHeader& header, const std::string& note, const void* payload,
            uint64_t cookie, TransportSink* sink) override {
    Arrival arrival;
    arrival.source = rank_;
    arrival.header = header;
    arrival.note = note;
    arrival.inlined = header.bytes <= kInlineBytes;
    if (arrival.inlined) {
      if (header.bytes > 0) arrival.payload.assign(static_cast<const char*>(payload), header.bytes);
    } else {
      arrival.token = hub_->next_token++;
      hub_->parked[arrival.token] = {rank_, payload, cookie};
    }
    const bool done = arrival.inlined && cookie != 0;
    hub_->mailboxes[peer].arrivals.push_back(std::move(arrival));
    if (done) sink->transferred(cookie);
  }

  void receive(const Arrival& arrival, void* dst, uint64_t cookie, TransportSink* sink) override {
    const auto it = hub_->parked.find(arrival.token);
    if (it == hub_->parked.end()) {
      sink->failed("a message of rank " + std::to_string(arrival.source) +
                   " was read twice; report this");
      return;
    }
    std::memcpy(dst, it->second.payload, arrival.header.bytes);
    hub_->mailboxes[it->second.sender].finished_sends.push_back(it->second.cookie);
    hub_->parked.erase(it);
    sink->transferred(cookie);
  }

  void discard(const Arrival& arrival) override {
    const auto it = hub_->parked.find(arrival.token);
    if (it == hub_->parked.end()) return;
    hub_->mailboxes[it->second.sender].finished_sends.push_back(it->second.cookie);
    hub_->parked.erase(it);
  }

  bool progress(TransportSink* sink) override {
    Mailbox& mailbox = hub_->mailboxes[rank_];
    bool worked = false;
    while (!mailbox.finished_sends.empty()) {
      const uint64_t cookie = mailbox.finished_sends.front();
      mailbox.finished_sends.pop_front();
      sink->transferred(cookie);
      worked = true;
    }
    while (!mailbox.arrivals.empty()) {
      Arrival arrival = std::move(mailbox.arrivals.front());
      mailbox.arrivals.pop_front();
      sink->arrived(std::move(arrival));
      worked = true;
    }
    return worked;
  }

 private:
  std::shared_ptr<Hub> hub_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_in_process_transports(int size,
                                                                   std::vector<int> hosts) {
  auto hub = std::make_shared<Hub>(size, std::move(hosts));
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank)
    transports.push_back(std::make_unique<InProcessTransport>(hub, rank));
  return transports;
}

}  // namespace whale
