// The MPI transport between processes, a library of its own that the core loads on demand.
//
// Every message is announced on one MPI tag. Small payloads come with the announcement; others
// follow on a tag that the announcement names. So any number of operations may be in flight, in any
// order, without depending on MPI's matching.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "whale_ops/core/transport/mpi_plugin.h"

namespace whale {
namespace {

constexpr int kAnnouncementTag = 1;
constexpr int kFirstPayloadTag = 16;
// Payloads in flight to one rank before a tag is used again; below the tag limit that MPI
// guarantees.
constexpr int kPayloadTags = 16384;
constexpr size_t kMaxMessageBytes = 1u << 29;  // MPI counts are ints
constexpr int kAnnouncementReceives = 32;
// Tags of each transport, for transports that share a communicator.
constexpr int kTagsEach = kFirstPayloadTag + kPayloadTags;
constexpr int kGatherTag = 2;
// Seconds for a rank to send its data in a gather; ranks that reach this point are close to each
// other in time.
constexpr double kGatherS = 10.0;

struct Announcement {
  MessageHeader header;
  uint32_t payload_tag;
  uint32_t note_bytes;
};

constexpr size_t kAnnouncementBytes =
    sizeof(Announcement) + Transport::kMaxNoteBytes + Transport::kInlineBytes;

bool started_here = false;
bool finalized_here = false;
int open_transports = 0;
// A communicator that is created while all ranks are there, for the ranks that are left when others
// are gone: creating it then would need all of them.
MPI_Comm of_survivors = MPI_COMM_NULL;
bool left_out = false;  // whether ranks of MPI_COMM_WORLD were; MPI_Finalize would wait for them

std::string error_text(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  return std::string(call) + " failed: " + std::string(text, static_cast<size_t>(length));
}

class MpiTransport final : public Transport {
 public:
  // `members`: the ranks of the communicator that take part; if these are all ranks, this transport
  // owns the communicator. `number`: distinguishes transports that share a communicator.
  MpiTransport(MPI_Comm communicator, std::vector<int> members, int number)
      : communicator_(communicator),
        members_(std::move(members)),
        own_(number == 0),
        first_tag_(number * kTagsEach) {
    int mine = 0, all = 0;
    MPI_Comm_rank(communicator_, &mine);
    MPI_Comm_size(communicator_, &all);
    rank_of_.assign(all, -1);
    size_ = static_cast<int>(members_.size());
    for (int rank = 0; rank < size_; ++rank) rank_of_[members_[rank]] = rank;
    rank_ = rank_of_[mine];
    next_payload_.assign(size_, 0);
    receives_.resize(size_ > 1 ? kAnnouncementReceives : 0);
    for (Receive& receive : receives_) {
      receive.buffer.resize(kAnnouncementBytes);
      post(&receive);
    }
    ++open_transports;
  }

  ~MpiTransport() override {
    for (Receive& receive : receives_) {
      MPI_Cancel(&receive.request);
      MPI_Wait(&receive.request, MPI_STATUS_IGNORE);
    }
    if (own_ && !left_out) MPI_Comm_free(&communicator_);
    --open_transports;
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool needs_polling() const override { return size_ > 1; }
  bool between_processes() const override { return size_ > 1; }
  bool drained() const override { return requests_.empty(); }

  void send(int peer, const MessageHeader& header, const std::string& note, const void* payload,
            uint64_t cookie, TransportSink* sink) override {
    const bool inlined = header.bytes <= kInlineBytes;
    Announcement announcement{header, 0, static_cast<uint32_t>(note.size())};
    if (!inlined)
      announcement.payload_tag =
          first_tag_ + kFirstPayloadTag + next_payload_[peer]++ % kPayloadTags;
    std::vector<char> message(sizeof(announcement) + note.size() + (inlined ? header.bytes : 0));
    std::memcpy(message.data(), &announcement, sizeof(announcement));
    if (!note.empty()) std::memcpy(message.data() + sizeof(announcement), note.data(), note.size());
    if (inlined && header.bytes > 0) {
      std::memcpy(message.data() + sizeof(announcement) + note.size(), payload, header.bytes);
    }
    start(
        [&](MPI_Request* request) {
          return MPI_Isend(message.data(), static_cast<int>(message.size()), MPI_BYTE,
                           members_[peer], first_tag_ + kAnnouncementTag, communicator_, request);
        },
        0, &message, sink, "MPI_Isend");
    if (inlined) {
      if (cookie != 0) sink->transferred(cookie);
      return;
    }
    const char* position = static_cast<const char*>(payload);
    parts(
        header.bytes, cookie,
        [&](size_t offset, int count, MPI_Request* request) {
          return MPI_Isend(position + offset, count, MPI_BYTE, members_[peer],
                           static_cast<int>(announcement.payload_tag), communicator_, request);
        },
        sink, "MPI_Isend");
  }

  void receive(const Arrival& arrival, void* dst, uint64_t cookie, TransportSink* sink) override {
    char* position = static_cast<char*>(dst);
    parts(
        arrival.header.bytes, cookie,
        [&](size_t offset, int count, MPI_Request* request) {
          return MPI_Irecv(position + offset, count, MPI_BYTE, members_[arrival.source],
                           static_cast<int>(arrival.token), communicator_, request);
        },
        sink, "MPI_Irecv");
  }

  void discard(const Arrival& arrival) override {
    // Receives in parts, so that dropping a large tensor does not need a large buffer.
    for (size_t offset = 0; offset < arrival.header.bytes; offset += kMaxMessageBytes) {
      std::vector<char> sink_buffer(std::min(kMaxMessageBytes, arrival.header.bytes - offset));
      start(
          [&](MPI_Request* request) {
            return MPI_Irecv(sink_buffer.data(), static_cast<int>(sink_buffer.size()), MPI_BYTE,
                             members_[arrival.source], static_cast<int>(arrival.token),
                             communicator_, request);
          },
          0, &sink_buffer, nullptr, "MPI_Irecv");
    }
  }

  // Gathers fixed-size data of all ranks. If ranks were left out of the communicator, MPI's own
  // gather would wait for them.
  Status gather(const void* mine, size_t bytes, void* all) {
    const int count = static_cast<int>(bytes);
    if (own_) {
      const int code = MPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, communicator_);
      return code == MPI_SUCCESS
                 ? Status::Ok()
                 : Status::Error(Code::kUnavailable, error_text("MPI_Allgather", code));
    }
    // Not freed after an error, since transfers that have begun may still use the memory.
    auto* data = new std::vector<char>(static_cast<const char*>(mine),
                                       static_cast<const char*>(mine) + bytes);
    auto* received = new std::vector<char>(bytes * static_cast<size_t>(size_));
    std::vector<MPI_Request> requests;
    for (int peer = 0; peer < size_; ++peer) {
      char* place = received->data() + bytes * static_cast<size_t>(peer);
      if (peer == rank_) std::memcpy(place, mine, bytes);
      if (peer == rank_) continue;
      requests.resize(requests.size() + 2);
      MPI_Irecv(place, count, MPI_BYTE, members_[peer], first_tag_ + kGatherTag, communicator_,
                &requests[requests.size() - 2]);
      MPI_Isend(data->data(), count, MPI_BYTE, members_[peer], first_tag_ + kGatherTag,
                communicator_, &requests[requests.size() - 1]);
    }
    for (const double until_s = MPI_Wtime() + kGatherS; MPI_Wtime() < until_s; sched_yield()) {
      int done = 0;
      const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done,
                                   MPI_STATUSES_IGNORE);
      if (code != MPI_SUCCESS)
        return Status::Error(Code::kUnavailable, error_text("MPI_Testall", code));
      if (!done) continue;
      std::memcpy(all, received->data(), received->size());
      delete data;
      delete received;
      return Status::Ok();
    }
    return Status::Error(
        Code::kUnavailable,
        "a rank does not answer while the ranks connect; look at the logs of the ranks");
  }

  bool progress(TransportSink* sink) override {
    bool worked = complete_requests(sink);
    // Only the oldest receive is checked, since receives are completed in the order in which they
    // were posted: this keeps messages between a pair of ranks in order.
    while (!receives_.empty() && !broken_) {
      Receive& oldest = receives_[next_receive_];
      int done = 0;
      MPI_Status status;
      const int code = MPI_Test(&oldest.request, &done, &status);
      if (code != MPI_SUCCESS) {
        broken_ = true;
        sink->failed(error_text("receiving", code));
        break;
      }
      if (!done) break;
      worked = true;
      next_receive_ = (next_receive_ + 1) % receives_.size();
      int bytes = 0;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      Arrival arrival = parse(oldest.buffer.data(), static_cast<size_t>(bytes));
      arrival.source = rank_of_[status.MPI_SOURCE];
      post(&oldest);
      sink->arrived(std::move(arrival));
    }
    return worked;
  }

 private:
  struct Receive {
    std::vector<char> buffer;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  struct Tracked {
    uint64_t cookie;           // 0: nobody waits for it
    std::vector<char> buffer;  // memory of the request, if nobody else keeps it
  };

  void post(Receive* receive) {
    MPI_Irecv(receive->buffer.data(), static_cast<int>(receive->buffer.size()), MPI_BYTE,
              MPI_ANY_SOURCE, first_tag_ + kAnnouncementTag, communicator_, &receive->request);
  }

  static Arrival parse(const char* message, size_t bytes) {
    Announcement announcement;
    std::memcpy(&announcement, message, sizeof(announcement));
    Arrival arrival;
    arrival.header = announcement.header;
    arrival.note.assign(message + sizeof(announcement), announcement.note_bytes);
    arrival.inlined = announcement.header.bytes <= kInlineBytes;
    arrival.token = announcement.payload_tag;
    const size_t head = sizeof(announcement) + announcement.note_bytes;
    if (arrival.inlined) arrival.payload.assign(message + head, bytes - head);
    return arrival;
  }

  template <typename Start>
  void start(const Start& begin, uint64_t cookie, std::vector<char>* buffer, TransportSink* sink,
             const char* call) {
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = begin(&request);
    if (code != MPI_SUCCESS) {
      if (sink != nullptr) sink->failed(error_text(call, code));
      return;
    }
    requests_.push_back(request);
    tracked_.push_back({cookie, {}});
    // Moving a vector does not move its elements.
    if (buffer != nullptr) tracked_.back().buffer = std::move(*buffer);
  }

  // Sends or receives one payload as several messages of sizes that MPI can count. They share a
  // tag, since MPI keeps their order; but the last one to be posted need not be the last to
  // complete, so each of them counts down.
  template <typename Begin>
  void parts(size_t bytes, uint64_t cookie, const Begin& begin, TransportSink* sink,
             const char* call) {
    const size_t count = (bytes + kMaxMessageBytes - 1) / kMaxMessageBytes;
    if (count > 1) outstanding_parts_.push_back({cookie, count});
    for (size_t offset = 0; offset < bytes; offset += kMaxMessageBytes) {
      const int size = static_cast<int>(std::min(kMaxMessageBytes, bytes - offset));
      start([&](MPI_Request* request) { return begin(offset, size, request); }, cookie, nullptr,
            sink, call);
    }
  }

  bool complete_requests(TransportSink* sink) {
    if (requests_.empty() || broken_) return false;
    finished_.resize(requests_.size());
    int count = 0;
    const int code = MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count,
                                  finished_.data(), MPI_STATUSES_IGNORE);
    if (code != MPI_SUCCESS) {
      broken_ = true;
      sink->failed(error_text("transferring", code));
      return false;
    }
    if (count == MPI_UNDEFINED || count <= 0) return false;
    // From the back, so that filling a hole with the last request moves none that is still to be
    // handled.
    std::sort(finished_.begin(), finished_.begin() + count, std::greater<int>());
    std::vector<uint64_t> cookies;
    for (int i = 0; i < count; ++i) {
      const auto index = static_cast<size_t>(finished_[i]);
      if (tracked_[index].cookie != 0 && last_part(tracked_[index].cookie))
        cookies.push_back(tracked_[index].cookie);
      requests_[index] = requests_.back();
      if (index + 1 != tracked_.size()) tracked_[index] = std::move(tracked_.back());
      requests_.pop_back();
      tracked_.pop_back();
    }
    for (const uint64_t cookie : cookies) sink->transferred(cookie);
    return true;
  }

  bool last_part(uint64_t cookie) {
    for (auto it = outstanding_parts_.begin(); it != outstanding_parts_.end(); ++it) {
      if (it->first != cookie) continue;
      if (--it->second > 0) return false;
      outstanding_parts_.erase(it);
      return true;
    }
    return true;
  }

  MPI_Comm communicator_;
  const std::vector<int> members_;
  const bool own_;
  const int first_tag_;
  std::vector<int> rank_of_;  // by rank of the communicator; -1: it does not take part
  int rank_ = 0;
  int size_ = 1;
  std::vector<uint32_t> next_payload_;
  std::vector<Receive> receives_;
  size_t next_receive_ = 0;
  bool broken_ = false;  // an error was reported, and further calls would report it again
  std::vector<MPI_Request> requests_;
  std::vector<Tracked> tracked_;  // parallel to requests_, which MPI wants contiguous
  std::vector<int> finished_;
  std::deque<std::pair<uint64_t, size_t>> outstanding_parts_;
};

Status initialize() {
  if (finalized_here) {
    return Status::Error(Code::kUnavailable,
                         "MPI was finalised at the end of this process, and cannot start again; "
                         "make communicators before the process ends");
  }
  int flag = 0;
  MPI_Initialized(&flag);
  int provided = MPI_THREAD_SINGLE;
  if (!flag) {
    const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    if (code != MPI_SUCCESS)
      return Status::Error(Code::kUnavailable, error_text("MPI_Init_thread", code));
    started_here = true;
  } else {
    MPI_Query_thread(&provided);
  }
  // If MPI was started here, all calls come from one thread; other users of MPI in this process may
  // call it from other threads.
  const int needed = started_here ? MPI_THREAD_SERIALIZED : MPI_THREAD_MULTIPLE;
  if (provided < needed) {
    return Status::Error(Code::kUnavailable,
                         "MPI gives thread level " + std::to_string(provided) +
                             ", expected at least " + std::to_string(needed) +
                             "; initialise MPI with MPI_THREAD_MULTIPLE or let wh.init do it");
  }
  return Status::Ok();
}

Status duplicate(MPI_Comm* communicator) {
  const int code = MPI_Comm_dup(MPI_COMM_WORLD, communicator);
  if (code != MPI_SUCCESS)
    return Status::Error(Code::kUnavailable, error_text("MPI_Comm_dup", code));
  MPI_Comm_set_errhandler(*communicator, MPI_ERRORS_RETURN);
  return Status::Ok();
}

Status open(const std::vector<int>& members, int number, std::unique_ptr<Transport>* transport) {
  if (members.empty()) {
    MPI_Comm communicator;
    Status status = duplicate(&communicator);
    if (status.ok() && of_survivors == MPI_COMM_NULL) status = duplicate(&of_survivors);
    if (!status.ok()) return status;
    int size = 0;
    MPI_Comm_size(communicator, &size);
    std::vector<int> all(static_cast<size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    *transport = std::make_unique<MpiTransport>(communicator, std::move(all), 0);
    return Status::Ok();
  }
  int *largest = nullptr, known = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &largest, &known);
  if (!known || number > *largest / kTagsEach - 1) {
    return Status::Error(Code::kUnavailable,
                         "MPI tells no more than " +
                             std::to_string(known ? *largest / kTagsEach - 1 : 0) +
                             " groups of ranks apart; start the run again");
  }
  left_out = true;
  *transport = std::make_unique<MpiTransport>(of_survivors, members, number);
  return Status::Ok();
}

Status gather(Transport* network, const void* mine, size_t bytes, void* all) {
  return static_cast<MpiTransport*>(network)->gather(mine, bytes, all);
}

Status finalize_if_last() {
  if (!started_here || finalized_here || open_transports > 0 || left_out) return Status::Ok();
  finalized_here = true;
  const int code = MPI_Finalize();
  return code == MPI_SUCCESS
             ? Status::Ok()
             : Status::Error(Code::kUnavailable, "MPI could not be ended: MPI_Finalize failed");
}

}  // namespace
}  // namespace whale

extern "C" WHALE_EXPORT const whale::MpiPlugin whale_mpi_plugin = {
    whale::initialize, whale::open, whale::gather, whale::finalize_if_last};
