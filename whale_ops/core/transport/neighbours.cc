#include "whale_ops/core/transport/neighbours.h"

#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "whale_ops/core/transport/arena.h"
#include "whale_ops/core/transport/process_memory.h"

namespace whale {

Card Card::blank() {
  Card card = {};
  card.segment_descriptor = card.arena_descriptor = -1;
  card.error = kSwitchedOff;
  return card;
}

Neighbours::~Neighbours() {
  for (Neighbour& neighbour : neighbours_) {
    if (neighbour.segment != nullptr) munmap(neighbour.segment, segment_bytes_);
    if (neighbour.bell != nullptr) munmap(neighbour.bell, sizeof(Bell));
    if (neighbour.pipe >= 0) close(neighbour.pipe);
    if (neighbour.arena != nullptr) munmap(neighbour.arena, neighbour.arena_bytes);
  }
  if (own_ != nullptr) munmap(own_, segment_bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void Neighbours::offer(const Doorbell& bell, Card* card) {
  std::strncpy(card->machine, machine_name().c_str(), sizeof(card->machine) - 1);
  card->process = getpid();
  card->bell_descriptor = bell.descriptor();
  card->pipe_descriptor = bell.pipe();
  // As many rings as there are ranks, since it is not known yet which of them are on this machine;
  // untouched pages take no memory.
  segment_bytes_ = Segment::bytes_for(static_cast<size_t>(size_));
  void* memory = map_new("whale_rings", segment_bytes_, &descriptor_);
  if (memory == nullptr || card->bell_descriptor < 0 ||
      getrandom(mark_, sizeof(mark_), 0) != sizeof(mark_)) {
    card->error = errno;
    return;
  }
  own_ = static_cast<Segment*>(memory);
  std::memcpy(own_->mark, mark_, sizeof(mark_));
  std::memcpy(card->mark, mark_, sizeof(mark_));
  card->segment_descriptor = descriptor_;
  card->mark_address = reinterpret_cast<uint64_t>(mark_);
  if (const Arena* arena = Arena::instance(); arena != nullptr) {
    card->arena_descriptor = arena->descriptor();
    card->arena_bytes = arena->bytes();
  }
  allow_reading();
}

std::string Neighbours::reach(int rank, const Card& card) {
  Neighbour& neighbour = neighbours_[static_cast<size_t>(rank)];
  neighbour.process = card.process;
  if (own_ == nullptr) return "this rank could not create shared memory";
  if (card.segment_descriptor < 0 && card.error == Card::kSwitchedOff)
    return "rank " + std::to_string(rank) + " has shared memory switched off";
  if (card.segment_descriptor < 0)
    return "rank " + std::to_string(rank) + " could not create shared memory (" +
           std::strerror(card.error) + ")";
  uint64_t mark[2] = {};
  const int error = read_memory(card.process, card.mark_address, mark, sizeof(mark));
  if (error != 0 || std::memcmp(mark, card.mark, sizeof(mark)) != 0) {
    return "the memory of rank " + std::to_string(rank) + " cannot be read (" +
           (error != 0 ? std::strerror(error) : "another process has its process number") +
           "; containers need one process namespace and CAP_SYS_PTRACE)";
  }
  neighbour.segment =
      static_cast<Segment*>(map_of(card.process, card.segment_descriptor, segment_bytes_));
  if (neighbour.segment != nullptr)
    neighbour.bell = static_cast<Bell*>(map_of(card.process, card.bell_descriptor, sizeof(Bell)));
  if (neighbour.bell != nullptr) neighbour.pipe = open_pipe_of(card.process, card.pipe_descriptor);
  if (neighbour.pipe < 0)
    return "the shared memory of rank " + std::to_string(rank) + " cannot be opened (" +
           std::strerror(errno) + ")";
  if (std::memcmp(neighbour.segment->mark, card.mark, sizeof(mark)) != 0)
    return "the shared memory that was opened is not that of rank " + std::to_string(rank);
  if (card.arena_descriptor >= 0) {
    neighbour.arena =
        static_cast<char*>(map_of(card.process, card.arena_descriptor, card.arena_bytes));
    neighbour.arena_bytes = card.arena_bytes;
  }
  neighbour.in = &own_->rings[rank];
  neighbour.out = &neighbour.segment->rings[rank_];
  return "";
}

}  // namespace whale
