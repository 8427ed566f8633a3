#include "whale_ops/core/transport/sockets.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>

namespace whale {
namespace {

// Time for a rank to send its data in a gather; ranks that reach this point are close to each other
// in time.
constexpr int64_t kGatherNs = 10'000'000'000;
// Somebody who sees that a rank's process has ended (the launcher) can tell more than that its
// connection broke, and has this time to do so.
constexpr int64_t kBrokenGraceNs = 3'000'000'000;
constexpr int kEvents = 64;
// Largest payload that is sent without being requested; a larger one would delay other messages too
// long.
constexpr uint64_t kMostEagerBytes = 1 << 20;
// Bytes that a rank may receive without having requested them, from one other rank and from all of
// them together.
constexpr uint64_t kWindowBytes = 8 << 20, kWindowsBytes = 128 << 20;
// Requested payloads are sent in parts of this size, so that messages and parts of other payloads
// get in between.
constexpr uint64_t kPartBytes = 1 << 20;
// Bytes that are read from one rank before others have their turn.
constexpr uint64_t kTurnBytes = 2 << 20;
// Bytes that are read where a frame may begin; at most this much of a payload is copied twice.
constexpr size_t kHeadBytes = 8 << 10;
// Set in the tokens of payloads that have come, or are coming, without being requested.
constexpr uint64_t kHere = uint64_t{1} << 63;

enum class FrameKind : uint32_t {
  kMessage = 0,  // with its note, and its payload if `token` is 0
  kPulled = 1,   // requests a payload
  kDropped = 2,  // says that a payload is not wanted
  kPart = 3,     // part of a requested payload
  kTaken = 4     // carries nothing but `taken`
};

// Precedes everything that is sent.
struct Frame {
  FrameKind kind = FrameKind::kMessage;
  uint32_t note_bytes = 0;
  uint64_t token = 0;   // the sender's, of a payload that stays with the sender
  uint64_t offset = 0;  // where the part begins in the payload
  uint64_t bytes = 0;   // size of the payload, or of its part, that follows
  uint64_t taken = 0;   // total unrequested bytes that the sender of this frame has taken
  MessageHeader header;
};

class SocketTransport final : public Transport {
 public:
  SocketTransport(int rank, const std::vector<int>& sockets)
      : rank_(rank), peers_(sockets.size()), events_(epoll_create1(EPOLL_CLOEXEC)) {
    for (size_t peer = 0; peer < sockets.size(); ++peer) {
      peers_[peer].rank = static_cast<int>(peer);
      peers_[peer].socket = sockets[peer];
      if (sockets[peer] < 0) continue;
      fcntl(sockets[peer], F_SETFL, fcntl(sockets[peer], F_GETFL) | O_NONBLOCK);
      watch(&peers_[peer], EPOLL_CTL_ADD);
    }
  }

  ~SocketTransport() override {
    for (Peer& peer : peers_) {
      if (peer.socket >= 0) close(peer.socket);
    }
    close(events_);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  bool needs_polling() const override { return false; }
  int descriptor() const override { return events_; }
  bool between_processes() const override { return true; }
  bool drained() const override {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return peer.broken || (!peer.unsent() && peer.parked.empty());
    });
  }

  bool may_end() const override {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.broken || !peer.unsent(); });
  }

  void send(int to, const MessageHeader& header, const std::string& note, const void* payload,
            uint64_t cookie, TransportSink* sink) override {
    Peer& peer = peers_[to];
    if (peer.broken) {  // its operations end when the loss is reported
      if (header.bytes <= kInlineBytes && cookie != 0) sink->transferred(cookie);
      return;
    }
    const bool inlined = header.bytes <= kInlineBytes;
    const bool eager = !inlined && header.bytes <= kMostEagerBytes &&
                       peer.sent + header.bytes - peer.taken_there <= window_bytes_;
    Frame frame;
    frame.note_bytes = static_cast<uint32_t>(note.size());
    frame.header = header;
    Out out;
    if (inlined || eager) frame.bytes = header.bytes;
    if (eager) {
      peer.sent += header.bytes;
      out.payload = static_cast<const char*>(payload);
      out.payload_bytes = header.bytes;
      out.cookie = cookie;
    } else if (!inlined) {
      frame.token = next_token_++;
      peer.parked[frame.token] = {static_cast<const char*>(payload), header.bytes, header.bytes,
                                  cookie};
    }
    out.head = head_of(&peer, frame);
    out.head += note;
    if (inlined && header.bytes > 0)
      out.head.append(static_cast<const char*>(payload), header.bytes);
    peer.out.push_back(std::move(out));
    flush(&peer);
    if (inlined && cookie != 0) sink->transferred(cookie);
  }

  void receive(const Arrival& arrival, void* dst, uint64_t cookie, TransportSink* sink) override {
    Peer& peer = peers_[arrival.source];
    if ((arrival.token & kHere) == 0) {
      Incoming& incoming = peer.incoming[arrival.token];
      incoming.dst = static_cast<char*>(dst);
      incoming.bytes = arrival.header.bytes;
      incoming.cookie = cookie;
      answer(arrival, FrameKind::kPulled);
      flush(&peer);
      return;
    }
    Incoming& incoming = peer.incoming.at(arrival.token);
    if (incoming.held != nullptr) std::memcpy(dst, incoming.held.get(), incoming.arrived);
    incoming.held.reset();
    incoming.dst = static_cast<char*>(dst);
    incoming.cookie = cookie;
    if (incoming.arrived == incoming.bytes) complete(&peer, arrival.token, sink);
  }

  // Only for a payload that has come unrequested and waits here.
  const void* view(const Arrival& arrival) override {
    if ((arrival.token & kHere) == 0) return nullptr;
    const Incoming& incoming = peers_[arrival.source].incoming.at(arrival.token);
    return incoming.arrived == incoming.bytes ? incoming.held.get() : nullptr;
  }

  void discard(const Arrival& arrival) override {
    if ((arrival.token & kHere) == 0) return answer(arrival, FrameKind::kDropped);
    Peer& peer = peers_[arrival.source];
    Incoming& incoming = peer.incoming.at(arrival.token);
    incoming.dropped = true;
    incoming.held.reset();
    if (incoming.arrived == incoming.bytes) complete(&peer, arrival.token, nullptr);
  }

  bool progress(TransportSink* sink) override {
    bool worked = false;
    for (Peer& peer : peers_) {
      if (peer.unsent() && !peer.full) worked |= flush(&peer);
      if (peer.broken_ns != 0 && now_ns() - peer.broken_ns > kBrokenGraceNs) {
        peer.broken_ns = 0;
        sink->failed("the connection with rank " + std::to_string(peer.rank) + " has broken (" +
                     std::strerror(peer.error) + "); look at the log of that rank");
      }
    }
    epoll_event events[kEvents];
    const int count = epoll_wait(events_, events, kEvents, 0);
    for (int i = 0; i < count; ++i) {
      auto* peer = static_cast<Peer*>(events[i].data.ptr);
      if ((events[i].events & EPOLLOUT) != 0) worked |= flush(peer);
      if ((events[i].events & ~static_cast<uint32_t>(EPOLLOUT)) != 0) worked |= read(peer, sink);
    }
    while (!gone_.empty()) {
      std::vector<uint64_t> gone;
      gone.swap(gone_);
      for (const uint64_t cookie : gone) sink->transferred(cookie);
    }
    return worked;
  }

  Status gather(const void* mine, size_t bytes, void* all) {
    const int64_t until_ns = now_ns() + kGatherNs;
    for (int rank = 0; rank < size(); ++rank) {
      char* place = static_cast<char*>(all) + bytes * static_cast<size_t>(rank);
      if (rank == rank_) std::memcpy(place, mine, bytes);
    }
    for (const bool sends : {true, false}) {
      for (int rank = 0; rank < size(); ++rank) {
        if (rank == rank_) continue;
        char* place = static_cast<char*>(all) + bytes * static_cast<size_t>(rank);
        for (size_t done = 0; done < bytes;) {
          const int socket = peers_[rank].socket;
          const ssize_t moved = sends ? ::send(socket, static_cast<const char*>(mine) + done,
                                               bytes - done, MSG_NOSIGNAL)
                                      : recv(socket, place + done, bytes - done, 0);
          if (moved > 0) done += static_cast<size_t>(moved);
          const bool waits = moved < 0 && (errno == EAGAIN || errno == EINTR);
          if (moved > 0 || (waits && now_ns() < until_ns && ready(socket, sends))) continue;
          return Status::Error(
              Code::kUnavailable,
              "rank " + std::to_string(rank) +
                  " does not answer while the ranks connect; look at the log of that rank");
        }
      }
    }
    return Status::Ok();
  }

 private:
  struct Parked {  // a payload of this rank that was announced to a peer
    const char* data;
    uint64_t bytes;
    uint64_t unsent;
    uint64_t cookie;
  };
  struct Incoming {  // a payload of a peer that is sent to this rank
    char* dst = nullptr;
    std::unique_ptr<char[]> held;  // where it waits until it is received
    uint64_t bytes = 0;
    uint64_t arrived = 0;
    uint64_t cookie = 0;
    bool dropped = false;
  };
  struct Out {
    std::string head;
    const char* payload = nullptr;
    uint64_t payload_bytes = 0;
    uint64_t cookie = 0;  // reported when the payload has been sent
    uint64_t token = 0;   // of the parked payload of which it is a part
    uint64_t sent = 0;
  };
  struct Peer {
    int rank = 0;
    int socket = -1;
    bool full = false;  // the system accepts no more for now, and reports when it does
    bool broken = false;
    int error = 0;
    // When its end was found closed although it had not said good-bye; 0: not found, or reported
    // already.
    int64_t broken_ns = 0;
    bool left = false;
    std::deque<Out> out;
    std::deque<Out> parts;  // sent only if `out` is empty
    std::unordered_map<uint64_t, Parked> parked;
    std::string in;  // a frame that has not arrived completely
    std::unordered_map<uint64_t, Incoming> incoming;
    // The payload that is arriving now: its token, the position where it continues, and the bytes
    // that are left.
    uint64_t token = 0, position = 0, left_bytes = 0;
    // Unrequested bytes: sent to the peer, and taken by it; taken here, and of these reported to
    // the peer.
    uint64_t sent = 0, taken_there = 0, taken = 0, told = 0;

    bool unsent() const { return !out.empty() || !parts.empty(); }
  };

  static bool ready(int socket, bool sends) {
    pollfd one{socket, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
    return poll(&one, 1, 100) >= 0;
  }

  void watch(Peer* peer, int operation) const {
    epoll_event event{};
    event.events = peer->full ? EPOLLIN | EPOLLOUT : EPOLLIN;
    event.data.ptr = peer;
    epoll_ctl(events_, operation, peer->socket, &event);
  }

  // Every frame reports how many unrequested bytes have been taken.
  static std::string head_of(Peer* peer, Frame frame) {
    frame.taken = peer->told = peer->taken;
    return std::string(reinterpret_cast<const char*>(&frame), sizeof(frame));
  }

  void answer(const Arrival& arrival, FrameKind kind) {
    Peer& peer = peers_[arrival.source];
    if (peer.broken) return;
    Frame frame;
    frame.kind = kind;
    frame.token = arrival.token;
    put(&peer, frame);
  }

  static void put(Peer* peer, const Frame& frame) {
    Out out;
    out.head = head_of(peer, frame);
    peer->out.push_back(std::move(out));
  }

  void lose(Peer* peer, int error) {
    if (peer->broken) return;
    peer->broken = true;
    peer->error = error;
    peer->broken_ns = peer->left ? 0 : now_ns();
    peer->out.clear();
    peer->parts.clear();
    epoll_ctl(events_, EPOLL_CTL_DEL, peer->socket, nullptr);
  }

  // A frame that was begun is continued; otherwise messages go before parts of payloads.
  static std::deque<Out>& next_out(Peer* peer) {
    const bool begun = !peer->parts.empty() && peer->parts.front().sent > 0;
    return begun || peer->out.empty() ? peer->parts : peer->out;
  }

  // progress() reports which payloads have been sent, not this function: a caller that sends one
  // message must not be told of others meanwhile.
  bool flush(Peer* peer) {
    bool worked = false;
    while (!peer->broken && peer->unsent()) {
      std::deque<Out>& queue = next_out(peer);
      Out& out = queue.front();
      const uint64_t head = std::min<uint64_t>(out.sent, out.head.size());
      iovec pieces[2] = {{&out.head[0] + head, out.head.size() - head},
                         {const_cast<char*>(out.payload) + (out.sent - head),
                          out.payload_bytes - (out.sent - head)}};
      msghdr message{};
      message.msg_iov = pieces;
      message.msg_iovlen = out.payload_bytes > 0 ? 2 : 1;
      const ssize_t moved = sendmsg(peer->socket, &message, MSG_NOSIGNAL);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0 && errno == EAGAIN) {
        if (!peer->full) {
          peer->full = true;
          watch(peer, EPOLL_CTL_MOD);
        }
        return worked;
      }
      if (moved < 0) {
        lose(peer, errno);
        return worked;
      }
      out.sent += static_cast<uint64_t>(moved);
      worked = true;
      if (out.sent < out.head.size() + out.payload_bytes) continue;
      const Out gone = std::move(out);
      queue.pop_front();
      sent(peer, gone);
    }
    if (peer->full && !peer->broken) {
      peer->full = false;
      watch(peer, EPOLL_CTL_MOD);
    }
    return worked;
  }

  void sent(Peer* peer, const Out& out) {
    uint64_t cookie = out.cookie;
    if (out.token != 0) {
      const auto found = peer->parked.find(out.token);
      found->second.unsent -= out.payload_bytes;
      if (found->second.unsent > 0) return;
      cookie = found->second.cookie;
      peer->parked.erase(found);
    }
    if (cookie != 0) gone_.push_back(cookie);
  }

  bool read(Peer* peer, TransportSink* sink) {
    bool worked = false;
    for (uint64_t turn = 0; turn < kTurnBytes && !peer->broken;) {
      char buffer[kHeadBytes];
      char* to = buffer;
      size_t wanted = sizeof(buffer);
      if (peer->left_bytes > 0) {
        char* const place = place_of(peer);
        if (place != nullptr) to = place;
        wanted = place != nullptr ? peer->left_bytes : std::min<uint64_t>(peer->left_bytes, wanted);
      }
      const ssize_t moved = recv(peer->socket, to, wanted, 0);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0 && errno == EAGAIN) return worked;
      if (moved <= 0) {
        lose(peer, moved < 0 ? errno : ECONNRESET);
        return worked;
      }
      worked = true;
      turn += static_cast<uint64_t>(moved);
      if (peer->left_bytes > 0) {
        land(peer, static_cast<uint64_t>(moved), sink);
      } else {
        peer->in.append(buffer, static_cast<size_t>(moved));
        parse(peer, sink);
      }
    }
    return worked;
  }

  // Returns where the arriving payload continues; null: it is dropped.
  static char* place_of(Peer* peer) {
    const Incoming& incoming = peer->incoming.at(peer->token);
    char* const begin = incoming.dst != nullptr ? incoming.dst : incoming.held.get();
    return begin == nullptr ? nullptr : begin + peer->position;
  }

  void land(Peer* peer, uint64_t bytes, TransportSink* sink) {
    const uint64_t token = peer->token;
    Incoming& incoming = peer->incoming.at(token);
    incoming.arrived += bytes;
    peer->position += bytes;
    peer->left_bytes -= bytes;
    if (incoming.arrived == incoming.bytes && (incoming.dst != nullptr || incoming.dropped))
      complete(peer, token, sink);
  }

  // A payload has arrived completely, or nobody wants it.
  void complete(Peer* peer, uint64_t token, TransportSink* sink) {
    const auto found = peer->incoming.find(token);
    const uint64_t cookie = found->second.dropped ? 0 : found->second.cookie;
    if ((token & kHere) != 0) peer->taken += found->second.bytes;
    peer->incoming.erase(found);
    if (peer->taken - peer->told > window_bytes_ / 4 && !peer->broken) {
      Frame frame;
      frame.kind = FrameKind::kTaken;
      put(peer, frame);
    }
    if (cookie != 0) sink->transferred(cookie);
  }

  void parse(Peer* peer, TransportSink* sink) {
    size_t begin = 0;
    while (peer->left_bytes == 0 && peer->in.size() - begin >= sizeof(Frame)) {
      Frame frame;
      std::memcpy(&frame, peer->in.data() + begin, sizeof(frame));
      const bool inlined = frame.kind == FrameKind::kMessage && frame.header.bytes <= kInlineBytes;
      const size_t whole = sizeof(frame) + frame.note_bytes + (inlined ? frame.bytes : 0);
      if (peer->in.size() - begin < whole) break;
      const size_t text = begin + sizeof(frame);
      begin += whole;
      peer->taken_there = std::max(peer->taken_there, frame.taken);
      if (frame.kind == FrameKind::kMessage) {
        take_message(peer, frame, peer->in.data() + text, sink);
      } else if (frame.kind == FrameKind::kPart) {
        peer->token = frame.token;
        peer->position = frame.offset;
        peer->left_bytes = frame.bytes;
      } else if (frame.kind != FrameKind::kTaken) {
        take_answer(peer, frame, sink);
      }
      if (peer->left_bytes == 0) continue;
      const uint64_t here = std::min<uint64_t>(peer->in.size() - begin, peer->left_bytes);
      if (here == 0) continue;
      char* const place = place_of(peer);
      if (place != nullptr) std::memcpy(place, peer->in.data() + begin, here);
      begin += here;
      land(peer, here, sink);
    }
    peer->in.erase(0, begin);
  }

  // `text`: the message's note, followed by a small payload.
  void take_message(Peer* peer, const Frame& frame, const char* text, TransportSink* sink) {
    peer->left |= frame.header.kind == MessageKind::kLeave;
    Arrival arrival;
    arrival.source = peer->rank;
    arrival.header = frame.header;
    arrival.note.assign(text, frame.note_bytes);
    arrival.inlined = frame.header.bytes <= kInlineBytes;
    arrival.token = frame.token;
    if (arrival.inlined) arrival.payload.assign(text + frame.note_bytes, frame.bytes);
    if (arrival.inlined || frame.token != 0) return sink->arrived(std::move(arrival));
    const uint64_t token = arrival.token = kHere | next_token_++;
    peer->incoming[token].bytes = frame.bytes;
    peer->token = token;
    peer->position = 0;
    peer->left_bytes = frame.bytes;
    sink->arrived(std::move(arrival));  // whoever waits for it says where it goes
    Incoming& incoming = peer->incoming.at(token);
    if (incoming.dst == nullptr && !incoming.dropped) incoming.held.reset(new char[frame.bytes]);
  }

  void take_answer(Peer* peer, const Frame& frame, TransportSink* sink) {
    const auto found = peer->parked.find(frame.token);
    if (found == peer->parked.end()) return;
    const Parked parked = found->second;
    if (frame.kind == FrameKind::kDropped) {
      peer->parked.erase(found);
      if (parked.cookie != 0) sink->transferred(parked.cookie);
      return;
    }
    for (uint64_t offset = 0; offset < parked.bytes; offset += kPartBytes) {
      Frame part;
      part.kind = FrameKind::kPart;
      part.token = frame.token;
      part.offset = offset;
      part.bytes = std::min(kPartBytes, parked.bytes - offset);
      Out out;
      out.head = head_of(peer, part);
      out.payload = parked.data + offset;
      out.payload_bytes = part.bytes;
      out.token = frame.token;
      peer->parts.push_back(std::move(out));
    }
    flush(peer);
  }

  const int rank_;
  std::vector<Peer> peers_;
  const int events_;
  const uint64_t window_bytes_ =
      std::clamp<uint64_t>(kWindowsBytes / peers_.size(), kMostEagerBytes, kWindowBytes);
  uint64_t next_token_ = 1;
  std::vector<uint64_t> gone_;  // cookies of payloads that have left this memory
};

}  // namespace

std::unique_ptr<Transport> make_socket_transport(int rank, const std::vector<int>& sockets) {
  return std::make_unique<SocketTransport>(rank, sockets);
}

Status gather_by_sockets(Transport* sockets, const void* mine, size_t bytes, void* all) {
  return static_cast<SocketTransport*>(sockets)->gather(mine, bytes, all);
}

}  // namespace whale
