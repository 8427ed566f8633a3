// Schedules whose messages fit together.
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "tests/whale_ops/core/core_test.h"
#include "whale_ops/core/collective/algorithms.h"

namespace {

using whale::OpKind;

// Every message that one rank sends is received by its peer: same id, same number of elements,
// once.
void messages_fit(OpKind kind, const std::vector<std::vector<int64_t>>& counts,
                  const std::vector<std::vector<int64_t>>& recv_counts, int root,
                  whale::Algorithm algorithm = whale::Algorithm::kAuto,
                  const std::vector<int>& hosts = {}, bool narrow_float = false) {
  const int size = static_cast<int>(counts.size());
  std::map<std::tuple<int, int, uint32_t>, int64_t> sent, received;
  for (int rank = 0; rank < size; ++rank) {
    whale::Problem problem;
    problem.kind = kind;
    problem.rank = rank;
    problem.size = size;
    problem.root = root;
    problem.algorithm = algorithm;
    problem.hosts = hosts;
    problem.narrow_float = narrow_float;
    problem.element_bytes = narrow_float ? 2 : 4;
    problem.counts = counts[rank];
    problem.recv_counts = recv_counts[rank];
    for (const auto& lane : whale::make_schedule(problem).lanes) {
      for (const auto& step : lane) {
        for (const auto& one : step.sends) {
          require(sent.emplace(std::make_tuple(rank, one.peer, one.id), one.slice.count).second,
                  "an id is sent once");
        }
        for (const auto& one : step.recvs) {
          require(received.emplace(std::make_tuple(one.peer, rank, one.id), one.slice.count).second,
                  "an id is received once");
        }
      }
    }
  }
  const std::string where =
      std::string(whale::name_of(kind)) + " of " + std::to_string(size) + " ranks: ";
  require(sent == received, where + "what is sent is what is received");
  require(size == 1 || kind == OpKind::kAllToAll || !sent.empty(),
          where + "they exchange something");
}

// In how many steps a tensor goes, and how much of it is under way, is as the link between hosts
// is.
void links_decide() {
  whale::Problem problem;
  problem.kind = OpKind::kAllReduce;
  problem.size = 2;
  problem.element_bytes = 4;
  problem.hosts = {0, 1};
  const auto schedule_of = [&](int64_t bytes) {
    problem.counts = {bytes / 4};
    return whale::make_schedule(problem);
  };
  require(schedule_of(256 << 10).algorithm == std::string("pairwise"), "10 Gbit/s at once");
  problem.network = {10e-3, 5e-6, 1.2e8};
  require(schedule_of(256 << 10).algorithm == std::string("direct"), "a step takes 10 ms");
  const whale::Schedule large = schedule_of(16 << 20);
  require(large.algorithm == std::string("pairwise"), "bytes take longer than a step");
  require(large.lanes.size() == 16, "4 MB of a block are under way");
  problem.hosts = {0, 0};
  require(schedule_of(16 << 20).lanes.size() == 4, "1 MB in memory");
}

}  // namespace

void schedules() {
  links_decide();
  std::mt19937 draw(1);
  for (int size = 1; size <= 7; ++size) {
    for (const int64_t largest : {1, 5, 40'000, 700'001}) {
      std::vector<int64_t> shares(size);
      for (auto& share : shares) share = draw() % (largest + 1);
      shares[0] = largest;
      const std::vector<std::vector<int64_t>> none(size), whole(size, {largest}),
          parts(size, shares);
      messages_fit(OpKind::kAllReduce, whole, none, 0);
      for (const auto algorithm :
           {whale::Algorithm::kDirect, whale::Algorithm::kPairwise, whale::Algorithm::kRing,
            whale::Algorithm::kHalvingDoubling, whale::Algorithm::kTree}) {
        messages_fit(OpKind::kAllReduce, whole, none, 0, algorithm);
      }
      for (int most = 2; most < size; ++most) {
        std::vector<int> hosts;  // of at most so many ranks, in a mixed order
        for (int rank = 0; rank < size; ++rank) hosts.push_back(rank % ((size + most - 1) / most));
        for (const auto algorithm : {whale::Algorithm::kHierarchical, whale::Algorithm::kLeader,
                                     whale::Algorithm::kAuto}) {
          messages_fit(OpKind::kAllReduce, whole, none, 0, algorithm, hosts);
          messages_fit(OpKind::kAllReduce, whole, none, 0, algorithm, hosts, true);
        }
      }
      messages_fit(OpKind::kBroadcast, whole, none, size - 1);
      messages_fit(OpKind::kAllGather, parts, none, 0);
      messages_fit(OpKind::kReduceScatter, parts, none, 0);
      std::vector<std::vector<int64_t>> out(size, std::vector<int64_t>(size)),
          in(size, std::vector<int64_t>(size));
      for (int i = 0; i < size; ++i) {
        for (int j = 0; j < size; ++j) out[i][j] = in[j][i] = draw() % (largest + 1);
      }
      messages_fit(OpKind::kAllToAll, out, in, 0);
    }
  }
}
