// All-reduces of tensors that all ranks have mapped (arena.h): every rank tells where its own lie,
// adds up its share of them where they lie, writes the sums to all ranks' outputs, and says when it
// is through. Nothing is copied on the way.
#pragma once

#include <memory>
#include <vector>

#include "whale_ops/core/collective/algorithms.h"
#include "whale_ops/core/operation/messages.h"
#include "whale_ops/core/operation/request.h"

namespace whale {

// Owned by its operation, which lets a ScheduleRun do the rest() afterwards. Engine thread only.
class ZeroCopyReduce {
 public:
  static constexpr int kLane = -1;  // of its messages; lanes of schedules are numbered from 0

  // Null where it does not serve the request: what all ranks answer alike, before they have spoken.
  static std::unique_ptr<ZeroCopyReduce> create(const Request* request, const Problem& problem,
                                                Messages* messages);

  // Tells all ranks where this one's tensors lie, and asks for work() as soon as it knows where
  // theirs do.
  void start(MessageLink* link);
  // Another rank tells where its tensors lie.
  void arrived(MessageLink* link, const Arrival& arrival);
  // Another rank has given this one's memory back.
  void returned() { --away_; }
  // One turn of this rank's sums; it is asked for again until summed().
  void work(MessageLink* link);
  bool summed() const { return missing_ == 0 && shared_.empty(); }
  // Gives the others' memory back, when all sums of this rank are made.
  void give_back(MessageLink* link);
  // Small tensors, and those that lie in no arena on some rank.
  std::vector<Piece> rest() const;
  // Whether any tensor was added up where it lies.
  bool shares() const { return shares_; }
  bool finished() const { return given_back_ && away_ == 0; }
  // Announced messages whose memory has not been given back.
  std::vector<Arrival> take_borrowed();

 private:
  // Where a rank's part of a piece lies in its arena.
  struct Place {
    static constexpr uint64_t kNowhere = ~uint64_t{0};
    uint64_t input = kNowhere;
    uint64_t output = kNowhere;
  };
  // A piece that lies in the arenas of all ranks: where, by rank of the group.
  struct Shared {
    std::vector<const char*> inputs;
    std::vector<char*> outputs;
    int64_t count = 0;
    int64_t done = 0;  // elements of this rank's share
  };

  ZeroCopyReduce(const Request* request, const Problem& problem, Messages* messages,
                 std::vector<Piece> pieces, std::vector<size_t> lent);
  void find_shared(MessageLink* link);

  const Request* const request_;
  Messages* const messages_;
  const int rank_, size_;  // in the group
  const int64_t element_bytes_;
  const std::vector<Piece> pieces_;  // of the request; it as a whole, where it has none
  const std::vector<size_t> lent_;   // pieces that are large enough to lie in arenas
  std::vector<Place> places_;        // of these; what is sent
  std::vector<Arrival>
      borrowed_;  // what the others have sent, by rank of the group, until it is given back
  std::vector<bool> through_;   // pieces that are added up where they lie
  std::vector<Shared> shared_;  // of these, those to which this rank has not added its share
  int missing_;                 // ranks whose places are not known
  int away_;                    // ranks that have yet to give back this rank's memory
  bool given_back_ = false;
  bool shares_ = false;
};

}  // namespace whale
