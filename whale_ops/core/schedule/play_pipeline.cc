#include "whale_ops/core/schedule/play_pipeline.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace whale {
namespace {

constexpr int64_t kSteadyGroups = 8;  // groups to play before looking for a steady state between
constexpr double kSame = 1e-13;  // relative difference of times that are equal but for rounding
constexpr double kNotYet = -1;

// One play of a number of micro-batches in groups, the first of which has `size` of them.
class Play {
 public:
  Play(int64_t stages, int64_t chunks, int64_t micro_batches, int64_t groups, int64_t size)
      : stages_(stages),
        chunks_(chunks),
        micro_batches_(micro_batches),
        total_(chunks * micro_batches),
        groups_(groups) {
    first_.reserve(static_cast<size_t>(groups) + 1);
    order_.reserve(static_cast<size_t>(total_));
    for (int64_t group = 0, first = 0; group < groups; ++group) {
      // Without chunks passes are in one order whatever the groups: what is left over comes last.
      const int64_t own = chunks > 1            ? (micro_batches + groups - 1 - group) / groups
                          : group == groups - 1 ? micro_batches - first
                                                : size;
      const int64_t end = first + own;
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        for (int64_t one = first; one < end; ++one) order_.push_back({chunk, one});
      first_.push_back(first);
      first = end;
    }
    first_.push_back(micro_batches);
    const auto passes = static_cast<size_t>(stages * total_);
    ahead_s_.assign(passes, kNotYet);
    back_s_.assign(passes, kNotYet);
  }

  // Plays all passes.
  void run(const double* forward_s, const double* backward_s, double* ends_s) {
    const auto count = static_cast<size_t>(stages_);
    std::vector<int64_t> places(count, 0), runnable(count);
    std::vector<char> waiting(count, 1);
    for (size_t stage = 0; stage < count; ++stage) runnable[stage] = static_cast<int64_t>(stage);
    std::fill(ends_s, ends_s + stages_, 0.0);
    while (!runnable.empty()) {
      const int64_t stage = runnable.back();
      runnable.pop_back();
      waiting[static_cast<size_t>(stage)] = 0;
      int64_t& place = places[static_cast<size_t>(stage)];
      const int64_t before = place;
      place = advance(stage, place, forward_s + stage * chunks_, backward_s + stage * chunks_,
                      &ends_s[stage]);
      if (place == before) continue;
      for (const int64_t other : {(stage + 1) % stages_, (stage + stages_ - 1) % stages_}) {
        if (waiting[static_cast<size_t>(other)] || other == stage) continue;
        waiting[static_cast<size_t>(other)] = 1;
        runnable.push_back(other);
      }
    }
  }

  // Returns by how many seconds each pass of two groups in the middle comes later than the same
  // pass of the group before; NaN if that is not the same for all.
  double steady_step_s(double end_s) const {
    const int64_t middle = groups_ / 2, size = first_[1];
    double least_s = INFINITY, most_s = -INFINITY;
    for (const auto* times_s : {&ahead_s_, &back_s_}) {
      for (int64_t part = 0; part < stages_ * chunks_; ++part) {
        const double* own_s = times_s->data() + part * micro_batches_;
        for (int64_t group = middle - 1; group <= middle; ++group) {
          const int64_t first = first_[static_cast<size_t>(group)];
          const int64_t next = first_[static_cast<size_t>(group) + 1];
          for (int64_t one = 0; one < size; ++one) {
            const double step_s = own_s[next + one] - own_s[first + one];
            least_s = std::min(least_s, step_s);
            most_s = std::max(most_s, step_s);
          }
        }
      }
    }
    const double rounding_s = kSame * static_cast<double>(groups_) * end_s;
    return most_s - least_s <= rounding_s ? least_s : NAN;
  }

 private:
  struct Turn {
    int64_t chunk, micro_batch;
  };

  // Returns how many forward passes a stage runs before its first backward pass.
  int64_t warm_up(int64_t stage) const {
    if (chunks_ == 1) return std::min(total_, stages_ - 1 - stage);
    if (groups_ == 1) return total_;
    return std::min(total_, 2 * (stages_ - 1 - stage) + (chunks_ - 1) * first_[1]);
  }

  // Plays passes of a stage from the one at `place` on until one waits for another stage; returns
  // that one's place.
  int64_t advance(int64_t stage, int64_t place, const double* forward_s, const double* backward_s,
                  double* now_s) {
    const int64_t warm = warm_up(stage), last = stages_ * chunks_ - 1;
    double now = *now_s;
    // Forward passes to warm up, then one of each kind in turn, then the backward passes left.
    for (; place < 2 * total_; ++place) {
      const int64_t over = place - warm;
      double took_s, ready_s;
      double* end_s;
      if (over < 0 || (over % 2 == 0 && warm + over / 2 < total_)) {
        const Turn turn = order_[static_cast<size_t>(over < 0 ? place : warm + over / 2)];
        const int64_t part = turn.chunk * stages_ + stage;
        end_s = &ahead_s_[static_cast<size_t>(part * micro_batches_ + turn.micro_batch)];
        ready_s = part == 0 ? 0.0 : *(end_s - micro_batches_);
        took_s = forward_s[turn.chunk];
      } else {
        const int64_t at = over / 2 < total_ - warm ? over / 2 : place - total_;
        const Turn turn = order_[static_cast<size_t>(at)];
        const int64_t chunk = chunks_ - 1 - turn.chunk, part = chunk * stages_ + stage;
        const auto pass = static_cast<size_t>(part * micro_batches_ + turn.micro_batch);
        end_s = &back_s_[pass];
        ready_s = part == last ? ahead_s_[pass] : *(end_s + micro_batches_);
        took_s = backward_s[chunk];
      }
      if (ready_s == kNotYet) break;
      now = std::max(now, ready_s) + took_s;
      *end_s = now;
    }
    *now_s = now;
    return place;
  }

  const int64_t stages_, chunks_, micro_batches_, total_, groups_;
  std::vector<int64_t> first_;            // each group's first micro-batch, and the number of all
  std::vector<Turn> order_;               // in which every stage runs forward passes
  std::vector<double> ahead_s_, back_s_;  // [part of the model][micro-batch] ends of passes
};

}  // namespace

void play_pipeline(int64_t stages, int64_t chunks, int64_t micro_batches, const double* forward_s,
                   const double* backward_s, double* ends_s) {
  const int64_t groups = std::max<int64_t>(1, micro_batches / stages);
  const int64_t size = micro_batches / groups, left = micro_batches % groups;
  // Groups of unequal sizes come one after the other if stages have chunks, and never keep step.
  const bool may_keep_step = left == 0 || chunks == 1;
  for (int64_t few = kSteadyGroups; few < groups && may_keep_step; few *= 4) {
    Play play(stages, chunks, few * size + left, few, size);
    play.run(forward_s, backward_s, ends_s);
    const double step_s = play.steady_step_s(ends_s[0]);
    if (std::isnan(step_s)) continue;
    for (int64_t stage = 0; stage < stages; ++stage)
      ends_s[stage] += static_cast<double>(groups - few) * step_s;
    return;
  }
  Play(stages, chunks, micro_batches, groups, size).run(forward_s, backward_s, ends_s);
}

}  // namespace whale
