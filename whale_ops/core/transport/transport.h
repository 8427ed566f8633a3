// What a communicator needs from a network: announced messages between ranks, in order per pair of
// ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "whale_ops/core/base/types.h"

namespace whale {

// kLend: a small message that tells where memory of the sender lies which the receiver may read and
// write until it gives it back.
enum class MessageKind : uint32_t { kData = 0, kAbort = 1, kLeave = 2, kLend = 3 };

// Fixed-size head of every message, sent without conversion between machines of one byte order.
struct MessageHeader {
  uint64_t tag = 0;         // which invocation of which operation
  uint64_t descriptor = 0;  // hash of the description that the sender has of the operation
  uint64_t bytes = 0;       // payload
  uint32_t id = 0;          // number of the message in the operation; of an abort: the status code
  MessageKind kind = MessageKind::kData;
};

// A message whose head has arrived. A small payload comes with it; other payloads wait at the
// sender until receive().
struct Arrival {
  int source = 0;
  MessageHeader header;
  // Of an operation's first message: the description as text; of an abort: the error message.
  std::string note;
  bool inlined = false;
  std::string payload;  // when inlined
  uint64_t token = 0;   // the transport's own, when not inlined
};

// Receives the transport's events: the communicator's endpoint.
class TransportSink {
 public:
  virtual void arrived(Arrival&& arrival) = 0;
  // A send's buffer is free again, or a receive's data has arrived.
  virtual void transferred(uint64_t cookie) = 0;
  // Memory that was lent is free again, and its content is undefined.
  virtual void dropped(uint64_t cookie) = 0;
  virtual void failed(const std::string& what) = 0;

 protected:
  ~TransportSink() = default;
};

// One rank's end of a communicator. All calls are made by the engine's thread. Messages between a
// pair of ranks arrive in the order in which they were sent.
class Transport {
 public:
  static constexpr size_t kInlineBytes = 4096;  // payloads up to this size travel with the header
  static constexpr size_t kMaxNoteBytes = 4096;

  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // `payload` must stay valid until sink.transferred(cookie). Cookie 0: nothing is reported, and
  // there is no payload (abort, leave). For kLend, transferred() is called when the receiver gives
  // the memory back, and sink.dropped(cookie) when it discards the message.
  virtual void send(int peer, const MessageHeader& header, const std::string& note,
                    const void* payload, uint64_t cookie, TransportSink* sink) = 0;
  // Fetches the payload of an announced message into `dst`; sink.transferred(cookie) follows.
  virtual void receive(const Arrival& arrival, void* dst, uint64_t cookie, TransportSink* sink) = 0;
  // Returns memory for the payload of one message to each of these peers, which is then sent
  // without a copy; null if there is none. The message must be sent, and the memory belongs to the
  // transport from then on.
  virtual void* stage(size_t /* bytes */, const std::vector<int>& /* peers */) { return nullptr; }
  // Returns where the payload of an announced message can be read in place, until discard(arrival);
  // null if it cannot, or if the sender would have to wait for that.
  virtual const void* view(const Arrival& /* arrival */) { return nullptr; }
  // Returns where an offset in the arena of a rank that shares its tensors is mapped.
  virtual char* at(int /* peer */, uint64_t /* offset */, uint64_t /* bytes */) { return nullptr; }
  // Ends the use of lent memory, after everything is done for which its owner waits.
  virtual void give_back(const Arrival& /* arrival */) {}
  // Ends the use of an announced message that is not received, so that its sender need not wait.
  virtual void discard(const Arrival& arrival) = 0;
  // Reports what happened since the last call; true when anything did.
  virtual bool progress(TransportSink* sink) = 0;
  // Whether progress() must be called for messages from outside this process to be seen.
  virtual bool needs_polling() const = 0;
  // A descriptor that is readable when progress() has something to do; -1: there is none, or it
  // does not tell everything.
  virtual int descriptor() const { return -1; }
  // Whether messages come from other processes; then a short time of polling before sleeping pays.
  virtual bool between_processes() const = 0;
  // Whether two ranks exchange data without a network. All ranks give the same answer.
  virtual bool share_memory(int /* one */, int /* other */) const { return false; }
  // Whether two ranks have mapped each other's arena (arena.h). All ranks give the same answer.
  virtual bool share_tensors(int /* one */, int /* other */) const { return false; }
  // Whether every send that was given to the network has left this rank's memory.
  virtual bool drained() const = 0;
  // Whether the transport may be closed although peers that are gone have not taken what was sent
  // to them, because nothing reads that memory any more.
  virtual bool may_end() const { return drained(); }
};

}  // namespace whale
