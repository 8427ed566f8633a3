#include "whale_ops/core/transport/host_transport.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "whale_ops/core/transport/arena.h"
#include "whale_ops/core/transport/neighbours.h"
#include "whale_ops/core/transport/process_memory.h"
#include "whale_ops/core/transport/segment.h"

namespace whale {
namespace {

// Somebody who sees that a rank's process has ended (the launcher) can tell more than that its
// memory is gone, and has this time to do so before an error is reported here.
constexpr int64_t kEndedGraceNs = 500'000'000;

enum class RecordKind : uint32_t { kMessage = 0, kTaken = 1 };

// A record in a ring. It is followed by a message's note, and by its payload, if that is small.
struct Record {
  RecordKind kind = RecordKind::kMessage;
  uint32_t note_bytes = 0;
  uint32_t payload_bytes = 0;
  uint32_t slot = 0;     // number, from 1, of the sender's slot with the payload
  uint64_t address = 0;  // of a payload that stays in the sender's memory
  // Whether the payload is in an arena that the receiver has mapped; `address` is then an offset in
  // it.
  bool mapped = false;
  uint64_t cookie = 0;   // the sender's; of a payload that is to be taken, or was
  bool dropped = false;  // of lent memory: it was not used to the end
  MessageHeader header;
};

// How much of another rank's memory a rank can access.
enum Reach : char { kNothing = 0, kRings = 1, kTensors = 2 };

class HostTransport final : public Transport {
 public:
  explicit HostTransport(std::unique_ptr<Transport> network)
      : network_(std::move(network)),
        rank_(network_->rank()),
        size_(network_->size()),
        neighbours_(rank_, size_),
        peers_(size_) {
    for (uint32_t slot = kSlots; slot > 0; --slot) free_slots_.push_back(slot);
  }

  Neighbours& neighbours() { return neighbours_; }

  // `reached`: how much of rank j's memory rank i can access, at i * size + j. Two ranks share
  // memory if each of them can access the other's.
  void use(std::vector<char> reached) {
    reached_ = std::move(reached);
    for (int rank = 0; rank < size_; ++rank) {
      if (!share_memory(rank_, rank)) continue;
      peers_[rank].shared = true;
      peers_[rank].mapped = &neighbours_.of(rank);
      shared_.push_back(rank);
    }
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool needs_polling() const override { return has_remote() && network_->needs_polling(); }
  int descriptor() const override { return has_remote() ? network_->descriptor() : -1; }
  bool between_processes() const override { return true; }
  bool share_memory(int one, int other) const override {
    return reached_[one * size_ + other] && reached_[other * size_ + one];
  }
  bool share_tensors(int one, int other) const override {
    return reached_[one * size_ + other] == kTensors && reached_[other * size_ + one] == kTensors;
  }
  bool drained() const override {
    if (untaken_ > 0 || (has_remote() && !network_->drained())) return false;
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.backlog.empty(); });
  }

  bool may_end() const override { return !has_remote() || network_->may_end(); }

  void send(int to, const MessageHeader& header, const std::string& note, const void* payload,
            uint64_t cookie, TransportSink* sink) override {
    if (!peers_[to].shared) return network_->send(to, header, note, payload, cookie, sink);
    const bool inlined = header.bytes <= kInlineBytes;
    const uint32_t staged = inlined ? 0 : staged_slot(payload);
    const bool slotted =
        staged != 0 || (!inlined && header.bytes <= kSlotBytes && !free_slots_.empty());
    Record record;
    record.header = header;
    record.note_bytes = static_cast<uint32_t>(note.size());
    const bool lends = header.kind == MessageKind::kLend;
    if (lends) {
      record.cookie = cookie;
      ++untaken_;
    }
    if (inlined) {
      record.payload_bytes = static_cast<uint32_t>(header.bytes);
    } else if (slotted) {
      record.slot = staged != 0 ? staged : take_slot(1);
      if (staged == 0) std::memcpy(neighbours_.slot(record.slot - 1), payload, header.bytes);
    } else {
      // If the receiver has mapped this memory, it copies from there, since process_vm_readv has to
      // look up every page.
      record.mapped = share_tensors(rank_, to) && arena_->holds(payload);
      record.address =
          record.mapped ? arena_->offset_of(payload) : reinterpret_cast<uint64_t>(payload);
      record.cookie = cookie;
      ++untaken_;
    }
    write(&peers_[to], record, note, payload);
    if ((inlined || slotted) && cookie != 0 && !lends) sink->transferred(cookie);
  }

  void* stage(size_t bytes, const std::vector<int>& peers) override {
    const bool all_shared =
        std::all_of(peers.begin(), peers.end(), [&](int peer) { return peers_[peer].shared; });
    if (!all_shared || bytes <= kInlineBytes || bytes > kSlotBytes || free_slots_.empty())
      return nullptr;
    return neighbours_.slot(take_slot(static_cast<uint32_t>(peers.size())) - 1);
  }

  void receive(const Arrival& arrival, void* dst, uint64_t cookie, TransportSink* sink) override {
    Peer& peer = peers_[arrival.source];
    if (!peer.shared) return network_->receive(arrival, dst, cookie, sink);
    const Parked& parked = parked_.at(arrival.token);
    const void* mapped =
        parked.mapped ? peer.mapped->at(parked.address, arrival.header.bytes) : nullptr;
    if (const void* data = mapped != nullptr ? mapped : view(arrival); data != nullptr) {
      std::memcpy(dst, data, arrival.header.bytes);
      discard(arrival);
      return sink->transferred(cookie);
    }
    const int error = read_memory(peer.mapped->process, parked.address, dst, arrival.header.bytes);
    if (error == ESRCH) {
      if (ended_ns_ == 0) ended_ns_ = now_ns();
      ended_rank_ = arrival.source;
      return;
    }
    discard(arrival);  // the sender may reuse its memory
    if (error == 0) return sink->transferred(cookie);
    sink->failed("this rank could not read " + std::to_string(arrival.header.bytes) +
                 " bytes from the memory of rank " + std::to_string(arrival.source) + ": " +
                 std::strerror(error));
  }

  const void* view(const Arrival& arrival) override {
    Peer& peer = peers_[arrival.source];
    if (!peer.shared) return network_->view(arrival);
    // Not for a payload in the sender's own tensor: the sender waits until it is taken, and a
    // receiver that only looks at it might wait for the sender meanwhile.
    const uint32_t slot = parked_.at(arrival.token).slot;
    return slot == 0 ? nullptr : neighbours_.slot_of(arrival.source, slot - 1);
  }

  void discard(const Arrival& arrival) override {
    Peer& peer = peers_[arrival.source];
    if (!peer.shared) return network_->discard(arrival);
    taken(&peer, arrival, arrival.header.kind == MessageKind::kLend);
  }

  void give_back(const Arrival& arrival) override {
    taken(&peers_[arrival.source], arrival, false);
  }

  char* at(int rank, uint64_t offset, uint64_t bytes) override {
    return neighbours_.of(rank).at(offset, bytes);
  }

  bool progress(TransportSink* sink) override {
    if (ended_ns_ != 0 && now_ns() - ended_ns_ > kEndedGraceNs) {
      ended_ns_ = 0;
      sink->failed("the process of rank " + std::to_string(ended_rank_) +
                   " has ended in the middle of an operation; look at the log of that rank");
    }
    bool worked = has_remote() && network_->progress(sink);
    for (const int rank : shared_) {
      Peer& peer = peers_[rank];
      const Ring* in = peer.mapped->in;
      worked |= flush(&peer);
      // Only what is in the ring now: handling it may write more, and the engine looks again after
      // any progress.
      const uint64_t end = in->written.load(std::memory_order_acquire);
      for (uint64_t position = in->read.load(std::memory_order_relaxed); position != end;) {
        position = take(rank, position, sink);
        worked = true;
      }
    }
    return worked;
  }

 private:
  struct Peer {
    bool shared = false;
    const Neighbour* mapped = nullptr;  // null: it is reached through the network
    std::deque<std::string> backlog;    // records for which the ring had no room, in order
  };
  struct Parked {
    uint64_t address;
    uint64_t cookie;
    uint32_t slot;
    bool mapped;
  };

  void taken(Peer* peer, const Arrival& arrival, bool dropped) {
    const auto parked = parked_.find(arrival.token);
    Record record;
    record.kind = RecordKind::kTaken;
    record.cookie = parked->second.cookie;
    record.slot = parked->second.slot;
    record.dropped = dropped;
    parked_.erase(parked);
    write(peer, record, "", nullptr);
  }

  uint32_t take_slot(uint32_t readers) {
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    readers_[slot] = readers;
    return slot;
  }

  // Returns the number of the slot, from stage(), in which the payload lies; 0: in none.
  uint32_t staged_slot(const void* payload) const {
    const auto offset =
        reinterpret_cast<uintptr_t>(payload) - reinterpret_cast<uintptr_t>(neighbours_.slot(0));
    return offset < kSlots * kSlotBytes ? static_cast<uint32_t>(offset / kSlotBytes) + 1 : 0;
  }

  bool has_remote() const { return static_cast<int>(shared_.size()) + 1 < size_; }

  void write(Peer* peer, const Record& record, const std::string& note, const void* payload) {
    std::string text(reinterpret_cast<const char*>(&record), sizeof(record));
    text += note;
    if (record.payload_bytes > 0)
      text.append(static_cast<const char*>(payload), record.payload_bytes);
    if (!peer->backlog.empty() || !put(peer, text)) peer->backlog.push_back(std::move(text));
  }

  static bool put(Peer* peer, const std::string& text) {
    Ring* ring = peer->mapped->out;
    const uint64_t position = ring->written.load(std::memory_order_relaxed);
    if (position + text.size() - ring->read.load(std::memory_order_acquire) > kRingBytes) {
      ring->writer_waits.store(1, std::memory_order_seq_cst);
      // Checks again, in case the reader made room before it could see that this rank waits.
      if (position + text.size() - ring->read.load(std::memory_order_seq_cst) > kRingBytes)
        return false;
    }
    copy_in(ring, position, text.data(), text.size());
    ring->written.store(position + text.size(), std::memory_order_release);
    peer->mapped->ring();
    return true;
  }

  static bool flush(Peer* peer) {
    bool worked = false;
    while (!peer->backlog.empty() && put(peer, peer->backlog.front())) {
      peer->backlog.pop_front();
      worked = true;
    }
    return worked;
  }

  // Reads one record and handles it; returns the position of the next one. The room is given back
  // before the sink is called, since the sink may write.
  uint64_t take(int rank, uint64_t position, TransportSink* sink) {
    const Neighbour& peer = *peers_[rank].mapped;
    Record record;
    copy_out(*peer.in, position, &record, sizeof(record));
    position += sizeof(record);
    Arrival arrival;
    arrival.source = rank;
    arrival.header = record.header;
    arrival.note.resize(record.note_bytes);
    copy_out(*peer.in, position, &arrival.note[0], record.note_bytes);
    position += record.note_bytes;
    arrival.payload.resize(record.payload_bytes);
    copy_out(*peer.in, position, &arrival.payload[0], record.payload_bytes);
    position += record.payload_bytes;
    peer.in->read.store(position, std::memory_order_seq_cst);
    if (peer.in->writer_waits.load(std::memory_order_seq_cst) != 0 &&
        peer.in->writer_waits.exchange(0) != 0)
      peer.ring();
    if (record.kind == RecordKind::kTaken) {
      if (record.slot != 0) {
        if (--readers_[record.slot] == 0) free_slots_.push_back(record.slot);
      } else {
        --untaken_;
        record.dropped ? sink->dropped(record.cookie) : sink->transferred(record.cookie);
      }
      return position;
    }
    arrival.inlined = record.header.bytes <= kInlineBytes;
    if (!arrival.inlined || record.header.kind == MessageKind::kLend) {
      arrival.token = next_token_++;
      parked_[arrival.token] = {record.address, record.cookie, record.slot, record.mapped};
    }
    sink->arrived(std::move(arrival));
    return position;
  }

  std::unique_ptr<Transport> network_;
  const Arena* const arena_ = Arena::instance();
  const int rank_;
  const int size_;
  Neighbours neighbours_;
  // Free slots of this rank's segment, numbered from 1; the last one is used next.
  std::vector<uint32_t> free_slots_;
  // By slot: number of receivers that have yet to confirm that they have taken the payload.
  uint32_t readers_[kSlots + 1] = {};
  std::vector<Peer> peers_;  // by rank
  std::vector<char> reached_;
  std::vector<int> shared_;  // ranks that are reached through shared memory
  // Announced payloads that are still in their senders' memory, by token.
  std::unordered_map<uint64_t, Parked> parked_;
  uint64_t next_token_ = 1;
  // When the memory of a peer's process was found to be gone; 0: not found, or reported already.
  int64_t ended_ns_ = 0;
  int ended_rank_ = 0;
  int64_t untaken_ = 0;  // payloads of this rank that peers have yet to read or drop
};

}  // namespace

Status share_memory(std::unique_ptr<Transport> network, bool wanted, const std::vector<int>& hosts,
                    const GatherFixed& gather, const Doorbell& bell,
                    std::unique_ptr<Transport>* transport, std::vector<std::string>* notes) {
  const int size = network->size(), rank = network->rank();
  auto host = std::make_unique<HostTransport>(std::move(network));
  Neighbours& neighbours = host->neighbours();
  Card card = Card::blank();
  if (wanted) neighbours.offer(bell, &card);
  std::vector<Card> cards(static_cast<size_t>(size));
  Status status = gather(&card, sizeof(card), cards.data());
  if (!status.ok()) return status;
  std::vector<char> reached(static_cast<size_t>(size), kNothing),
      all(static_cast<size_t>(size) * static_cast<size_t>(size));
  for (int peer = 0; peer < size; ++peer) {
    if (!wanted || peer == rank || card.machine[0] == 0 ||
        std::strcmp(cards[peer].machine, card.machine) != 0)
      continue;
    if (!hosts.empty() && hosts[peer] != hosts[rank]) continue;
    const std::string obstacle = neighbours.reach(peer, cards[peer]);
    if (obstacle.empty()) {
      reached[peer] = neighbours.of(peer).arena != nullptr ? kTensors : kRings;
    } else {
      notes->push_back("rank " + std::to_string(rank) + " reaches rank " + std::to_string(peer) +
                       " of the same machine through the network: " + obstacle);
    }
  }
  status = gather(reached.data(), reached.size(), all.data());
  if (!status.ok()) return status;
  host->use(std::move(all));
  *transport = std::move(host);
  return Status::Ok();
}

}  // namespace whale
