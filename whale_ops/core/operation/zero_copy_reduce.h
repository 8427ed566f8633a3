// All-reduces without copies, for tensors that all ranks have mapped (arena.h): every rank tells
// where its tensors are, reads its share of all ranks' tensors in place and adds it up, writes the
// sums to all ranks' outputs, and says when it has finished.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/messages.h"
#include "whale_ops/core/operation/request.h"

namespace whale {

// Owned by its operation, which has a ScheduleRun reduce rest() afterwards. Used by the engine's
// thread only.
class ZeroCopyReduce {
 public:
  static constexpr int kLane = -1;  // lane number of its messages; lanes of schedules begin at 0

  // Returns null if the request is not suitable; all ranks decide this alike, before they exchange
  // anything.
  static std::unique_ptr<ZeroCopyReduce> create(const Request* request, const Problem& problem,
                                                Messages* messages);

  // Tells all ranks where this rank's tensors are. Asks for work() as soon as it knows where theirs
  // are.
  void start(MessageLink* link);
  // Another rank has told where its tensors are.
  void arrived(MessageLink* link, const Arrival& arrival);
  // Another rank no longer uses this rank's memory.
  void returned() { --away_; }
  // Computes a part of this rank's sums; to be called again until summed().
  void work(MessageLink* link);
  bool summed() const { return missing_ == 0 && shared_.empty(); }
  // Tells the others that this rank no longer uses their memory, when all of its sums are done.
  void give_back(MessageLink* link);
  // Returns the pieces that were not reduced: small ones, and those that are in no arena on some
  // rank.
  std::vector<Piece> rest() const;
  // Whether any tensor was reduced in place.
  bool shares() const { return shares_; }
  bool finished() const { return given_back_ && away_ == 0; }
  // Returns announced messages of other ranks whose memory has not been given back.
  std::vector<Arrival> take_borrowed();

 private:
  // Offsets of a piece's input and output in a rank's arena.
  struct Place {
    static constexpr uint64_t kNowhere = ~uint64_t{0};
    uint64_t input = kNowhere;
    uint64_t output = kNowhere;
  };
  // Addresses of a piece that is in the arenas of all ranks, by rank of the group.
  struct Shared {
    std::vector<const char*> inputs;
    std::vector<char*> outputs;
    int64_t count = 0;
    int64_t done = 0;  // elements of this rank's share that are done
  };

  ZeroCopyReduce(const Request* request, const Problem& problem, Messages* messages,
                 std::vector<Piece> pieces, std::vector<size_t> lent);
  void find_shared(MessageLink* link);

  const Request* const request_;
  Messages* const messages_;
  const int rank_, size_;  // in the group
  const int64_t element_bytes_;
  const std::vector<Piece> pieces_;  // of the request; without any, the whole tensor as one
  const std::vector<size_t> lent_;   // indices of pieces that are large enough to be in arenas
  std::vector<Place> places_;        // places of these pieces, which are sent to the other ranks
  std::vector<Arrival>
      borrowed_;  // the other ranks' messages, by rank of the group, until they are given back
  std::vector<bool> through_;   // which pieces are reduced in place
  std::vector<Shared> shared_;  // of these, the ones of which this rank's share is not done yet
  int missing_;                 // ranks whose places are not known yet
  int away_;                    // ranks that still use this rank's memory
  bool given_back_ = false;
  bool shares_ = false;
};

}  // namespace whale
