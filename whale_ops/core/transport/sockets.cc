#include "whale_ops/core/transport/sockets.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>

namespace whale {
namespace {

// That a rank may take to say where its memory lies; it has come so far by then.
constexpr int64_t kGatherNs = 10'000'000'000;
// Who sees that a rank's process has ended tells more than that its end is closed.
constexpr int64_t kBrokenGraceNs = 5'000'000'000;
constexpr int kEvents = 64;

enum class FrameKind : uint32_t { kAnnounced = 0, kPulled = 1, kPayload = 2, kDropped = 3 };

// In front of all that is sent. Behind it lie a message's note and its payload, if that is small;
// or a payload that was pulled.
struct Frame {
  FrameKind kind = FrameKind::kAnnounced;
  uint32_t note_bytes = 0;
  uint64_t token = 0;  // the sender's, of a payload that stays with it
  MessageHeader header;
};

class SocketTransport final : public Transport {
 public:
  SocketTransport(int rank, const std::vector<int>& sockets)
      : rank_(rank), peers_(sockets.size()), events_(epoll_create1(EPOLL_CLOEXEC)) {
    for (size_t peer = 0; peer < sockets.size(); ++peer) {
      peers_[peer].socket = sockets[peer];
      if (sockets[peer] < 0) continue;
      fcntl(sockets[peer], F_SETFL, fcntl(sockets[peer], F_GETFL) | O_NONBLOCK);
      epoll_event event{};
      event.events = EPOLLIN;
      event.data.u32 = static_cast<uint32_t>(peer);
      epoll_ctl(events_, EPOLL_CTL_ADD, sockets[peer], &event);
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
  bool needs_polling() const override { return size() > 1; }
  bool between_processes() const override { return true; }
  bool drained() const override {
    return std::all_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return peer.broken || (peer.out.empty() && peer.parked.empty());
    });
  }

  bool may_end() const override {
    return std::all_of(peers_.begin(), peers_.end(),
                       [](const Peer& peer) { return peer.broken || peer.out.empty(); });
  }

  void send(int to, const MessageHeader& header, const std::string& note, const void* payload,
            uint64_t cookie, TransportSink* sink) override {
    Peer& peer = peers_[to];
    const bool inlined = header.bytes <= kInlineBytes;
    Frame frame;
    frame.note_bytes = static_cast<uint32_t>(note.size());
    frame.header = header;
    if (!inlined) {
      frame.token = next_token_++;
      peer.parked[frame.token] = {static_cast<const char*>(payload), header.bytes, cookie};
    }
    std::string text(reinterpret_cast<const char*>(&frame), sizeof(frame));
    text += note;
    if (inlined && header.bytes > 0) text.append(static_cast<const char*>(payload), header.bytes);
    put(&peer, {std::move(text), {}});
    flush(to, sink);
    if (inlined && cookie != 0) sink->transferred(cookie);
  }

  void receive(const Arrival& arrival, void* dst, uint64_t cookie, TransportSink* sink) override {
    peers_[arrival.source].wanted[arrival.token] = {static_cast<char*>(dst), arrival.header.bytes,
                                                    cookie};
    answer(arrival, FrameKind::kPulled, sink);
  }

  void discard(const Arrival& arrival) override { answer(arrival, FrameKind::kDropped, nullptr); }

  bool progress(TransportSink* sink) override {
    bool worked = false;
    for (int rank = 0; rank < size(); ++rank) {
      Peer& peer = peers_[rank];
      if (!peer.out.empty() && !peer.broken) worked |= flush(rank, sink);
      if (peer.broken_ns != 0 && now_ns() - peer.broken_ns > kBrokenGraceNs) {
        peer.broken_ns = 0;
        sink->failed("the connection with rank " + std::to_string(rank) +
                     " has broken; look at its log");
      }
    }
    epoll_event events[kEvents];
    const int count = epoll_wait(events_, events, kEvents, 0);
    for (int i = 0; i < count; ++i) worked |= read(static_cast<int>(events[i].data.u32), sink);
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
          return Status::Error(Code::kUnavailable,
                               "rank " + std::to_string(rank) +
                                   " does not say where its memory lies; look at its log");
        }
      }
    }
    return Status::Ok();
  }

 private:
  struct Parked {  // a payload here that is announced there
    const char* data;
    uint64_t bytes;
    uint64_t cookie;
  };
  struct Wanted {  // a payload there that is pulled to here
    char* data;
    uint64_t bytes;
    uint64_t cookie;
  };
  struct Out {
    std::string head;
    Parked payload{nullptr, 0, 0};
    uint64_t sent = 0;
  };
  struct Peer {
    int socket = -1;
    bool broken = false;
    // When its end was found closed, though it had not said good-bye; 0: not, or told.
    int64_t broken_ns = 0;
    bool left = false;
    std::deque<Out> out;
    std::unordered_map<uint64_t, Parked> parked;
    std::unordered_map<uint64_t, Wanted> wanted;
    std::string in;             // a frame that has not come whole
    Wanted now{nullptr, 0, 0};  // a payload that is coming
    uint64_t received = 0;      // of it
  };

  static bool ready(int socket, bool sends) {
    pollfd one{socket, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
    return poll(&one, 1, 100) >= 0;
  }

  void answer(const Arrival& arrival, FrameKind kind, TransportSink* sink) {
    Frame frame;
    frame.kind = kind;
    frame.token = arrival.token;
    put(&peers_[arrival.source],
        {std::string(reinterpret_cast<const char*>(&frame), sizeof(frame)), {}});
    if (sink != nullptr) flush(arrival.source, sink);
  }

  static void put(Peer* peer, Out out) {
    if (!peer->broken) peer->out.push_back(std::move(out));
  }

  void lose(Peer* peer) {
    peer->broken = true;
    peer->broken_ns = peer->left ? 0 : now_ns();
    peer->out.clear();
    epoll_ctl(events_, EPOLL_CTL_DEL, peer->socket, nullptr);
  }

  bool flush(int rank, TransportSink* sink) {
    Peer& peer = peers_[rank];
    bool worked = false;
    while (!peer.out.empty()) {
      Out& out = peer.out.front();
      const bool in_head = out.sent < out.head.size();
      const char* from =
          in_head ? out.head.data() + out.sent : out.payload.data + (out.sent - out.head.size());
      const uint64_t left =
          in_head ? out.head.size() - out.sent : out.head.size() + out.payload.bytes - out.sent;
      if (left > 0) {
        const ssize_t moved = ::send(peer.socket, from, left, MSG_NOSIGNAL);
        if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return worked;
        if (moved < 0) {
          lose(&peer);
          return worked;
        }
        out.sent += static_cast<uint64_t>(moved);
        worked = true;
        if (out.sent < out.head.size() + out.payload.bytes) continue;
      }
      const uint64_t cookie = out.payload.cookie;
      peer.out.pop_front();
      if (cookie != 0) sink->transferred(cookie);
    }
    return worked;
  }

  bool read(int rank, TransportSink* sink) {
    Peer& peer = peers_[rank];
    bool worked = false;
    while (!peer.broken) {
      char buffer[64 << 10];
      const bool straight = peer.now.data != nullptr;
      const size_t wanted = straight ? peer.now.bytes - peer.received : sizeof(buffer);
      const ssize_t moved =
          recv(peer.socket, straight ? peer.now.data + peer.received : buffer, wanted, 0);
      if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return worked;
      if (moved <= 0) {
        lose(&peer);
        return worked;
      }
      worked = true;
      if (straight) {
        take_payload(&peer, static_cast<uint64_t>(moved), sink);
      } else {
        peer.in.append(buffer, static_cast<size_t>(moved));
        parse(rank, sink);
      }
    }
    return worked;
  }

  static void take_payload(Peer* peer, uint64_t bytes, TransportSink* sink) {
    peer->received += bytes;
    if (peer->received < peer->now.bytes) return;
    const uint64_t cookie = peer->now.cookie;
    peer->now = {nullptr, 0, 0};
    sink->transferred(cookie);
  }

  void parse(int rank, TransportSink* sink) {
    Peer& peer = peers_[rank];
    size_t begin = 0;
    while (peer.in.size() - begin >= sizeof(Frame)) {
      Frame frame;
      std::memcpy(&frame, peer.in.data() + begin, sizeof(frame));
      size_t behind = begin + sizeof(frame);
      if (frame.kind == FrameKind::kAnnounced) {
        const bool inlined = frame.header.bytes <= kInlineBytes;
        const size_t payload_bytes = inlined ? frame.header.bytes : 0;
        if (peer.in.size() - behind < frame.note_bytes + payload_bytes) break;
        Arrival arrival;
        arrival.source = rank;
        arrival.header = frame.header;
        arrival.note = peer.in.substr(behind, frame.note_bytes);
        arrival.inlined = inlined;
        arrival.payload = peer.in.substr(behind + frame.note_bytes, payload_bytes);
        arrival.token = frame.token;
        behind += frame.note_bytes + payload_bytes;
        peer.left |= frame.header.kind == MessageKind::kLeave;
        sink->arrived(std::move(arrival));
      } else if (frame.kind == FrameKind::kPayload) {
        const auto found = peer.wanted.find(frame.token);
        peer.now = found->second;
        peer.received = 0;
        peer.wanted.erase(found);
        const uint64_t here = std::min<uint64_t>(peer.in.size() - behind, peer.now.bytes);
        std::memcpy(peer.now.data, peer.in.data() + behind, here);
        behind += here;
        take_payload(&peer, here, sink);
      } else if (const auto found = peer.parked.find(frame.token); found != peer.parked.end()) {
        const Parked parked = found->second;
        peer.parked.erase(found);
        if (frame.kind == FrameKind::kDropped) {
          if (parked.cookie != 0) sink->transferred(parked.cookie);
        } else {
          frame.kind = FrameKind::kPayload;
          put(&peer, {std::string(reinterpret_cast<const char*>(&frame), sizeof(frame)), parked});
          flush(rank, sink);
        }
      }
      begin = behind;
    }
    peer.in.erase(0, begin);
  }

  const int rank_;
  std::vector<Peer> peers_;
  const int events_;
  uint64_t next_token_ = 1;
};

}  // namespace

std::unique_ptr<Transport> make_socket_transport(int rank, const std::vector<int>& sockets) {
  return std::make_unique<SocketTransport>(rank, sockets);
}

Status gather_by_sockets(Transport* sockets, const void* mine, size_t bytes, void* all) {
  return static_cast<SocketTransport*>(sockets)->gather(mine, bytes, all);
}

}  // namespace whale
